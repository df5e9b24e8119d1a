"""What the update, a model and a loss tell each other. `B` samples, `T` response positions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import struct

from jaxppo.core.entropy_bonus import EntropyController


class Evaluation(NamedTuple):
    """A policy's view of a batch, what `evaluate(params, batch)` returns.

    logprobs: `[B, T]`, log pi(action t | what came before).
    values: `[B, T]`, V(state just before action t); zeros where there is no critic.
    entropy: `[B, T]`, of the distribution that action t was drawn from, in nats.
    kl: `[B, T]`, the exact KL to the reference at each position, through which gradients flow; only
      where the exact KL stands in the loss.
    """

    logprobs: jax.Array
    values: jax.Array
    entropy: jax.Array
    kl: jax.Array | None = None


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
    ref_logprobs: `[B, T]`, of the actions under the reference, where the KL stands in the loss.
    old_entropy: `[B, T]`, of the policy that sampled, where only uncertain tokens are trained on.
    behaviour_logprobs: `[B, T]`, of the actions under the weights that drew them, where those are
      older than the ones `old_logprobs` is of.
    """

    inputs: Any
    old_logprobs: jax.Array
    old_values: jax.Array
    advantages: jax.Array
    returns: jax.Array
    mask: jax.Array
    kl: jax.Array
    ref_logprobs: jax.Array | None = None
    old_entropy: jax.Array | None = None
    behaviour_logprobs: jax.Array | None = None


class Weights(NamedTuple):
    """What an optimizer step says of each token before it is cut up: `[S, T]`, of all its samples.

    policy: of the policy's and the KL's terms; see `jaxppo.core.normalisers`.
    token: of the critic's and the entropy's terms, the mean over tokens.
    scale: a constant factor of the policy's term alone.
    """

    policy: jax.Array
    token: jax.Array
    scale: jax.Array


class Prices(NamedTuple):
    """Coefficients that controllers set; scalars, a nat each.

    kl: of the KL in the loss.
    entropy: of the entropy bonus.
    """

    kl: jax.Array
    entropy: jax.Array


class Objective(NamedTuple):
    """A loss in three parts.

    weigh: `(PPOBatch of S) -> Weights`, once a step.
    sums: `(Evaluation, PPOBatch of B, Weights of B, Prices) -> dict`, for each micro-batch: what
      `policy_loss_sums` returns and `value_loss_sums` with it. "losses/total_loss" is minimised,
      and adds up over micro-batches.
    entropy: the controller of the entropy's price.
    """

    weigh: Callable[[PPOBatch], Weights]
    sums: Callable[[Evaluation, PPOBatch, Weights, Prices], dict[str, jax.Array]]
    entropy: EntropyController
