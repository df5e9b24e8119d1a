"""What the update and a model tell each other. `B` samples, `T` positions of the response."""

from typing import Any, NamedTuple

import jax
from flax import struct


class Evaluation(NamedTuple):
    """A policy's view of a batch, what `evaluate(params, batch)` returns.

    logprobs: `[B, T]`, log pi(action t | what came before).
    values: `[B, T]`, V(state just before action t); zeros where there is no critic.
    entropy: `[B, T]`, of the distribution that action t was drawn from, in nats.
    """

    logprobs: jax.Array
    values: jax.Array
    entropy: jax.Array


@struct.dataclass
class PPOBatch:
    """Samples with everything one update needs; every leaf has `B` rows.

    inputs: any pytree, what `evaluate` needs to see the samples again. The update never looks in.
    old_logprobs: `[B, T]`, log-probs of the actions under the policy that sampled them.
    old_values: `[B, T]`, values at the time of sampling.
    advantages: `[B, T]`, whitened if they are to be.
    returns: `[B, T]`, what the critic is to predict.
    mask: `[B, T]` bool, true at actions. What stands elsewhere, NaN included, has no influence.
    kl: `[B]`, KL of each sample to the reference, summed over its actions, in nats; only the KL
      controller reads it. Zeros where there is no reference.
    """

    inputs: Any
    old_logprobs: jax.Array
    old_values: jax.Array
    advantages: jax.Array
    returns: jax.Array
    mask: jax.Array
    kl: jax.Array
