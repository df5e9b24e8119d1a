"""Calls users' reward and metric functions, and checks what comes back.

The call is trlx's: `fn(samples=..., prompts=..., outputs=..., tokenizer=..., **columns)`. A failure
or an odd result is an error that names the function and the sample, never a silent zero.
"""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np


class RewardError(ValueError):
    """A reward or metric function failed, or returned what can't be used.

    rollouts: the samples that it was called with, as a dict each, where they are known.
    """

    rollouts: Sequence[dict] = ()


class Span(NamedTuple):
    """A score for a part of an output.

    start, end: characters of the output, `end` excluded.
    score: goes to the token that ends the part.
    """

    start: int
    end: int
    score: float


class Scores(NamedTuple):
    """Scores of `B` samples on the response grid of width `N`.

    grid: `[B, N]` float32; a scalar score lies on the row's last action, dense scores on theirs.
    totals: `[B]` float32, each sample's score. An empty response has nothing but this.
    dense: whether the function scored tokens.
    present: `[B]` bool, false where the function gave None: it does not apply to the sample.
    """

    grid: np.ndarray
    totals: np.ndarray
    dense: bool
    present: np.ndarray


def function_name(fn: Callable) -> str:
    """A name for messages."""
    fn = getattr(fn, "func", fn)  # functools.partial
    return getattr(fn, "__name__", None) or type(fn).__name__


def call_reward(
    fn: Callable,
    *,
    samples: Sequence[str],
    prompts: Sequence[str],
    outputs: Sequence[str],
    tokenizer: Any,
    columns: Mapping[str, list],
    lengths: Sequence[int],
    width: int,
    ends: Callable[[int], Sequence[int]] | None = None,
) -> Scores:
    """Scores samples.

    Args:
      fn: returns for each sample a number; a list of numbers, one a response token from the first
        on, the rest 0; a list of `Span`; None where it does not apply; or an exception where it
        failed for that sample alone. Lists of one number for all samples are scores of samples. Of
        the keywords it is given those that it takes, except what a `functools.partial` has bound;
        if it takes none, the samples by position. It gets copies of the lists.
      samples, prompts, outputs: `B` strings each; a sample is prompt and output together.
      tokenizer: passed on.
      columns: further keyword arguments, `B` values each.
      lengths: response tokens of each row.
      width: `N`.
      ends: `(row) -> characters of the output up to the end of each token`, for spans.

    Raises:
      RewardError: the function raised, or returned too few values, text, NaN, or more scores than
        there are tokens.
    """
    name = f"the reward function {function_name(fn)}"
    given = {"samples": samples, "prompts": prompts, "outputs": outputs, **columns}
    values = call_values(fn, name, given, tokenizer)
    scores, problems = read_scores(
        values, name=name, samples=samples, lengths=lengths, width=width, ends=ends
    )
    for problem in problems.values():
        raise RewardError(problem)
    return scores


def call_values(fn: Callable, name: str, lists: Mapping[str, Sequence], tokenizer: Any) -> list:
    """What a function returns for each of its samples, unread.

    Raises:
      RewardError: it raised, or returned something else than a value a sample.
    """
    return _sequence(_call(fn, name, lists, tokenizer), name, len(lists["samples"]))


def read_scores(
    values: Sequence,
    *,
    name: str,
    samples: Sequence[str],
    lengths: Sequence[int],
    width: int,
    ends: Callable[[int], Sequence[int]] | None = None,
) -> tuple[Scores, dict[int, str]]:
    """Reads what a reward function returned; see `call_reward`.

    Returns:
      The scores, and what is wrong with single samples, which have none: `{row: sentence}`.

    Raises:
      RewardError: some samples have a number and others a list.
    """
    grid = np.zeros((len(samples), width), np.float32)
    totals = np.zeros(len(samples), np.float32)
    values = [[value] if isinstance(value, Span) else _plain(value) for value in values]
    failed = {i: value for i, value in enumerate(values) if isinstance(value, Exception)}
    values = [None if i in failed else value for i, value in enumerate(values)]
    given = [value for value in values if value is not None]
    if all(_is_list(x) and len(x) == 1 and not _is_list(_plain(x[0])) for x in given):
        values = [None if value is None else value[0] for value in values]  # a column
    present = np.asarray([value is not None for value in values], bool)
    dense = [_is_list(_plain(value)) for value in values]
    if any(dense) and not all(x or not there for x, there in zip(dense, present)):
        scalar = next(i for i, x in enumerate(dense) if not x and present[i])
        raise RewardError(
            f"{name} returned a number for sample {scalar} and a list for sample "
            f"{dense.index(True)}; return the same kind for all"
        )
    problems = {
        i: f"{name} failed for sample {i}, {_snippet(samples[i])}: {' '.join(str(error).split())}"
        for i, error in failed.items()
    }
    for i in np.flatnonzero(present):

        def said(found, i=i):
            return f"{name} returned {found} for sample {i}, {_snippet(samples[i])}"

        try:
            row, totals[i] = _row(values[i], said, lengths[i], ends and functools.partial(ends, i))
            grid[i, : len(row)] = row
        except RewardError as error:
            problems[int(i)], present[i] = str(error), False
    return Scores(grid, totals, any(dense), present), problems


