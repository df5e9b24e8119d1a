"""From hidden states to log-probs of tokens; the only module that shifts by one.

Letters: B rows, P prompt length, N response length, D width, V vocabulary, C chunk.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from jaxppo.core.kl import exact_kl


def response_states(hidden: chex.Array, prompt_length: int, *, response_length: int) -> jax.Array:
    r"""Takes the states from which the tokens of the response were predicted.

    The state at position i has read tokens 0..i and predicts token i + 1. Response token t stands
    at position P + t, so its state is

        hidden[:, P - 1 + t],   t = 0..N - 1

    and the state after the last token, if there is one, predicts nothing that was sampled. Both
    lengths are needed: whether that last state is there cannot be read off the array.

    Args:
      hidden: [B, L, D] or [B, L], with L >= P + N - 1: states of the prompt, padded on the left to
        P, and of the response, with or without its last token.
      prompt_length: P >= 1, a Python int.
      response_length: N >= 0, a Python int.

    Returns:
      [B, N, D] or [B, N]: entry t belongs to response token t.

    Raises:
      ValueError: if P < 1 or N < 0, or `hidden` is too short.
      AssertionError: if the rank is neither 2 nor 3.
    """
    chex.assert_rank(hidden, {2, 3})
    if prompt_length < 1:
        raise ValueError(
            f"prompt_length must be at least 1, got {prompt_length}: the first response token is "
            "predicted from the state of the last prompt token; start empty prompts with a BOS "
            "token."
        )
    if response_length < 0:
        raise ValueError(
            f"response_length must be zero or more, got {response_length}: pass the number of "
            "response positions, tokens.shape[1]."
        )
    start, stop = prompt_length - 1, prompt_length - 1 + response_length
    if hidden.shape[1] < stop:
        raise ValueError(
            f"hidden holds {hidden.shape[1]} positions, but a prompt of {prompt_length} and a "
            f"response of {response_length} need {stop}: pass the states of prompt and response "
            "together."
        )
    return hidden[:, start:stop]


def token_logprobs(logits: chex.Array, tokens: chex.Array) -> jax.Array:
    r"""Computes the log-probabilities of given tokens.

        logits[token] - log sum_v exp(logits[v])

    Args:
      logits: [..., V], unnormalised; -inf marks a token that cannot be sampled.
      tokens: [...], integers in 0..V - 1.

    Returns:
      [...], in nats, float32 or wider; -inf, with gradient 0, for a token that cannot be sampled.

    Raises:
      AssertionError: if the shapes do not fit.
    """
    chex.assert_equal_shape_prefix([logits, tokens], tokens.ndim)
    chex.assert_rank(logits, tokens.ndim + 1)
    logits = jnp.asarray(logits)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen = jnp.take_along_axis(logits, jnp.asarray(tokens)[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def entropy(logits: chex.Array) -> jax.Array:
    r"""Computes the entropy of the distributions that logits stand for.

        - sum_v p_v log p_v,   p = softmax(logits)

    with 0 log 0 = 0, in the gradient too.

    Args:
      logits: [..., V], unnormalised; -inf marks a token that cannot be sampled.

    Returns:
      [...], in nats, float32 or wider.
    """
    logits = jnp.asarray(logits)
    log_p = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), axis=-1)
    p = jnp.exp(log_p)
    return -jnp.sum(p * jnp.where(p > 0, log_p, 0), axis=-1)


def chunked_logprobs(
    logits_fn: Callable[..., jax.Array],
    states: chex.Array,
    tokens: chex.Array,
    *extras: chex.Array,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Computes log-probs and entropies without holding the logits of all positions.

    The B * N positions are cut into chunks of C = chunk_size and the logits made chunk after chunk,
    once forward and once more in the backward pass, so that no array of more than C rows of V
    exists. If one chunk holds all positions the logits are made in one go and kept.

    Args:
      logits_fn: `(states [C, D], tokens [C], *extras [C, ...]) -> logits [C, V]`, row by row: the
        output head and whatever the policy does to its logits (temperature, truncation to -inf). It
        may close over parameters; gradients reach them.
      states: [B, N, D], one for each token, as `response_states` gives. Finite: a NaN in a row
        would reach the gradient of the parameters, whatever the loss does with that row.
      tokens: [B, N], integers in 0..V - 1.
      *extras: [B, N, ...] each, what else `logits_fn` needs of each position.
      chunk_size: C >= 1, a Python int; memory grows with C V.

    Returns:
      (logprobs, entropy), [B, N] each, in nats, float32 or wider.

    Raises:
      ValueError: if chunk_size < 1.
      AssertionError: if the shapes do not fit.
    """

    def logprobs_and_entropy(states, tokens, *extras):
        logits = logits_fn(states, tokens, *extras)
        chex.assert_rank(logits, 2)
        return token_logprobs(logits, tokens), entropy(logits)

    return _in_chunks(logprobs_and_entropy, (states, tokens, *extras), chunk_size)


