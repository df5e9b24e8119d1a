"""Packs of ragged samples: what stands where, how little is wasted, how many shapes there are."""

import itertools

import numpy as np
import pytest

from jaxppo.packing import (
    Layout,
    PackingError,
    equal_rows,
    make_layout,
    pack,
    rungs,
    shape_bound,
    shape_of,
    useful_share,
)


def ragged(rng, samples, longest=128, mean=24, prompt=16):
    """Lengths of prompts, and geometric ones of responses."""
    lengths = np.minimum(rng.geometric(1 / mean, samples), longest)
    return np.full(samples, prompt), lengths


def seen_by(packed, m, r, slot):
    """The sources of the slots that a slot may see, in order of position."""
    slots = packed.slots
    segment, branch = (x[m, r] for x in (slots.segments, slots.branches))
    sees = (segment == segment[slot]) & ((branch == 0) | (branch == branch[slot]))
    sees &= np.arange(len(segment)) <= slot
    order = np.argsort(slots.positions[m, r][sees], kind="stable")
    np.testing.assert_array_equal(slots.positions[m, r][sees][order], np.arange(sees.sum()))
    return slots.source[m, r][sees][order]


def check(packed, prompt_lengths, lengths, P, N, prompts):
    """Every action is predicted once, from its own prompt and the response's tokens before it."""
    S, L = len(lengths), packed.slots.source.shape[2]
    found = []
    for m in range(int(packed.count)):
        for state, target in zip(packed.slots.states[m], packed.slots.targets[m]):
            if target == S * N:
                continue
            s, t = divmod(int(target), N)
            assert packed.slots.own[m, s]
            found.append((s, t))
            source = seen_by(packed, m, *divmod(int(state), L))
            owner, column = np.divmod(source, P + N)
            length = prompt_lengths[s]
            # some sample with the same prompt, then the sample itself
            assert (prompts[owner[:length]] == prompts[s]).all()
            np.testing.assert_array_equal(column[:length], P - length + np.arange(length))
            assert (owner[length:] == s).all()
            np.testing.assert_array_equal(column[length:], P + np.arange(t))
    assert sorted(found) == [(s, t) for s in range(S) for t in range(lengths[s])]
    assert (packed.slots.targets[int(packed.count) :] == S * N).all()
    assert (packed.slots.own.sum(0) == (np.asarray(lengths) > 0)).all()


