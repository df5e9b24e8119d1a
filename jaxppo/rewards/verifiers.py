"""Rewards that check an answer: 1 for a right one, 0 for a wrong one.

Each function here makes a reward function. The right answers are a column of the prompts; where the
column holds None the reward does not apply. What was written can be wrong in any way and is then
worth 0; a right answer that can't be used is an error, since nothing could ever match it.
"""

import difflib
import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxppo.rewards.functions import RewardError

Extract = str | re.Pattern | Callable[[str], str | None] | None

# signs, thousands separators, decimals, exponents; then perhaps a denominator or a per cent sign
_NUMBER = re.compile(
    r"(?<![\w.])([-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|\.(?!\w)|(?<=\d))(?:[eE][-+]?\d+)?)"
    r"(?:\s*/\s*(\d+(?:\.\d+)?)(?![\w/]))?(\s*%)?"
)


def exact_answer(column: str = "answer", extract: Extract = None) -> Callable:
    """Makes a reward for outputs that are the right answer, letter for letter.

    Args:
      column: holds the right answers; what is no string is compared as its `str`.
      extract: finds the answer in an output: a regular expression, of whose last match the first
        group counts (or all of it), or a function that returns None where there is no answer. None:
        the whole output. White space around answers is passed over.
    """
    find = _finder(extract)

    def exact_answer(outputs, **columns):
        return [
            None if right is None else float(find(output) == str(right).strip())
            for output, right in zip(outputs, _column(columns, column, "exact_answer"))
        ]

    return exact_answer


def numeric_answer(
    column: str = "answer", extract: Extract = None, *, rtol: float = 1e-6, atol: float = 0.0
) -> Callable:
    """Makes a reward for outputs whose last number is the right one.

    Numbers are read as people write them: "-1,234.5", "+.5", "2e-3", "$5", "3/4", "12 %" (0.12).

    Args:
      column: holds the right answers, numbers or text whose last number counts.
      extract: as for `exact_answer`; the last number of what it finds counts.
      rtol, atol: how far off an answer may be, as a share of the right one and at all.
    """
    find = _finder(extract)

    def numeric_answer(outputs, **columns):
        scores: list[float | None] = []
        for i, (output, right) in enumerate(
            zip(outputs, _column(columns, column, "numeric_answer"))
        ):
            wanted = None if right is None else last_number(str(right))
            if right is not None and wanted is None:
                raise _unusable("numeric_answer", column, right, i, "it holds no number")
            found = last_number(find(output) or "")
            near = found is not None and wanted is not None
            near = near and math.isclose(found, wanted, rel_tol=rtol, abs_tol=atol)
            scores.append(None if right is None else float(near))
        return scores

    return numeric_answer


def last_number(text: str) -> float | None:
    """The last number in a text, or None; see `numeric_answer`."""
    found = None
    for match in _NUMBER.finditer(text):
        whole, denominator, percent = match.groups()
        try:
            value = float(whole.replace(",", "").replace("$", ""))
            value = value / float(denominator) if denominator else value
        except (ValueError, ZeroDivisionError):
            continue
        if math.isfinite(value):
            found = value / 100 if percent else value
    return found


def matches(pattern: str | re.Pattern, flags: int = 0, *, full: bool = True) -> Callable:
    """Makes a reward for outputs of a form.

    A pattern whose repeats contain repeats, such as `(a+)+b`, can take for ever on some text, and
    `Reward.timeout` can't help: a search holds up all threads of Python. Write patterns without.

    Args:
      pattern: a regular expression.
      flags: of `re`.
      full: whether the whole output has to match, white space around it apart, or a part of it.
    """
    compiled = _compiled(pattern, flags)

    def matches(outputs):
        found = compiled.fullmatch if full else compiled.search
        return [float(found(output.strip()) is not None) for output in outputs]

    return matches


