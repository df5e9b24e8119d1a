"""Log-probs and entropy against trlx and loops; chunks against none, in numbers and memory."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import core
from jaxppo.core import chunked_logprobs, entropy, response_states, token_logprobs

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def loop_distribution(row):
    weights = [np.exp(x - max(row)) for x in row]
    return [w / sum(weights) for w in weights]


def test_token_logprobs_are_trlx():
    golden = np.load(GOLDEN / "trlx_whiten_logprobs_f64.npz")
    with jax.enable_x64(True):
        result = token_logprobs(golden["logits"], golden["labels"])
        assert result.dtype == jnp.float64
    np.testing.assert_allclose(result, golden["logprobs_of_labels"], rtol=1e-10)


def test_token_logprobs_and_entropy_equal_loops():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 5)) * 4
    logits[0, 1, [0, 3]] = -np.inf
    tokens = np.array([[0, 4, 2], [1, 1, 3]])
    logprobs, entropies = np.zeros((2, 3)), np.zeros((2, 3))
    for i in range(2):
        for j in range(3):
            p = loop_distribution(logits[i, j])
            logprobs[i, j] = np.log(p[tokens[i, j]])
            entropies[i, j] = -sum(x * np.log(x) for x in p if x > 0)
    with jax.enable_x64(True):
        for wrap in (lambda f: f, jax.jit):
            np.testing.assert_allclose(
                wrap(token_logprobs)(logits, tokens), logprobs, rtol=1e-10, atol=1e-12
            )
            np.testing.assert_allclose(wrap(entropy)(logits), entropies, rtol=1e-10, atol=1e-12)
    half = jnp.asarray(logits, jnp.bfloat16)
    assert token_logprobs(half, tokens).dtype == entropy(half).dtype == jnp.float32


def test_entropy_by_hand():
    np.testing.assert_allclose(entropy(np.zeros((2, 8))), np.log([8, 8]), rtol=1e-6)
    np.testing.assert_array_equal(entropy(np.array([0.0, -np.inf, -np.inf])), 0)


def test_logits_of_minus_infinity_have_no_nan_in_the_gradient():
    logits = np.array([0.5, -np.inf, 1.0, -np.inf, -0.3])
    possible = np.array([0, 2, 4])
    with jax.enable_x64(True):
        for whole, part in [
            (entropy, entropy),
            (lambda x: token_logprobs(x, jnp.int32(2)), lambda x: token_logprobs(x, jnp.int32(1))),
        ]:
            value, slope = jax.value_and_grad(whole)(logits)
            expected, expected_slope = jax.value_and_grad(part)(logits[possible])
            slope = np.asarray(slope)
            np.testing.assert_allclose(value, expected, rtol=1e-12)
            np.testing.assert_allclose(slope[possible], expected_slope, rtol=1e-10, atol=1e-14)
            np.testing.assert_array_equal(slope[[1, 3]], [0, 0])
        # A token outside the truncated distribution: log 0, and nothing that poisons the rest.
        impossible = jax.device_get(jax.value_and_grad(token_logprobs)(logits, jnp.int32(1)))
    assert impossible[0] == -np.inf
    assert np.isfinite(impossible[1]).all()


def test_token_logprobs_refuse_shapes_that_do_not_fit():
    with pytest.raises(AssertionError):
        token_logprobs(np.zeros((2, 3, 5)), np.zeros((2, 4), int))
    with pytest.raises(AssertionError):
        token_logprobs(np.zeros((2, 3)), np.zeros((2, 3), int))


@pytest.mark.parametrize("prompt_length", [1, 3])
@pytest.mark.parametrize("response_length", [0, 1, 4])
@pytest.mark.parametrize("last_state", [True, False])
def test_response_states_predict_the_response(prompt_length, response_length, last_state):
    length = prompt_length + response_length - (not last_state)
    # State i is marked with the position of the token it predicts, i + 1.
    hidden = np.broadcast_to(np.arange(1, length + 1)[None, :, None], (2, length, 3))
    states = response_states(hidden, prompt_length, response_length=response_length)
    assert states.shape == (2, response_length, 3)
    for t in range(response_length):
        np.testing.assert_array_equal(states[:, t], prompt_length + t)
    flat = response_states(hidden[..., 0], prompt_length, response_length=response_length)
    np.testing.assert_array_equal(flat, states[..., 0])


def test_response_states_give_the_log_probs_of_a_loop_over_prefixes():
    # A toy causal model: the state is the running sum of embeddings, the logits are linear in it.
    rng = np.random.default_rng(1)
    embed, head = rng.normal(size=(7, 4)), rng.normal(size=(4, 7))
    tokens = rng.integers(0, 7, (2, 6))
    p = 2
    with jax.enable_x64(True):
        hidden = jnp.cumsum(embed[tokens], axis=1)
        states = response_states(hidden, p, response_length=4)
        result = token_logprobs(states @ head, tokens[:, p:])
    for row in range(2):
        for t in range(4):
            prefix = tokens[row, : p + t]
            probs = loop_distribution(embed[prefix].sum(0) @ head)
            np.testing.assert_allclose(result[row, t], np.log(probs[tokens[row, p + t]]))


@pytest.mark.parametrize(
    ("shape", "prompt_length", "response_length", "message"),
    [
        ((2, 5, 3), 0, 4, "prompt_length.*BOS"),
        ((2, 5, 3), 3, 4, "need 6"),
        ((2, 5, 3), 3, -1, "response_length"),
    ],
)
def test_response_states_refuse_what_cannot_be(shape, prompt_length, response_length, message):
    with pytest.raises(ValueError, match=message):
        response_states(np.zeros(shape), prompt_length, response_length=response_length)


# B, N, D, V; the head is truncated by a row-wise cut-off, so some logits are -inf.
B, N, D, V = 2, 5, 3, 11


def setup(seed=0):
    rng = np.random.default_rng(seed)
    head, states = rng.normal(size=(D, V)), rng.normal(size=(B, N, D))
    tokens = rng.integers(0, V, (B, N))
    temperature = rng.uniform(0.5, 2, (B, N))
    return head, states, tokens, temperature


def logits_fn(head, states, tokens, temperature):
    logits = (states @ head) / temperature[:, None]
    keep = logits > jnp.median(logits, axis=-1, keepdims=True) - 0.5
    keep = keep | jax.nn.one_hot(tokens, V, dtype=bool)
    return jnp.where(keep, logits, -jnp.inf)


@functools.partial(jax.jit, static_argnums=4)
@functools.partial(jax.value_and_grad, argnums=(0, 1, 3), has_aux=True)
def chunked(head, states, tokens, temperature, chunk_size):
    fn = functools.partial(logits_fn, head)
    logprobs, entropies = chunked_logprobs(fn, states, tokens, temperature, chunk_size=chunk_size)
    weights = jnp.arange(1, B * N + 1).reshape(B, N)
    return jnp.sum(weights * (logprobs + 0.3 * entropies)), (logprobs, entropies)


@pytest.mark.parametrize("chunk_size", [1, 3, 5, 9])
def test_chunks_equal_no_chunks_in_value_and_gradient(chunk_size):
    head, states, tokens, temperature = setup()
    with jax.enable_x64(True):
        (_, whole), slopes = chunked(head, states, tokens, temperature, B * N)
        (_, parts), part_slopes = chunked(head, states, tokens, temperature, chunk_size)
        logits = jnp.stack([logits_fn(head, *x) for x in zip(states, tokens, temperature)])
        assert np.isinf(logits).any()
        expected = token_logprobs(logits, tokens), entropy(logits)
        assert whole[0].shape == whole[1].shape == (B, N)
        assert whole[0].dtype == parts[1].dtype == jnp.float64
    close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
    jax.tree.map(close, whole, expected)
    jax.tree.map(close, parts, expected)
    jax.tree.map(close, part_slopes, slopes)
    assert all(np.isfinite(slope).all() and np.asarray(slope).any() for slope in part_slopes)


def test_chunks_in_float32_and_bfloat16():
    head, states, tokens, temperature = (jnp.asarray(x) for x in setup())
    (_, whole), _ = chunked(head, states, tokens, temperature, B * N)
    (_, parts), _ = chunked(head, states, tokens, temperature, 4)
    assert parts[0].dtype == jnp.float32
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), parts, whole)
    half = chunked_logprobs(
        functools.partial(logits_fn, head.astype(jnp.bfloat16)),
        states.astype(jnp.bfloat16),
        tokens,
        temperature.astype(jnp.bfloat16),
        chunk_size=4,
    )
    assert half[0].dtype == half[1].dtype == jnp.float32


def test_the_filling_of_the_last_chunk_reaches_no_gradient():
    head, states, tokens, _ = setup()

    @functools.partial(jax.jit, static_argnums=1)
    @jax.grad
    def slope(head, chunk_size):
        def normed(states, tokens):
            # The gradient of a norm is NaN at a row of zeros.
            return states / jnp.linalg.norm(states, axis=-1, keepdims=True) @ head

        return jnp.sum(chunked_logprobs(normed, states, tokens, chunk_size=chunk_size)[0])

    with jax.enable_x64(True):
        np.testing.assert_allclose(slope(head, 7), slope(head, B * N), rtol=1e-12)


def test_chunks_refuse_bad_sizes_and_take_empty_batches():
    head, states, tokens, temperature = setup()
    fn = functools.partial(logits_fn, head)
    with pytest.raises(ValueError, match="chunk_size"):
        chunked_logprobs(fn, states, tokens, temperature, chunk_size=0)
    with pytest.raises(AssertionError):
        chunked_logprobs(fn, states, tokens[:, 1:], temperature, chunk_size=4)
    with pytest.raises(AssertionError):
        chunked_logprobs(fn, states, tokens, temperature[:, 1:], chunk_size=4)
    empty = (x[:, :0] for x in (states, tokens, temperature))
    logprobs, entropies = chunked_logprobs(fn, *empty, chunk_size=4)
    assert logprobs.shape == entropies.shape == (B, 0)


def equations(jaxpr):
    """All equations, those inside scans, checkpoints and calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, (list, tuple)) else [parameter]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def jaxpr_of_gradient(chunk_size, b=8, n=16, d=4, v=1000):
    def loss(head, states, tokens):
        results = chunked_logprobs(lambda s, _: s @ head, states, tokens, chunk_size=chunk_size)
        return sum(x.sum() for x in results)

    args = jnp.zeros((d, v)), jnp.zeros((b, n, d)), jnp.zeros((b, n), int)
    return jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*args).jaxpr


