"""Several rewards: weights, what does not apply, spans, and every failure policy."""

import asyncio
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from jaxppo import Reward, RewardError, Span
from jaxppo.rewards.scoring import add_tallies, as_rewards, score_samples, tally_metrics

OUTPUTS = ["a", "bb", "ccc", ""]
LENGTHS, WIDTH = [1, 2, 3, 0], 4


def scored(rewards, ends=None, **columns):
    return score_samples(
        as_rewards(rewards), samples=[f"p{x}" for x in OUTPUTS], prompts=["p"] * 4,
        outputs=OUTPUTS, tokenizer=None, columns=columns, lengths=LENGTHS, width=WIDTH, ends=ends,
    )  # fmt: skip


def length(outputs):
    return [float(len(text)) for text in outputs]


def ones(outputs):
    return [1.0] * len(outputs)


def flaky(fails, answer=length):
    """A function that raises in its first calls, and what it was called with."""
    calls = []

    def sometimes(outputs):
        calls.append(list(outputs))
        if len(calls) <= fails:
            raise ConnectionError("no route")
        return answer(outputs)

    return sometimes, calls


def test_weights_add_up_and_every_reward_is_told_apart():
    def tokens(outputs):
        return [[0.5] * len(text) for text in outputs]

    scores, tallies = scored([Reward(length, weight=2.0), Reward(tokens, "each", weight=-1.0)])
    np.testing.assert_allclose(scores.totals, [1.5, 3.0, 4.5, 0.0])
    np.testing.assert_allclose(scores.grid[2], [-0.5, -0.5, 5.5, 0.0])
    assert scores.present.all()
    assert scores.dense
    metrics = tally_metrics(tallies)
    assert metrics["rewards/length/mean"] == 1.5
    assert metrics["rewards/length/std"] == pytest.approx(np.std([1, 2, 3, 0]))
    assert metrics["rewards/each/mean"] == 0.75
    assert tallies["each"].failures == tallies["each"].none == 0
    both = add_tallies([tallies, tallies])
    assert (both["length"].scored, both["length"].total) == (8, 12.0)


def test_a_reward_that_does_not_apply_adds_nothing_and_is_not_averaged():
    def long_ones(outputs):
        return [1.0 if len(text) > 2 else None for text in outputs]

    def short_ones(outputs):
        return [None if len(text) > 2 or not text else -1.0 for text in outputs]

    scores, tallies = scored([long_ones, short_ones])
    np.testing.assert_array_equal(scores.totals, [-1, -1, 1, 0])
    np.testing.assert_array_equal(scores.present, [True, True, True, False])
    assert (tallies["long_ones"].none, tallies["short_ones"].none) == (3, 2)
    assert tally_metrics(tallies)["rewards/long_ones/mean"] == 1.0
    nothing, tallies = scored(lambda outputs: [None] * len(outputs))
    assert not nothing.present.any()
    assert not any("mean" in name for name in tally_metrics(tallies))


def test_spans_are_paid_at_the_token_that_ends_them():
    def spans(outputs):
        return [[], [Span(0, 1, 1.0), Span(0, 2, 2.0)], Span(1, 3, 4.0), []]

    ends = lambda row: np.cumsum([1] * LENGTHS[row])  # noqa: E731
    scores, _ = scored(spans, ends)
    np.testing.assert_array_equal(scores.grid[:3], [[0, 0, 0, 0], [1, 2, 0, 0], [0, 0, 4, 0]])
    np.testing.assert_array_equal(scores.totals, [0, 3, 4, 0])
    # two characters a token: both spans end in the first
    scores, _ = scored(spans, lambda row: np.cumsum([2] * LENGTHS[row]))
    np.testing.assert_array_equal(scores.grid[1], [3, 0, 0, 0])
    for span in (Span(0, 9, 1.0), Span(2, 2, 1.0), Span(-1, 1, 1.0), Span(0, 1, float("nan"))):
        with pytest.raises(RewardError, match="for sample 0"):
            scored(lambda outputs, span=span: [span] * len(outputs), ends)


