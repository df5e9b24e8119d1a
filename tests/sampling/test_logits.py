"""Truncation against a sort, drawing against a cumulative sum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxppo.sampling import draw, forbid, is_truncating, keep_most_probable, scale, truncate
from jaxppo.sampling.logits import _first_above

V = 11


@functools.lru_cache
def truncate_by(top_k):
    """One compilation for each k; p and min_p are traced."""
    return jax.jit(functools.partial(truncate, top_k=top_k))


def softmax(x):
    p = np.exp(x - x.max())
    return p / p.sum()


def kept_by_sorting(logits, top_k, top_p, min_p):
    """The set that truncation keeps, the slow way: sort, walk, take ties of the last one too."""
    x = logits.astype(np.float64)
    kept = np.isfinite(x)
    if 0 < top_k < len(x):
        kept &= x >= np.sort(x)[-top_k]
    p = softmax(np.where(kept, x, -np.inf))
    total, last = 0.0, 0.0
    for last in np.sort(p)[::-1]:
        total += last
        if total >= top_p - 1e-6:
            break
    if top_p < 1:
        kept &= p >= last * (1 - 1e-6)
    if min_p > 0:
        kept &= p >= min_p * p.max() * (1 - 1e-6)
    return kept


# A coarse grid makes ties, and keeps sums away from the thresholds by more than float32 rounds.
logit = st.one_of(st.integers(-8, 8).map(lambda i: i / 2), st.just(-np.inf))
rows = st.lists(logit, min_size=V, max_size=V).filter(lambda x: max(x) > -np.inf)


@settings(max_examples=150, deadline=None)
@given(
    rows,
    st.sampled_from([0, 1, 3, 7, V, 50]),
    st.sampled_from([1.0, 0.97, 0.83, 0.51, 0.2, 1e-4]),
    st.sampled_from([0.0, 0.013, 0.31, 0.99]),
)
def test_truncation_keeps_what_sorting_keeps(row, top_k, top_p, min_p):
    logits = np.array(row, np.float32)
    result, count = truncate_by(top_k)(
        logits[None], top_p=np.float32(top_p), min_p=np.float32(min_p)
    )
    expected = kept_by_sorting(logits, top_k, top_p, min_p)
    np.testing.assert_array_equal(result[0], np.where(expected, logits, -np.inf))
    assert count.dtype == jnp.int32
    assert count[0] == expected.sum()


def test_truncation_by_hand():
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32))
    for options, expected in [
        ({}, [1, 1, 1, 1]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 3}, [0, 1, 1, 1]),
        ({"top_p": 0.65}, [0, 1, 0, 1]),
        ({"top_p": 0.75}, [0, 1, 1, 1]),
        ({"top_p": 0.95}, [1, 1, 1, 1]),
        ({"min_p": 0.6}, [0, 1, 0, 1]),
        # of the two that top-k leaves, 4/7 and 3/7, the first reaches 0.55 by itself
        ({"top_k": 2, "top_p": 0.55}, [0, 1, 0, 0]),
        ({"top_p": 0.95, "min_p": 0.4}, [0, 1, 1, 1]),
        # tokens must reach top_p together: 0 is reached by nothing, yet something has to stay
        ({"top_p": 0.0}, [0, 1, 0, 0]),
    ]:
        result, count = truncate(logits, **options)
        np.testing.assert_array_equal(np.isfinite(result[0]), expected, err_msg=str(options))
        assert count[0] == sum(expected)
        np.testing.assert_array_equal(result[0][np.isfinite(result[0])], logits[0][result[0] > -99])


def test_neutral_options_leave_logits_alone_also_when_traced():
    logits = np.random.default_rng(0).normal(size=(3, V)).astype(np.float32)
    result, count = truncate_by(0)(logits, top_p=np.float32(1), min_p=np.float32(0))
    np.testing.assert_array_equal(result, logits)
    np.testing.assert_array_equal(count, V)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0, 4]), st.sampled_from([1.0, 0.8, 0.3]))
def test_the_scorer_repeats_the_set_and_keeps_the_token(seed, top_k, top_p):
    rng = np.random.default_rng(seed)
    values = np.stack([rng.permutation(V) for _ in range(4)]) * rng.uniform(0.05, 1)
    logits = values.astype(np.float32)  # distinct by far more than the perturbation
    logits[0, rng.integers(0, V, 3)] = -np.inf
    kept_logits, count = truncate_by(top_k)(logits, top_p=np.float32(top_p), min_p=np.float32(0.01))
    inside = np.isfinite(kept_logits)
    tokens = inside.argmax(1)
    moved = (logits + rng.uniform(-1e-6, 1e-6, logits.shape)).astype(np.float32)
    result = jax.jit(keep_most_probable)(moved, count, tokens)
    np.testing.assert_array_equal(result, np.where(inside, moved, -np.inf))
    # a token that has meanwhile become the least probable stays possible, in place of the last
    outside = np.where(np.isfinite(logits), logits, np.inf).argmin(1)
    result = np.asarray(jax.jit(keep_most_probable)(moved, count, outside))
    for row, token in enumerate(outside):
        if not inside[row, token]:
            inside[row, np.where(inside[row], moved[row], np.inf).argmin()] = False
            inside[row, token] = True
    np.testing.assert_array_equal(result, np.where(inside, moved, -np.inf))


def test_the_scorer_keeps_no_more_tokens_where_some_are_equal():
    logits = jnp.array([[2.0, 1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    result = keep_most_probable(logits, jnp.array([2, 1]), jnp.array([2, 4]))
    inside = np.array([[1, 0, 1, 0, 0], [0, 0, 0, 0, 1]], bool)
    np.testing.assert_array_equal(np.isfinite(result), inside)


def test_gradients_through_the_scorers_truncation_are_those_of_the_kept_tokens():
    logits = jnp.array([[2.0, 1.0, 0.5, -1.0, -jnp.inf], [0.0, 0.0, 3.0, 1.0, 5.0]])
    count, tokens = jnp.array([2, 3]), jnp.array([3, 2])

    def logprob(logits):
        kept = keep_most_probable(logits, count, tokens)
        return (kept[jnp.arange(2), tokens] - jax.nn.logsumexp(kept, axis=-1)).sum()

    grads = jax.jit(jax.grad(logprob))(logits)
    inside = np.array([[1, 0, 0, 1, 0], [0, 0, 1, 1, 1]], bool)
    p = np.stack([softmax(np.where(m, x, -np.inf)) for m, x in zip(inside, np.asarray(logits))])
    np.testing.assert_allclose(grads, np.eye(5)[np.asarray(tokens)] - p, atol=1e-6)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_gradients_through_the_samplers_truncation_are_finite(options):
    logits = jnp.array([[2.0, 1.0, 0.5, -1.0, -jnp.inf]])
    loss = lambda x: jax.nn.logsumexp(truncate(x, **options)[0])  # noqa: E731
    grads = jax.grad(loss)(logits)
    assert jnp.isfinite(grads).all()
    np.testing.assert_allclose(grads.sum(), 1.0, rtol=1e-6)


def test_scale_divides_in_float32():
    result = scale(jnp.array([1.0, -3.0], jnp.bfloat16), 0.5)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, [2.0, -6.0])


def test_forbid_takes_the_named_ids_in_the_named_rows():
    logits = jnp.ones((2, 4))
    result = forbid(logits, (1, 3), jnp.array([True, False]))
    np.testing.assert_array_equal(result, [[1, -np.inf, 1, -np.inf], [1, 1, 1, 1]])
    assert forbid(logits, (), jnp.array([True, True])) is logits


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"top_k": 0, "top_p": 1, "min_p": 0}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"top_p": np.float32(1)}, True),  # an array may be traced: not known to be neutral
    ],
)
def test_is_truncating(options, expected):
    assert is_truncating(**options) is expected


LAST = np.float32(1) - np.float32(2**-24)  # the largest uniform number


@pytest.mark.parametrize(
    ("vocab", "row_count"), [(1, 7), (2, 200), (37, 2000), (1000, 500), (50257, 8)]
)
def test_draw_inverts_the_cumulative_distribution(vocab, row_count):
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(row_count, vocab)) * 3).astype(np.float32)
    if vocab > 2:
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        logits[: row_count // 2, [0, -1]] = -np.inf
        logits[:, vocab // 2] = 1.0
    uniform = rng.random(row_count).astype(np.float32)
    uniform[:2], uniform[2:4] = 0, LAST
    tokens = np.asarray(jax.jit(draw)(logits, uniform))
    assert tokens.dtype == np.int32
    assert tokens.min() >= 0
    p = np.exp(logits.astype(np.float64))
    ends = np.cumsum(p, axis=1) / p.sum(1, keepdims=True)
    index = np.arange(row_count)
    assert (p[index, tokens] > 0).all()
    starts = np.where(tokens > 0, ends[index, tokens - 1], 0.0)
    assert (starts - 1e-6 <= uniform).all()
    assert (uniform <= ends[index, tokens] + 1e-6).all()
    # and exactly the oracle's token where rounding can't matter
    expected = (ends <= uniform[:, None]).sum(1)
    clear = np.abs(ends - uniform[:, None]).min(1) > 1e-6
    assert clear.mean() > 0.5 or vocab in (1, 50257)
    np.testing.assert_array_equal(tokens[clear], expected[clear])


@pytest.mark.parametrize("vocab", [1, 2, 37, 50257])
def test_draw_at_both_ends_takes_the_first_and_the_last_possible_token(vocab):
    logits = np.zeros((4, vocab), np.float32)
    first, last = 0, vocab - 1
    if vocab > 2:
        first, last = vocab // 3, vocab - 3
        logits[:, :first] = logits[:, last + 1 :] = -np.inf
    tokens = jax.jit(draw)(logits, np.array([0, LAST, 0, LAST], np.float32))
    np.testing.assert_array_equal(tokens, [first, last, first, last])


def test_draw_of_a_single_possible_token():
    logits = np.full((37, 37), -np.inf, np.float32)
    np.fill_diagonal(logits, -5.0)
    for u in (0, 0.3, LAST):
        np.testing.assert_array_equal(
            jax.jit(draw)(logits, np.full(37, u, np.float32)), np.arange(37)
        )


def test_rounding_never_draws_a_token_without_probability():
    """Targets within three roundings of the ends, where a careless comparison slips."""
    rng = np.random.default_rng(0)
    row_count, vocab = 512, 1024
    compiled = jax.jit(draw)
    for _ in range(12):
        p = np.where(rng.random((row_count, vocab)) < 0.03, rng.random((row_count, vocab)), 0)
        p[:, 5] = 1
        with np.errstate(divide="ignore"):
            logits = np.log(p).astype(np.float32)
        ends = np.cumsum(p, axis=1) / p.sum(1, keepdims=True)
        index = np.arange(row_count)
        uniform = ends[index, rng.integers(0, vocab, row_count)].astype(np.float32)
        bits = uniform.view(np.int32) + rng.integers(-3, 4, row_count).astype(np.int32)
        uniform = np.clip(bits.view(np.float32), 0, LAST)
        tokens = np.asarray(compiled(logits, uniform))
        assert (p[index, tokens] > 0).all()


def test_rounded_targets_and_sums_find_a_token_with_mass():
    """What other devices' fusions and parallel sums may hand over, by hand."""
    masses = jnp.array([[0.0, 0.0, 2.0, 0.0, 1.0, 0.0]])
    up, down = np.nextafter(np.float32(2), [3, 1], dtype=np.float32)
    for ends, target, expected in [
        ([0, 0, 2, 2, 3, 3], -1e-7, 2),  # below the start
        ([0, 0, 2, 2, 3, 3], 2.0, 4),
        ([0, 0, 2, up, 3, 3], 2.0, 4),  # the end rises without mass
        ([0, 0, 2, down, 3, 3], down, 2),  # and falls
        ([0, 0, 2, 2, 3, 3], 3.0, 4),  # beyond the total
    ]:
        found = _first_above(jnp.array([ends], jnp.float32), masses, jnp.array([target]))
        assert found[0] == expected


def test_frequencies_are_the_probabilities():
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=37) * 1.5).astype(np.float32)
    logits[[0, 7, 36]] = -np.inf
    draws = 20_000
    uniform = jax.random.uniform(jax.random.key(0), (draws,))
    tokens = jax.jit(draw)(np.tile(logits, (draws, 1)), uniform)
    observed, p = np.bincount(tokens, minlength=37), softmax(logits.astype(np.float64))
    assert observed[p == 0].sum() == 0
    expected = p[p > 0] * draws
    chi_square = ((observed[p > 0] - expected) ** 2 / expected).sum()
    freedom = (p > 0).sum() - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)
