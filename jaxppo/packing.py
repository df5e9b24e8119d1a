"""Rows of a token budget out of ragged samples: where each token stands, as index arrays.

Made on the host, of lengths alone; nothing here knows a model. What is packed is what a model is
fed: a sample's prompt and its response but for the last token, which predicts nothing. Samples with
the same prompt share it: it stands once in a row, and responses behind it see it and themselves.

The shapes of a pack come from a short list, `rungs`, so that a run compiles few programs: a
micro-batch has as many slots as the smallest rung that its tokens fit in, and never more than the
budget.

Letters: `S` samples, `P` and `N` widths of the grids of prompts and responses, `M` micro-batches,
`R` rows of one, `L` slots of a row, `A` actions of a micro-batch.
"""

from typing import Any, NamedTuple

import numpy as np


class PackingError(ValueError):
    """A sample that no row has room for."""


class Layout(NamedTuple):
    """What the shapes of packs follow from.

    budget: most slots of a micro-batch, a hard bound.
    row: fewest slots of a row, no fewer than the longest sample. Longer rows waste fewer slots;
      shorter ones cost less attention, which grows with the square.
    """

    budget: int
    row: int


class Slots(NamedTuple):
    """What stands in the slots of a micro-batch; with a leading `M` that of several.

    source: `[R, L]` int32, the token's place in the flat grid `[S, P+N]` of prompts and responses
      side by side; -1 where there is none.
    segments: `[R, L]` int32, tokens of different ones do not see each other; 0: no token.
    branches: `[R, L]` int32, 0 in prompts, else the number of the response within its segment. A
      token sees branch 0 and its own.
    positions: `[R, L]` int32, from the segment's start, along the token's own branch.
    states: `[A]` int32, the flat slot whose state predicts the action.
    targets: `[A]` int32, the action's place in the flat grid `[S, N]`; `S * N`: no action.
    own: `[S]` bool, the samples whose actions are here. Each is in one micro-batch.
    """

    source: Any
    segments: Any
    branches: Any
    positions: Any
    states: Any
    targets: Any
    own: Any


class Pack(NamedTuple):
    """Samples in micro-batches.

    slots: all micro-batches, `M` a power of two.
    count: int32 scalar, how many of them there are; the rest of the `M` is empty.
    """

    slots: Slots
    count: Any


def make_layout(
    prompt: int, new: int, *, group: int = 1, budget: int | None = None, row: int | None = None
) -> Layout:
    """Chooses the layout for samples of at most `prompt + new` tokens.

    Args:
      prompt, new: `P` and `N`, the most tokens of a prompt and of a response.
      group: samples that share a prompt.
      budget: most tokens of a micro-batch. None: 2,048, or the length of a row if that is more.
      row: fewest slots of a row. None: enough for a group, up to 1,024; at least 256; always
        enough for the longest sample.

    Raises:
      PackingError: a budget that the longest sample exceeds.
    """
    longest = prompt + max(new - 1, 0)
    if budget is not None and budget < longest:
        raise PackingError(
            f"a budget of {budget} tokens has no room for a prompt of {prompt} and a response of "
            f"{new}, of which {longest} tokens are fed: raise it"
        )
    together = prompt + group * max(new - 1, 0) if group > 1 else longest
    row = row or max(256, min(together, 1024))
    row = max(longest, row)
    budget = budget or max(2048, row)
    return Layout(budget, min(row, budget))


def rungs(layout: Layout) -> list[int]:
    """The numbers of slots that a micro-batch may have, ascending: 16 to a doubling."""
    least, most = layout.row, layout.budget
    sizes = {m << e for e in range(most.bit_length()) for m in range(16, 32)}
    return sorted(size for size in sizes | {most} if least <= size <= most)