def math_equal(column: str = "answer", extract: Extract = None) -> Callable:
    r"""Makes a reward for outputs that are mathematically equal to the right answer.

    The package math-verify reads both (LaTeX, `\boxed{}`, expressions, sets, intervals) and
    compares. It can think for very long about some expressions. `Reward(math_equal(), timeout=10)`
    ends most of that, but not arithmetic with enormous integers (`9^{9^{9}}`), during which no
    other thread of Python runs.

    Args:
      column: holds the right answers, as text or numbers.
      extract: as for `exact_answer`; None: the last expression in the output.

    Raises:
      RewardError: the extra `reasoning` is not installed.
    """
    try:
        from math_verify import parse, verify
    except ImportError:
        raise RewardError(
            "math_equal needs the package math-verify: pip install 'jaxppo[reasoning]'"
        ) from None
    # it warns at every call that it has no time limit; ours is `Reward.timeout`, since its own
    # works by signals, which only the main thread gets
    for name in ("math_verify", "math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    find = _finder(extract)

    def read(text: str) -> list:
        return parse(text, parsing_timeout=None)

    def math_equal(outputs, **columns):
        scores: list[float | None] = []
        for i, (output, right) in enumerate(zip(outputs, _column(columns, column, "math_equal"))):
            if right is None:
                scores.append(None)
                continue
            # bare text is looked through for expressions; a right answer is one as it stands
            wanted = read(f"${right}$") or read(str(right))
            if not wanted:
                raise _unusable("math_equal", column, right, i, "it is no expression")
            found = read(find(output) or "")
            scores.append(float(bool(found) and verify(wanted, found, timeout_seconds=None)))
        return scores

    return math_equal


def reasoning_task(
    name: str, *, size: int = 1000, seed: int = 0, extract: Extract = None, **options: Any
) -> tuple[list[dict], Callable]:
    """Makes the prompts and the reward of a task of the package reasoning-gym.

    Args:
      name: of the task, such as "chain_sum".
      size: number of prompts.
      seed: of the prompts.
      extract: as for `exact_answer`.
      **options: of the task.

    Returns:
      Prompts with the column "entry", and the task's own score of an output, from 0 to 1.

    Raises:
      RewardError: the extra `reasoning` is not installed, or the task or an option is unknown.
    """
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise RewardError(
            "reasoning_task needs the package reasoning-gym: pip install 'jaxppo[reasoning]'"
        ) from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 5, 0.4)
        raise RewardError(f"reasoning-gym has no task {name!r}; near it: {', '.join(near) or '-'}")
    try:
        dataset = create_dataset(name, size=size, seed=seed, **options)
    except Exception as error:  # each task checks its options in its own way
        text = " ".join(str(error).split())
        raise RewardError(f"reasoning-gym's task {name} refuses its options: {text}") from error
    prompts = [{"prompt": entry["question"], "entry": entry} for entry in dataset]
    find = _finder(extract)

    def reasoning_task(outputs, **columns):
        return [
            None if entry is None else float(dataset.score_answer(find(output), entry))
            for output, entry in zip(outputs, _column(columns, "entry", "reasoning_task"))
        ]

    return prompts, reasoning_task


def _column(columns: dict[str, list], name: str, verifier: str) -> Sequence:
    if name not in columns:
        known = sorted(set(columns) - {"samples", "prompts", "tokenizer"})
        raise RewardError(
            f"{verifier} compares with the column {name!r}, which the prompts do not have; they "
            f"have {', '.join(known) or 'none'}: pass dicts with a {name!r}, or name another column"
        )
    return columns[name]


def _finder(extract: Extract) -> Callable[[str], str | None]:
    """A function that finds the answer in an output; None where there is none."""
    if callable(extract):

        def called(output: str) -> str | None:
            found = extract(output)
            return None if found is None else str(found).strip()

        return called
    if extract is None:
        return str.strip
    compiled = _compiled(extract, 0)

    def searched(output: str) -> str | None:
        last = None
        for last in compiled.finditer(output):  # noqa: B007
            pass
        if last is None:
            return None
        return (last[1] if compiled.groups else last[0] or "").strip()

    return searched


def _compiled(pattern: str | re.Pattern, flags: int) -> re.Pattern:
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise RewardError(f"{pattern!r} is no regular expression: {error}") from None


def _unusable(verifier: str, column: str, right, row: int, why: str) -> RewardError:
    return RewardError(
        f"{verifier} can't use {str(right)[:60]!r}, the column {column!r} of sample {row}: {why}"
    )