def _row(value, said, length: int, ends) -> tuple[np.ndarray, np.float32]:
    """A sample's scores, one a token from the first on, and their sum."""
    spans = _is_list(value) and len(value) > 0 and all(isinstance(x, Span) for x in value)
    if spans:
        scores = _numbers([span.score for span in value], said, axes=1)
    else:
        scores = _numbers(value, said, axes=int(_is_list(value)))
    with np.errstate(over="ignore", invalid="ignore"):  # looked for below
        scores, total = scores.astype(np.float32), scores.sum().astype(np.float32)
    if not np.isfinite([*scores.flat, total]).all():
        bad = next(x for x in (*scores.flat, total) if not np.isfinite(x))
        raise RewardError(said(bad) + "; scores must be finite")
    if spans:
        return _spread_spans(value, scores, said, ends), total
    if scores.ndim:
        if len(scores) > length:
            raise RewardError(said(f"{len(scores)} scores") + f", which has {length} tokens")
        return scores, total
    row = np.zeros(length, np.float32)
    row[-1:] = total  # an empty response has no place for it
    return row, total


def _spread_spans(spans, scores, said, ends) -> np.ndarray:
    """Each span's score on the token that ends it."""
    if ends is None:
        raise RewardError(said("spans") + ", but nothing is known of its tokens here")
    reached = np.asarray(ends(), int)
    row = np.zeros(len(reached), np.float32)
    for span, score in zip(spans, scores):
        if not 0 <= span.start < span.end:
            raise RewardError(said(f"{span}") + "; a span starts at 0 or later and is not empty")
        if not len(reached) or span.end > reached[-1]:
            raise RewardError(said(f"{span}") + ", which ends before that")
        row[np.searchsorted(reached, span.end)] += score
    return row


def call_metric(
    fn: Callable,
    *,
    samples: Sequence[str],
    prompts: Sequence[str],
    outputs: Sequence[str],
    columns: Mapping[str, list],
    tokenizer: Any = None,
) -> dict[str, list[float] | float]:
    """Computes metrics of samples: `{name: one number a sample, or one number}`.

    Raises:
      RewardError: the function raised, or returned something else; the metric is named.
    """
    name = f"the metric function {function_name(fn)}"
    given = {"samples": samples, "prompts": prompts, "outputs": outputs, **columns}
    found = _call(fn, name, given, tokenizer)
    if not isinstance(found, Mapping):
        raise RewardError(f"{name} returned a {type(found).__name__}, not a dict of metrics")
    metrics: dict[str, list[float] | float] = {}
    for key, values in found.items():

        def said(found, key=key):
            return f"{name} returned {found} as {key!r}"

        plain = _plain(values)
        if not _is_list(plain):
            metrics[str(key)] = float(_numbers(plain, said))
            continue
        if len(plain) != len(samples):
            raise RewardError(said(f"{len(plain)} values for {len(samples)} samples"))
        metrics[str(key)] = [float(_numbers(value, said)) for value in plain]
    return metrics


def _call(fn: Callable, name: str, lists: dict[str, Sequence], tokenizer: Any) -> Any:
    """Calls a function with those keywords that it takes; awaits what has to be awaited.

    The lists are copies: a function that sorts or empties its own does no harm to the caller's.
    """
    copies = {key: list(values) for key, values in lists.items()}
    args, accepted = _arguments(fn, {**copies, "tokenizer": tokenizer})
    try:
        result = fn(*args, **accepted)
        return _wait(result) if inspect.isawaitable(result) else result
    except (Exception, SystemExit) as error:  # sys.exit() would end a run as if it were done
        text = " ".join([f"{type(error).__name__}:", *str(error).split()])  # on one line
        raise RewardError(f"{name} raised {text.removesuffix(':')}") from error


def _wait(result: Awaitable) -> Any:
    """Awaits; in a thread where a loop runs already, as in notebooks."""

    async def awaited():
        return await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(awaited())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, awaited()).result()


def _arguments(fn: Callable, keywords: dict[str, Any]) -> tuple[list, dict[str, Any]]:
    """Those keywords that a function takes: by position what it takes only so, the rest by name."""
    samples = keywords["samples"]
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return [samples], {}
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    accepted = {key: value for key, value in keywords.items() if key not in bound}
    args = []
    for p in parameters:
        if p.kind is not p.POSITIONAL_ONLY or (args and p.name not in accepted):
            break
        args.append(accepted.pop(p.name if p.name in accepted else "samples", samples))
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        accepted = {key: value for key, value in accepted.items() if key in names}
        if not args and not accepted and parameters:  # such as `lambda texts: ...`
            args = [samples]
    return args, accepted


def _plain(value: Any) -> Any:
    """Arrays of any library become numpy arrays; of bfloat16, which numpy lacks, float32 ones."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if "bfloat16" in str(value.dtype) else value
    if not hasattr(value, "__array__"):
        return value
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _sequence(values: Any, name: str, count: int) -> list:
    values = _plain(values)
    if not _is_list(values):
        raise RewardError(
            f"{name} returned a {type(values).__name__}; it must return one score a sample"
        )
    if len(values) != count:
        raise RewardError(f"{name} returned {len(values)} values for {count} samples")
    return list(values)


def _numbers(value: Any, said: Callable[[str], str], axes: int = 0) -> np.ndarray:
    """A number, or with one axis a list of them, as float64; -inf, inf and NaN pass."""
    plain = _plain(value)
    try:
        array = np.asarray([_plain(x) for x in plain] if isinstance(plain, list | tuple) else plain)
        if array.dtype.kind not in "bifu" or array.ndim != axes:
            raise TypeError
        return array.astype(np.float64)
    except (TypeError, ValueError):
        shown = "None" if value is None else f"a {type(value).__name__} ({str(value)[:40]!r})"
        raise RewardError(said(shown) + "; scores must be numbers") from None


def _snippet(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
