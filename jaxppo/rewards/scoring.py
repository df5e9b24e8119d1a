"""Several rewards with names and weights, and what happens when one of them fails.

A failure is an exception, a time-out, a wrong number of values, or a value that can't be used. It
is raised, tried again, or costs its samples their place in the batch; it is never a zero.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxppo.rewards.functions import (
    RewardError,
    Scores,
    call_values,
    function_name,
    read_scores,
)

POLICIES = ("raise", "retry", "drop")


class Reward(NamedTuple):
    """A reward function and how it is called.

    function: as for `train`; may be async.
    name: in metrics; None: the function's.
    weight: what its scores are multiplied by.
    on_error: "raise" ends the run at the first failure; "retry" calls again for the samples that
      have no score, `retries` times, and then ends the run; "drop" does the same, and then those
      samples leave the batch, counted.
    retries: further calls.
    backoff: seconds before the first of them; each further wait is twice as long, a minute at most.
    timeout: seconds that one call may take; None: as long as it wants. What is cut off goes on in a
      thread of its own that nothing waits for.
    """

    function: Callable
    name: str | None = None
    weight: float = 1.0
    on_error: str = "raise"
    retries: int = 2
    backoff: float = 1.0
    timeout: float | None = None


class Tally(NamedTuple):
    """What one reward did; tallies of several chunks add up.

    total, squares, scored: sum and sum of squares of its unweighted scores, and their number.
    none: samples that it did not apply to.
    dropped: samples that left the batch because of it.
    failures: calls, or samples in them, that failed, whatever became of them.
    seconds: spent in it, waits included.
    """

    total: float = 0.0
    squares: float = 0.0
    scored: int = 0
    none: int = 0
    dropped: int = 0
    failures: int = 0
    seconds: float = 0.0


def as_rewards(rewards: Callable | Reward | Sequence[Callable | Reward]) -> tuple[Reward, ...]:
    """One reward or several as a tuple in which each has a name.

    Raises:
      RewardError: something is not callable, an option is out of range, or two have one name.
    """
    several = list(rewards) if isinstance(rewards, list | tuple) else [rewards]
    if isinstance(rewards, Reward):
        several = [rewards]
    if not several:
        raise RewardError("there are no rewards in the list; give at least one function")
    named = []
    for reward in several:
        reward = reward if isinstance(reward, Reward) else Reward(reward)
        if not callable(reward.function):
            raise RewardError(
                f"a reward must be a function or a Reward, not a {type(reward.function).__name__}"
            )
        reward = reward._replace(name=reward.name or function_name(reward.function))
        if reward.on_error not in POLICIES:
            raise RewardError(
                f"on_error of reward {reward.name} must be one of {', '.join(POLICIES)}, "
                f"got {reward.on_error!r}"
            )
        for option, least in (("retries", 0), ("backoff", 0), ("timeout", 1e-9)):
            value = getattr(reward, option)
            if value is not None and not value >= least:
                raise RewardError(f"{option} of reward {reward.name} is {value!r}: too small")
        if not np.isfinite(reward.weight):
            raise RewardError(f"weight of reward {reward.name} is {reward.weight!r}: not a number")
        named.append(reward)
    names = [reward.name for reward in named]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RewardError(f"two rewards are called {sorted(twice)[0]!r}; give one another name")
    return tuple(named)


def score_samples(
    rewards: Sequence[Reward],
    *,
    samples: Sequence[str],
    prompts: Sequence[str],
    outputs: Sequence[str],
    tokenizer: Any,
    columns: Mapping[str, list],
    lengths: Sequence[int],
    width: int,
    ends: Callable[[int], Sequence[int]] | None = None,
    earned: np.ndarray | None = None,
) -> tuple[Scores, dict[str, Tally]]:
    """Adds up the weighted scores of all rewards.

    Args:
      rewards: from `as_rewards`.
      samples ... ends: as for `call_reward`.
      earned: `[B, N]`, scores that the samples have already, from an environment.

    Returns:
      The scores, in which a sample is present if a reward applies to it and none dropped it, and
      the tally of each reward.

    Raises:
      RewardError: a reward failed, and its policy does not pass over it.
    """
    B = len(samples)
    whole = _no_scores(B, width)
    if earned is not None:
        whole = Scores(earned, earned.sum(1), True, np.ones(B, bool))
    given = {"samples": samples, "prompts": prompts, "outputs": outputs, **columns}
    dropped, tallies = np.zeros(B, bool), {}
    for reward in rewards:
        scores, lost, tallies[reward.name] = _score_by_one(
            reward, given, tokenizer, lengths, width, ends
        )
        whole = Scores(
            whole.grid + np.float32(reward.weight) * scores.grid,
            whole.totals + np.float32(reward.weight) * scores.totals,
            whole.dense or scores.dense,
            whole.present | scores.present,
        )
        dropped |= lost
    return whole._replace(present=whole.present & ~dropped), tallies


def _score_by_one(
    reward: Reward, given: dict[str, Sequence], tokenizer, lengths, width: int, ends
) -> tuple[Scores, np.ndarray, Tally]:
    """Calls one reward until every sample has its answer, or the policy says that it is enough."""
    name = f"the reward function {reward.name}"
    B, began, failures = len(given["samples"]), time.perf_counter(), 0
    scores = _no_scores(B, width)
    pending = np.arange(B)
    tries = 1 if reward.on_error == "raise" else 1 + reward.retries
    problems: dict[int, str] = {}
    for attempt in range(tries):
        if attempt:
            time.sleep(min(reward.backoff * 2 ** (attempt - 1), 60.0))
        part = {key: [values[i] for i in pending] for key, values in given.items()}
        call = partial(call_values, reward.function, name, part, tokenizer)
        cause = None
        try:
            values = _within(reward.timeout, call, name)
            found, problems = read_scores(
                values,
                name=name,
                samples=part["samples"],
                lengths=[lengths[i] for i in pending],
                width=width,
                ends=ends and (lambda row, pending=pending: ends(pending[row])),
            )
        except RewardError as error:
            failures, cause = failures + 1, error
            problems = dict.fromkeys(range(len(pending)), str(error))
        else:
            failures += len(problems)
            for field in ("grid", "totals", "present"):
                getattr(scores, field)[pending] = getattr(found, field)
            scores = scores._replace(dense=scores.dense or found.dense)
        pending = pending[sorted(problems)]
        if not len(pending):
            break
    lost = np.zeros(B, bool)
    if len(pending):
        if reward.on_error != "drop":
            after = f" (tried {tries} times)" if tries > 1 else ""
            raise RewardError(next(iter(problems.values())) + after) from cause
        lost[pending] = True
    values = scores.totals[scores.present].astype(np.float64)
    tally = Tally(
        total=float(values.sum()),
        squares=float(np.square(values).sum()),
        scored=len(values),
        none=int(B - len(values) - lost.sum()),
        dropped=int(lost.sum()),
        failures=failures,
        seconds=time.perf_counter() - began,
    )
    return scores, lost, tally


def _no_scores(count: int, width: int) -> Scores:
    grid, totals = np.zeros((count, width), np.float32), np.zeros(count, np.float32)
    return Scores(grid, totals, False, np.zeros(count, bool))


def add_tallies(several: Sequence[Mapping[str, Tally]]) -> dict[str, Tally]:
    """The sums of tallies of several chunks."""
    names = several[0] if several else ()
    return {name: Tally(*map(sum, zip(*(part[name] for part in several)))) for name in names}


def tally_metrics(tallies: Mapping[str, Tally]) -> dict[str, float]:
    """Metrics `rewards/<name>/{mean, std, none, dropped, failures}` and `time/reward_<name>`.

    Mean and standard deviation are left out where a reward scored nothing.
    """
    metrics: dict[str, float] = {}
    for name, tally in tallies.items():
        if tally.scored:
            mean = tally.total / tally.scored
            variance = max(tally.squares / tally.scored - mean**2, 0.0)
            metrics |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": variance**0.5}
        for field in ("none", "dropped", "failures"):
            metrics[f"rewards/{name}/{field}"] = float(getattr(tally, field))
        metrics[f"time/reward_{name}"] = tally.seconds
    return metrics


def _within(seconds: float | None, call: Callable[[], Any], name: str) -> Any:
    """Calls, and raises RewardError if it takes longer; a daemon thread then keeps the call."""
    if seconds is None:
        return call()
    answer: queue.SimpleQueue = queue.SimpleQueue()

    def run():
        try:
            answer.put((call(), None))
        except BaseException as error:  # whatever it is, the caller raises it
            answer.put((None, error))

    threading.Thread(target=run, daemon=True, name="reward").start()
    try:
        value, error = answer.get(timeout=seconds)
    except queue.Empty:
        raise RewardError(f"{name} took more than {seconds:g} s") from None
    if error is not None:
        raise error
    return value