def largest(jaxpr):
    return max(var.aval.size for eqn in equations(jaxpr) for var in eqn.outvars)


def test_no_array_holds_the_logits_of_all_positions():
    # 128 positions of 1000 logits; the head and its gradient, 4 * 1000, are smaller than a chunk.
    assert largest(jaxpr_of_gradient(chunk_size=128)) == 128 * 1000
    assert largest(jaxpr_of_gradient(chunk_size=16)) == 16 * 1000


def test_one_chunk_needs_no_loop():
    def has_scan(chunk_size):
        return any(e.primitive.name == "scan" for e in equations(jaxpr_of_gradient(chunk_size)))

    assert has_scan(127)
    assert not has_scan(128)
    assert not has_scan(1000)


@pytest.mark.parametrize("chunk_size", [2, 7, 99])
def test_the_exact_kl_beside_the_log_probs(chunk_size):
    rng = np.random.default_rng(4)
    with jax.enable_x64(True):
        states, ref_states = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3, 5))
        head, ref_head = jnp.asarray(rng.normal(size=(4, 6))), rng.normal(size=(5, 6))
        tokens, kept = rng.integers(0, 6, (2, 3)), rng.random((2, 3, 6)) < 0.7
        np.put_along_axis(kept, tokens[..., None], True, axis=-1)
        cut = lambda logits, kept: jnp.where(kept, logits, -jnp.inf)  # noqa: E731

        def chunked(head):
            results = core.chunked_logprobs_and_kl(
                lambda s, t, kept: cut(s @ head, kept),
                lambda s, t, kept: cut(s @ ref_head, kept),
                states, ref_states, tokens, kept, chunk_size=chunk_size,
            )  # fmt: skip
            return results[2].sum(), results

        def plain(head):
            logits, ref = cut(states @ head, kept), cut(ref_states @ ref_head, kept)
            kl = core.exact_kl(logits, ref)
            return kl.sum(), (core.token_logprobs(logits, tokens), core.entropy(logits), kl)

        (_, got), slope = jax.jit(jax.value_and_grad(chunked, has_aux=True))(head)
        (_, wanted), wanted_slope = jax.jit(jax.value_and_grad(plain, has_aux=True))(head)
    assert np.isfinite(wanted_slope).all()
    np.testing.assert_allclose(slope, wanted_slope, rtol=1e-12, atol=1e-15)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