def test_raise_is_the_default_and_asks_once():
    function, calls = flaky(1)
    with pytest.raises(RewardError, match="reward function sometimes raised ConnectionError"):
        scored(function)
    assert len(calls) == 1


def test_retry_asks_again_and_then_raises():
    function, calls = flaky(2)
    scores, tallies = scored(Reward(function, on_error="retry", backoff=0.0))
    np.testing.assert_array_equal(scores.totals, [1, 2, 3, 0])
    assert len(calls) == 3
    assert tallies["sometimes"].failures == 2
    function, calls = flaky(9)
    with pytest.raises(RewardError, match=r"no route \(tried 3 times\)"):
        scored(Reward(function, on_error="retry", backoff=0.0))
    assert len(calls) == 3


def test_only_samples_without_an_answer_are_asked_again():
    asked = []

    def picky(outputs, tag):
        asked.append(list(tag))
        return [float("nan") if t == 1 and len(asked) < 3 else 1.0 for t in tag]

    reward = Reward(picky, on_error="retry", backoff=0.0)
    scores, tallies = scored(reward, tag=[0, 1, 2, 3])
    assert asked == [[0, 1, 2, 3], [1], [1]]
    assert scores.present.all()
    assert tallies["picky"].failures == 2


def test_dropped_samples_are_counted_and_never_zeros():
    def odd(outputs):
        return ["no", 2.0, 3.0, float("inf")][-len(outputs) :]

    reward = Reward(odd, on_error="drop", retries=0)
    scores, tallies = scored([ones, reward])
    np.testing.assert_array_equal(scores.present, [False, True, True, False])
    np.testing.assert_array_equal(scores.totals[1:3], [3.0, 4.0])
    assert tallies["odd"].dropped == 2
    assert tally_metrics(tallies)["rewards/odd/mean"] == 2.5
    function, calls = flaky(9)
    scores, _ = scored(Reward(function, on_error="drop", retries=1, backoff=0.0))
    assert not scores.present.any()
    assert len(calls) == 2


def test_waits_grow_from_call_to_call(monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    function, _ = flaky(9)
    scored(Reward(function, on_error="drop", retries=8, backoff=1.0))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_call_that_takes_too_long_is_a_failure(kind):
    def plain(outputs):
        time.sleep(30)

    async def slow(outputs):
        await asyncio.sleep(30)

    function = plain if kind == "plain" else slow
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"took more than 0\.05 s"):
        scored(Reward(function, timeout=0.05))
    scores, _ = scored([ones, Reward(function, on_error="drop", retries=0, timeout=0.05)])
    assert not scores.present.any()
    assert time.monotonic() - began < 20


def test_a_hung_call_does_not_keep_the_process(tmp_path):
    code = """
    import time
    from jaxppo.rewards.scoring import Reward, as_rewards, score_samples
    rewards = as_rewards(Reward(lambda outputs: time.sleep(600), "hung", timeout=0.1))
    score_samples(rewards, samples=["a"], prompts=[""], outputs=["a"], tokenizer=None,
                  columns={}, lengths=[1], width=1)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "hung took more than 0.1 s" in done.stderr


def test_a_timeout_passes_errors_and_answers_on():
    with pytest.raises(RewardError, match="raised ConnectionError"):
        scored(Reward(flaky(1)[0], timeout=60.0))
    scores, _ = scored(Reward(length, timeout=60.0))
    np.testing.assert_array_equal(scores.totals, [1, 2, 3, 0])


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "no rewards"),
        ([3], "not a int"),
        ([length, length], "two rewards are called 'length'"),
        (Reward(length, on_error="ignore"), "must be one of raise, retry, drop"),
        (Reward(length, retries=-1), "retries of reward length is -1"),
        (Reward(length, timeout=0), "timeout of reward length is 0"),
        (Reward(length, weight=float("nan")), "weight of reward length"),
    ],
)
def test_rewards_that_make_no_sense_are_refused(rewards, message):
    with pytest.raises(RewardError, match=message):
        as_rewards(rewards)