def chunked_logprobs_and_kl(
    logits_fn: Callable[..., jax.Array],
    ref_logits_fn: Callable[..., jax.Array],
    states: chex.Array,
    ref_states: chex.Array,
    tokens: chex.Array,
    *extras: chex.Array,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes log-probs, entropies and the exact KL to a reference, chunk after chunk.

    As `chunked_logprobs`, with the reference's logits beside the policy's.

    Args:
      logits_fn: of the policy, see `chunked_logprobs`.
      ref_logits_fn: of the reference, called with its states in the same way; a constant. It should
        do to its logits what the policy does, or the KL is of other distributions.
      states: [B, N, D], of the policy.
      ref_states: [B, N, D'], of the reference.
      tokens: [B, N], integers in 0..V - 1.
      *extras: [B, N, ...] each, what both functions need of each position.
      chunk_size: C >= 1, a Python int; memory grows with 2 C V.

    Returns:
      (logprobs, entropy, kl), [B, N] each, in nats, float32 or wider; see `exact_kl`.

    Raises:
      ValueError: if chunk_size < 1.
      AssertionError: if the shapes do not fit.
    """

    def all_three(states, tokens, ref_states, *extras):
        logits = logits_fn(states, tokens, *extras)
        ref_logits = jax.lax.stop_gradient(ref_logits_fn(ref_states, tokens, *extras))
        chex.assert_rank([logits, ref_logits], 2)
        return token_logprobs(logits, tokens), entropy(logits), exact_kl(logits, ref_logits)

    return _in_chunks(all_three, (states, tokens, ref_states, *extras), chunk_size)


def _in_chunks(function, arrays, chunk_size: int) -> tuple[jax.Array, ...]:
    """`function` of the rows of arrays [B, N, ...], the tokens second; results [B, N] each."""
    if chunk_size < 1:
        raise ValueError(
            f"chunk_size must be at least 1 position, got {chunk_size}: try 1024, or B * N for no "
            "chunks at all."
        )
    states, tokens = arrays[:2]
    chex.assert_rank(states, 3)
    chex.assert_rank(tokens, 2)
    chex.assert_equal_shape_prefix(list(arrays), 2)
    total = tokens.size
    rows = [jnp.asarray(x).reshape(total, *x.shape[2:]) for x in arrays]
    if total <= chunk_size:
        results = function(*rows)
    else:
        chunks = -(-total // chunk_size)
        filling = chunks * chunk_size - total

        def cut(x):
            # The filling repeats the last row: the function then sees nothing it would not see
            # anyway, whereas zeros could have a NaN for a gradient (a norm, say), and 0 * NaN would
            # reach the parameters.
            x = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (filling, *x.shape[1:]))])
            return x.reshape(chunks, chunk_size, *x.shape[1:])

        # prevent_cse is for code outside a loop; the scan already keeps the two passes apart.
        body = jax.checkpoint(function, prevent_cse=False)
        _, results = jax.lax.scan(lambda _, x: (None, body(*x)), None, [cut(x) for x in rows])
    return tuple(x.reshape(-1)[:total].reshape(tokens.shape) for x in results)
