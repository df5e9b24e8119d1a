"""From raw logits to the distribution that is sampled from. `R` rows, `V` vocabulary.

The transform is part of the policy: sampler and scorer both apply it, so that the log-probs of
one are those of the other. Truncation (top-k, top-p, min-p, in that order) always keeps the most
probable tokens, so one number a position, `kept`, describes it: how many tokens could be drawn. The
scorer keeps as many and needs neither the thresholds nor the sampler's logits.

Nothing here sorts the vocabulary. Thresholds are found by bisection on the bit pattern of
floats, which orders as the floats do and ends exactly at one of them.
"""

import jax
import jax.numpy as jnp


def scale(logits, temperature):
    """Divides by the temperature, in float32 or wider."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return logits / temperature


def forbid(logits, ids, where):
    """Sets the logits `[R, V]` of `ids` (a tuple) to -inf in the rows `where [R]` is true."""
    if not ids:
        return logits
    listed = jnp.zeros(logits.shape[-1], bool).at[jnp.asarray(ids)].set(True)
    return jnp.where(where[:, None] & listed, -jnp.inf, logits)


def truncate(logits, *, top_k=0, top_p=1.0, min_p=0.0):
    """Keeps the most probable tokens and sets the others to -inf.

    Args:
      logits: `[R, V]`, after temperature.
      top_k: keeps the `k` largest (0: all). Static.
      top_p: keeps the smallest set of largest whose probabilities, renormalised after top-k, sum
        to at least this.
      min_p: keeps tokens at least `min_p` times as probable as the most probable one.

    Tokens equal to the last one kept stay too.

    Returns:
      `(logits [R, V], kept [R] int32)`, `kept` counts what remains.
    """
    if 0 < top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if not _is(top_p, 1.0):
        p = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        enough = lambda tau: jnp.sum(jnp.where(p >= tau, p, 0.0), -1, keepdims=True) >= top_p  # noqa: E731
        threshold = jnp.minimum(_largest(enough, (*p.shape[:-1], 1)), p.max(-1, keepdims=True))
        logits = jnp.where(p >= threshold, logits, -jnp.inf)
    if not _is(min_p, 0.0):
        floor = logits.max(-1, keepdims=True) + jnp.log(min_p)
        logits = jnp.where(logits >= floor, logits, -jnp.inf)
    return logits, jnp.sum(logits > -jnp.inf, axis=-1, dtype=jnp.int32)


def keep_most_probable(logits, kept, tokens):
    """Repeats a truncation on logits of other parameters: the scorer's half of `truncate`.

    Keeps exactly `kept [R]` of `logits [R, V]`: `tokens [R]`, the ones that were drawn, and the
    largest others, the first of equal ones. As the policy moves, a drawn token may fall out of the
    most probable, and its probability must remain positive; on the sampler's own parameters it
    is among them anyway, up to ties, which change no log-prob by more than rounding.
    """
    drawn = jnp.arange(logits.shape[-1]) == tokens[:, None]
    p = jax.nn.softmax(jax.lax.stop_gradient(logits).astype(jnp.float32), axis=-1)
    p = jnp.where(drawn, 2.0, p)  # before all others
    enough = lambda tau: jnp.sum(p >= tau, -1, keepdims=True) >= kept[:, None]  # noqa: E731
    last = _largest(enough, (*p.shape[:-1], 1))
    above, equal = p > last, p == last
    room = kept[:, None] - jnp.sum(above, -1, keepdims=True)
    inside = drawn | above | (equal & (jnp.cumsum(equal, -1) <= room))
    return jnp.where(inside, logits, -jnp.inf)


def draw(logits, uniform):
    """Draws one token a row by inverting the cumulative distribution in two levels.

    One uniform number `[R]` in [0, 1) replaces V Gumbel variables; block sums first, then the
    tokens of one block, keep the cumulative sums short. Tokens with logit -inf are never drawn.
    """
    R, V = logits.shape
    block = max(1, int(V**0.5))
    blocks = -(-V // block)
    p = jnp.exp(logits - logits.max(-1, keepdims=True))
    p = jnp.pad(p, ((0, 0), (0, blocks * block - V))).reshape(R, blocks, block)
    sums = p.sum(-1)
    ends = jnp.cumsum(sums, axis=-1)
    target = uniform * ends[:, -1]
    b = _first_above(ends, sums, target)
    rows = jnp.arange(R)
    before = jnp.where(b > 0, ends[rows, jnp.maximum(b - 1, 0)], 0.0)
    inside = p[rows, b]
    return (b * block + _first_above(jnp.cumsum(inside, -1), inside, target - before)).astype(
        jnp.int32
    )


def _first_above(ends, masses, target):
    """The first index with mass whose cumulative end exceeds the target, else the last with mass.

    The ends alone do not tell: depending on how XLA fuses and sums, rounding may leave a target
    just below 0, before a first token without mass, or let ends rise where the mass is 0.
    """
    inside = (ends > target[:, None]) & (masses > 0)
    last = masses.shape[-1] - 1 - jnp.argmax(masses[:, ::-1] > 0, axis=-1)
    return jnp.where(inside.any(-1), jnp.argmax(inside, axis=-1), last)


def _largest(holds, shape):
    """The largest non-negative float32 at which a predicate, true at 0 and monotone, holds."""
    low = jnp.zeros(shape, jnp.int32)
    high = jnp.full(shape, 0x3F800001, jnp.int32)  # just above 1.0, where every predicate fails

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        up = holds(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(up, middle, low), jnp.where(up, high, middle)

    low, _ = jax.lax.fori_loop(0, 30, halve, (low, high))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def _is(x, neutral):
    """Whether an option is a plain number at its neutral value (a traced one never is)."""
    return isinstance(x, int | float) and x == neutral