def shape_of(slots: int, layout: Layout) -> tuple[int, int]:
    """`(R, L)` of a rung: the most rows, a power of two, that are no shorter than `layout.row`."""
    rows = 1 << ((slots // layout.row).bit_length() - 1)
    return rows, slots // rows


def shape_bound(layout: Layout, micro_batches: int) -> int:
    """How many shapes packs of at most so many micro-batches can have, if no prompt is shared.

    Shared prompts of a few tokens can have more actions than slots, and so a few shapes more.
    """
    return len(rungs(layout)) * 8 * (1 + (micro_batches - 1).bit_length())


def pack(
    prompt_lengths,
    lengths,
    *,
    prompt: int,
    new: int,
    layout: Layout,
    same_prompt=None,
) -> Pack:
    """Packs samples, first-fit decreasing.

    Args:
      prompt_lengths: `[S]` ints, real tokens of the prompts, which are padded on the left.
      lengths: `[S]` ints, real tokens of the responses, padded on the right. Samples without any
        are left out.
      prompt, new: `P` and `N`, the widths of the grids.
      layout: see `make_layout`.
      same_prompt: `[S]` ints, equal for samples whose prompts are equal; None: share none.

    Returns:
      A Pack of numpy arrays. Its shapes depend on the lengths only through a rung, an eighth of
      it (`A`), and a power of two (`M`).

    Raises:
      PackingError: a sample longer than a row, or one with a response but no prompt.
    """
    prompt_lengths, lengths = (np.asarray(x, np.int64) for x in (prompt_lengths, lengths))
    groups = _groups(prompt_lengths, lengths, same_prompt, layout)
    total = sum(at + sum(lengths[s] - 1 for s in samples) for at, samples in groups)
    sizes, count = rungs(layout), max(1, -(-total // layout.budget))
    while True:  # ends: with a row for each sample there is room
        for slots in sizes:
            if slots * count < total:
                continue
            R, L = shape_of(slots, layout)
            rows = _place(groups, lengths, count * R, L)
            if rows is not None:
                grid = (prompt_lengths, lengths, prompt, new)
                return _fill(_deal(rows, lengths, count), *grid, R=R, L=L)
        count += 1


def equal_rows(*arrays) -> np.ndarray:
    """Numbers the rows of arrays `[S, ...]`: `[S]`, the same for rows that are equal in all."""
    seen: dict[tuple[bytes, ...], int] = {}
    rows = zip(*(np.ascontiguousarray(x) for x in arrays))
    return np.array([seen.setdefault(tuple(x.tobytes() for x in row), len(seen)) for row in rows])


def useful_share(packs: list[Pack]) -> float:
    """The share of the slots of used micro-batches that hold a token."""
    used = [p.slots.source[: int(p.count)] for p in packs]
    return sum(int((x >= 0).sum()) for x in used) / sum(x.size for x in used)


def _groups(prompt_lengths, lengths, same_prompt, layout) -> list[tuple[int, list[int]]]:
    """`(prompt length, samples, the longest first)` of each prompt, by size, the largest first."""
    members: dict[int, list[int]] = {}
    for s in np.flatnonzero(lengths > 0):
        size = prompt_lengths[s] + lengths[s] - 1
        if size > layout.row or prompt_lengths[s] < 1:
            wrong = f"and is longer than a row of {layout.row}: raise the budget"
            wrong = wrong if prompt_lengths[s] else ": begin empty prompts with a BOS token"
            raise PackingError(
                f"sample {s} has {prompt_lengths[s]} prompt and {lengths[s]} response tokens{wrong}"
            )
        members.setdefault(s if same_prompt is None else int(same_prompt[s]), []).append(int(s))
    groups = [
        (int(prompt_lengths[m[0]]), sorted(m, key=lambda s: -lengths[s])) for m in members.values()
    ]
    return sorted(groups, key=lambda g: -_size(g, lengths))


def _size(group, lengths) -> int:
    return group[0] + sum(int(lengths[s]) - 1 for s in group[1])


def _place(groups, lengths, rows: int, L: int) -> list[list[tuple[int, list[int]]]] | None:
    """The groups that stand in each of `rows` rows, or None where they do not fit.

    A group goes into the first row with room; one that no row has room for is cut: as many of its
    samples as fit into the emptiest row stand there, the others start again with the prompt.
    """
    free, placed = [L] * rows, [[] for _ in range(rows)]
    waiting = list(groups)
    while waiting:
        group = waiting.pop(0)
        size = _size(group, lengths)
        row = next((i for i in range(rows) if free[i] >= size), None)
        if row is None:
            at, samples = group
            row = int(np.argmax(free))
            room, inside, rest = free[row] - at, [], []
            for s in samples:
                fits = lengths[s] - 1 <= room
                room -= (int(lengths[s]) - 1) * bool(fits)
                (inside if fits else rest).append(s)
            if room < 0 or not inside:
                return None
            group, size = (at, inside), _size((at, inside), lengths)
            left = (at, rest)
            where = next(
                (i for i, g in enumerate(waiting) if _size(g, lengths) < _size(left, lengths)),
                len(waiting),
            )
            waiting.insert(where, left)
        free[row] -= size
        placed[row].append(group)
    return placed


def _deal(rows, lengths, count: int) -> list[list]:
    """Deals rows to micro-batches, to and fro, so that each has about as many actions."""
    actions = lambda row: sum(int(lengths[s]) for _, samples in row for s in samples)  # noqa: E731
    parts = [[] for _ in range(count)]
    for i, row in enumerate(sorted(rows, key=actions, reverse=True)):
        turn, place = divmod(i, count)
        parts[count - 1 - place if turn % 2 else place].append(row)
    return parts


def _fill(parts, prompt_lengths, lengths, P: int, N: int, *, R: int, L: int) -> Pack:
    """Writes the index arrays."""
    S, M = len(lengths), 1 << (len(parts) - 1).bit_length()
    source = np.full((M, R, L), -1, np.int32)
    segments, branches, positions = (np.zeros((M, R, L), np.int32) for _ in range(3))
    own = np.zeros((M, S), bool)
    states, targets = [[] for _ in range(M)], [[] for _ in range(M)]
    for m, rows in enumerate(parts):
        for r, groups in enumerate(rows):
            at = 0
            for g, (length, samples) in enumerate(groups):
                begin, at = at, at + length
                source[m, r, begin:at] = samples[0] * (P + N) + P - length + np.arange(length)
                positions[m, r, begin:at] = np.arange(length)
                for b, s in enumerate(samples):
                    n = int(lengths[s]) - 1
                    here = slice(at, at + n)
                    source[m, r, here] = s * (P + N) + P + np.arange(n)
                    positions[m, r, here] = length + np.arange(n)
                    branches[m, r, here] = b + 1
                    own[m, s] = True
                    first = r * L + begin + length - 1
                    states[m] += [np.array([first]), r * L + np.arange(at, at + n)]
                    targets[m].append(s * N + np.arange(n + 1))
                    at += n
                segments[m, r, begin:at] = g + 1
    most = max((sum(map(len, t)) for t in targets), default=0)
    step = -(-R * L // 8)
    A = max(1, -(-most // step)) * step

    def padded(lists, filling):
        array = np.full((M, A), filling, np.int32)
        for m, pieces in enumerate(lists):
            joined = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
            array[m, : len(joined)] = joined
        return array

    slots = Slots(
        source, segments, branches, positions, padded(states, 0), padded(targets, S * N), own
    )
    return Pack(slots, np.int32(len(parts)))
