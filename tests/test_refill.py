"""Dynamic sampling, the greedy baseline and the exact KL in the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_train import PROMPTS, letter_share, make_tiny_config, read_lines, save_model

from jaxppo import Evaluation, Rollout, load_pretrained, make_evaluate, train
from jaxppo.collect import Collected
from jaxppo.programs import Scored
from jaxppo.refill import empty_surplus, refill

SIZE, R, P, N = 2, 6, 2, 3  # three groups of two a cycle


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "policy")


def drawing(totals, present=None):
    """`draw` that gives these totals; tokens tell the round and the row."""

    def draw(turn):
        rows = np.arange(R)
        tokens = jnp.broadcast_to((100 * turn + rows)[:, None], (R, N)).astype(jnp.int32)
        ones = jnp.ones((R, N), bool)
        old = Evaluation(*[jnp.full((R, N), -1.0 - turn)] * 3)
        return Collected(
            rollout=Rollout(jnp.zeros((R, P), jnp.int32), jnp.ones((R, P), bool), tokens, ones),
            grid=np.zeros((R, N), np.float32),
            totals=np.asarray(totals[turn], np.float32),
            present=np.ones(R, bool) if present is None else np.asarray(present[turn]),
            ended=np.ones(R, bool),
            scored=Scored(old, old.logprobs, jnp.zeros(R)),
            samples=[], prompts=[], outputs=[],
            stats={"rollout/ended": float(turn)}, times={"time/rollout_time": 1.0},
        )  # fmt: skip

    return draw


def rescored(rollout):
    old = Evaluation(*[jnp.full((R, N), -9.0)] * 3)
    return Scored(old, old.logprobs, jnp.ones(R))


def filled(totals, surplus=None, rounds=4, **options):
    surplus = surplus or empty_surplus(R, P, N, kept=False, seen=False)
    return refill(drawing(totals, **options), rescored, surplus, size=SIZE, rounds=rounds)


def ids(collected):
    return np.asarray(collected.rollout.tokens[:, 0]).tolist()


def test_groups_without_signal_are_replaced_and_the_rest_is_kept():
    collected, surplus, rounds = filled([[1, 1, 0, 1, 0, 0], [0, 1, 1, 0, 1, 0]])
    assert ids(collected) == [2, 3, 100, 101, 102, 103]
    assert collected.totals.tolist() == [0, 1, 0, 1, 1, 0]
    assert (rounds, int(surplus.count)) == (2, 2)
    assert np.asarray(surplus.rollout.tokens[:2, 0]).tolist() == [104, 105]
    np.testing.assert_array_equal(surplus.behaviour[:2], -2.0)
    assert collected.stats == {"rollout/ended": 0.5, "rollout/rounds": 2.0, "rollout/surplus": 2}
    assert collected.times == {"time/rollout_time": 2.0}

    # the next cycle begins with what was kept: new weights' log-probs, and those that drew it
    collected, surplus, rounds = filled([[0, 1, 1, 0, 1, 1]], surplus)
    assert ids(collected) == [104, 105, 0, 1, 2, 3]
    assert np.asarray(collected.behaviour[:, 0]).tolist() == [-2, -2, -1, -1, -1, -1]
    assert np.asarray(collected.scored.old.logprobs[:, 0]).tolist() == [-9, -9, -1, -1, -1, -1]
    assert np.asarray(collected.scored.gap).tolist() == [0.0] * R
    assert (rounds, int(surplus.count)) == (1, 0)


def test_figures_of_several_draws_add_up_or_are_averaged_over_those_that_have_them():
    draw = drawing([[1, 1, 0, 1, 0, 0], [0, 1, 1, 0, 1, 0]])
    figures = [
        {"rollout/ended": 0.0, "rewards/a/dropped": 1.0, "rewards/a/mean": 3.0},
        {"rollout/ended": 1.0, "rewards/a/dropped": 2.0},
    ]
    collected, *_ = refill(
        lambda turn: draw(turn)._replace(stats=figures[turn]),
        rescored, empty_surplus(R, P, N, kept=False, seen=False), size=SIZE, rounds=4,
    )  # fmt: skip
    assert collected.stats["rollout/ended"] == 0.5
    assert collected.stats["rewards/a/dropped"] == 3.0
    assert collected.stats["rewards/a/mean"] == 3.0  # not half of it: one draw scored nothing


def test_where_rounds_are_over_groups_without_signal_fill_up():
    collected, surplus, rounds = filled([[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], rounds=2)
    assert ids(collected)[:2] == [0, 1]
    assert len(collected.totals) == R
    assert (rounds, int(surplus.count)) == (2, 0)


def test_missing_scores_are_no_signal():
    present = [[True, False, True, True, True, True]]
    collected, _, _ = filled([[0, 5, 0, 1, 1, 0]], present=present, rounds=1)
    assert ids(collected) == [2, 3, 4, 5, 0, 1]


def run(model, folder, reward, **options):
    options = {
        "method__name": "dapo", "method__group_size": 4, "train__total_steps": 16,
        "train__checkpoint_interval": 4, **options,
    }  # fmt: skip
    return train(model, reward, PROMPTS, config=make_tiny_config(folder, **options))


def rare(outputs, **_):
    """Mostly alike within a group."""
    return [float("a" in output) for output in outputs]


def cycles(folder):
    return [row for row in read_lines(folder / "metrics.jsonl") if "losses/total_loss" in row]


def test_a_run_trains_on_groups_with_signal_and_resumes_with_its_surplus(folder, tmp_path):
    calls = []

    def dying(outputs, **_):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return rare(outputs)

    options = {
        "method__dynamic_rounds": 6, "method__gen_kwargs__top_k": 12, "optimizer__kwargs__lr": 1e-3,
    }  # fmt: skip
    whole = run(folder, tmp_path / "whole", rare, **options)
    rows = cycles(tmp_path / "whole")
    assert {row["rollout/groups_with_signal"] for row in rows} == {1.0}
    assert max(row["rollout/rounds"] for row in rows) > 1
    assert max(row["rollout/surplus"] for row in rows) > 0
    assert max(row["rollout/logprob_gap"] for row in rows) < 1e-5
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "killed", dying, **options)
    resumed = run(folder, tmp_path / "killed", rare, **options)
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    assert cycles(tmp_path / "killed") == rows


def test_remax_compares_with_the_greedy_response(folder, tmp_path):
    seen = []

    def reward(prompts, outputs):
        seen.append((list(prompts), list(outputs)))
        return letter_share(outputs)

    run(folder, tmp_path, reward, method__name="remax", method__group_size=1)
    (sampled, _), (greedy, texts) = seen[1:3]  # 0 is the evaluation
    assert sampled == greedy
    per_prompt = {}
    for prompt, text in zip(greedy, texts):
        assert per_prompt.setdefault(prompt, text) == text
    row = cycles(tmp_path)[0]
    assert row["rollout/greedy_score"] == pytest.approx(np.mean(letter_share(texts)))
    lead = row["rollout_scores/mean"] - row["rollout/greedy_score"]
    # the mean over tokens weighs long responses more; both are about the same here
    assert row["rollout/advantage_mean"] == pytest.approx(lead, abs=0.1)


def test_remax_learns(folder, tmp_path):
    trained = run(
        folder, tmp_path, letter_share, method__name="remax", method__group_size=1,
        train__total_steps=80, train__eval_interval=80, method__init_kl_coef=0.0,
    )  # fmt: skip
    figures = trained.summary["reward/mean"]
    assert figures["after"] > figures["before"] + 0.2


def test_the_exact_kl_of_evaluate_is_the_sum_over_the_vocabulary(folder):
    model, params, _ = load_pretrained(folder)
    other = model.init(jax.random.key(7))
    tokens = jax.random.randint(jax.random.key(0), (3, 7), 0, 20)
    ones = jnp.ones((3, 7), bool)
    rollout = Rollout(tokens[:, :2], ones[:, :2], tokens[:, 2:], ones[:, 2:])
    seen = make_evaluate(model, temperature=0.7)(params, rollout, other)
    log_p, log_q = (
        np.asarray(jax.nn.log_softmax(model.logits(p, tokens)[:, 1:-1] / 0.7), np.float64)
        for p in (params, other)
    )
    np.testing.assert_allclose(seen.kl, (np.exp(log_p) * (log_p - log_q)).sum(-1), rtol=1e-4)
    gradient = jax.grad(lambda q: make_evaluate(model)(params, rollout, q).kl.sum())(other)
    assert not any(np.any(x) for x in jax.tree.leaves(gradient))  # the reference is a constant


def test_the_exact_kl_in_the_loss_holds_the_policy(folder, tmp_path):
    distance = {}
    for coef in (0.0, 1.0):
        trained = run(
            folder, tmp_path / str(coef), letter_share, method__name="grpo",
            method__kl_loss_estimator="exact", method__init_kl_coef=coef, train__total_steps=40,
            train__eval_interval=40,
        )  # fmt: skip
        distance[coef] = trained.summary["eval/kl"]["after"]
    assert 0 < distance[1.0] < 0.5 * distance[0.0]
    row = cycles(tmp_path / "1.0")[0]
    assert row["losses/kl_loss"] >= 0