@pytest.mark.parametrize("budget", [64, 100, 400])
@pytest.mark.parametrize("shared", [False, True])
def test_every_action_sees_its_own_past_and_nothing_else(shared, budget):
    rng = np.random.default_rng(budget)
    P, N, S = 20, 30, 24
    prompts = np.repeat(np.arange(S // 4), 4)
    rng.shuffle(prompts)
    prompt_lengths = rng.integers(1, P + 1, S // 4)[prompts]
    lengths = rng.integers(0, N + 1, S)
    packed = pack(
        prompt_lengths, lengths, prompt=P, new=N,
        layout=make_layout(P, N, group=4, budget=budget, row=50),
        same_prompt=prompts if shared else None,
    )  # fmt: skip
    own = prompts if shared else np.arange(S)
    check(packed, prompt_lengths, lengths, P, N, own)
    M, R, L = packed.slots.source.shape
    assert R * L <= budget
    assert M == 1 << (int(packed.count) - 1).bit_length()
    tokens = (packed.slots.source >= 0).sum()
    apart = np.sum((prompt_lengths + lengths - 1)[lengths > 0])
    assert tokens == apart if not shared else tokens < apart


def test_a_group_stands_in_one_row_with_its_prompt_once():
    """P + G R tokens, not G (P + R): four groups of eight fill four rows."""
    prompts = np.repeat(np.arange(4), 8)
    lengths = np.full(32, 32)
    layout = make_layout(256, 32, group=8)
    packed = pack(np.full(32, 256), lengths, prompt=256, new=32, layout=layout, same_prompt=prompts)
    assert packed.slots.source.shape == (1, 4, 512)
    assert (packed.slots.source >= 0).sum() == 4 * (256 + 8 * 31)
    check(packed, np.full(32, 256), lengths, 256, 32, prompts)


def test_a_group_too_long_for_a_row_is_cut():
    layout = Layout(budget=64, row=32)
    packed = pack(
        np.full(9, 10), np.full(9, 8), prompt=10, new=8, layout=layout, same_prompt=np.zeros(9)
    )
    check(packed, np.full(9, 10), np.full(9, 8), 10, 8, np.zeros(9))
    _, R, L = packed.slots.source.shape
    assert R * L <= 64


@pytest.mark.parametrize("samples", [32, 64, 128])
def test_few_slots_are_wasted(samples):
    """In updates of 32 samples as in scoring 128: 95 % of the slots hold a token."""
    rng = np.random.default_rng(samples)
    layout = make_layout(16, 128)
    packs = [pack(*ragged(rng, samples), prompt=16, new=128, layout=layout) for _ in range(30)]
    assert useful_share(packs) >= 0.95
    heads = [p.slots.targets[: int(p.count)] for p in packs]
    used = sum((x < samples * 128).sum() for x in heads) / sum(x.size for x in heads)
    assert used >= 0.85


@pytest.mark.parametrize(("samples", "few"), [(32, 16), (128, 10)])
def test_fifty_ragged_cycles_have_few_shapes(samples, few):
    rng = np.random.default_rng(0)
    layout = make_layout(16, 128)
    packs = [pack(*ragged(rng, samples), prompt=16, new=128, layout=layout) for _ in range(50)]
    shapes = {tuple(x.shape for x in p.slots) for p in packs}
    most = max(int(p.count) for p in packs)
    assert 1 < len(shapes) <= min(few, shape_bound(layout, most))
    assert all(p.slots.source[0].size <= layout.budget for p in packs)


def test_no_lengths_whatever_exceed_the_bound_on_shapes():
    rng = np.random.default_rng(1)
    layout = Layout(budget=48, row=16)
    shapes = set()
    for _ in range(400):
        S = rng.integers(1, 9)
        lengths = rng.integers(0, 9, S)
        packed = pack(rng.integers(1, 9, S), lengths, prompt=8, new=9, layout=layout)
        assert int(packed.count) <= 4
        shapes.add(tuple(x.shape for x in packed.slots[:-1]))
    assert len(shapes) <= shape_bound(layout, 4)


def test_rungs_are_within_the_budget_and_close_together():
    layout = Layout(budget=3000, row=143)
    sizes = rungs(layout)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 3000
    assert sizes[0] >= 143
    assert all(b <= a * 17 / 16 for a, b in itertools.pairwise(sizes))
    for size in sizes:
        R, L = shape_of(size, layout)
        assert 143 <= L < 2 * 143 + 2
        assert size - R < R * L <= size


def test_no_sample_at_all_is_an_empty_pack():
    packed = pack([3, 2], [0, 0], prompt=3, new=4, layout=Layout(16, 8))
    assert int(packed.count) == 1
    assert (packed.slots.source == -1).all()
    assert not packed.slots.own.any()


def test_what_does_not_fit_is_refused():
    with pytest.raises(PackingError, match="budget of 40 tokens has no room"):
        make_layout(16, 32, budget=40)
    with pytest.raises(PackingError, match="sample 1 has 5 prompt and 9 response tokens"):
        pack([5, 5], [2, 9], prompt=5, new=9, layout=Layout(16, 12))
    with pytest.raises(PackingError, match="begin empty prompts"):
        pack([0], [2], prompt=5, new=9, layout=Layout(16, 12))


def test_equal_rows():
    tokens = np.array([[1, 2], [1, 3], [1, 2], [1, 2]])
    mask = np.array([[1, 1], [1, 1], [1, 1], [0, 1]], bool)
    np.testing.assert_array_equal(equal_rows(tokens, mask), [0, 1, 0, 2])
