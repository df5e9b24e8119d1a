"""What an optimizer step minimises: a method with its prices, corrections and critic.

Letters: S samples of one optimizer step, B of them in a micro-batch, N positions of the response.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxppo.core.batch import Evaluation, Objective, PPOBatch, Prices, Weights
from jaxppo.core.corrections import on_policy_enough
from jaxppo.core.entropy_bonus import EntropyController, fixed_entropy
from jaxppo.core.losses import value_loss_sums
from jaxppo.core.masks import top_entropy
from jaxppo.core.normalisers import token_mean
from jaxppo.core.policy_loss import policy_loss_sums
from jaxppo.methods import Method


def make_objective(
    method: Method,
    *,
    max_length: int | None = None,
    vf_coef: float = 1.0,
    cliprange_value: float = 0.2,
    entropy: EntropyController | None = None,
    entropy_share: float = 1.0,
    off_policy_threshold: float | None = None,
    importance: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None,
) -> Objective:
    """Makes the loss of a method.

    The price of the KL in the loss is the KL controller's, which so works in both places.

    Args:
      method: a row of `METHODS`, or of your own.
      max_length: most tokens a response may have; `fixed_length` needs it.
      vf_coef, cliprange_value: of the critic, if the method has one; see `ppo_loss_sums`.
      entropy: controller of the entropy bonus; None: no bonus.
      entropy_share: the share of tokens, by `old_entropy`, that the policy's term acts on; see
        `top_entropy`. The threshold is that of the whole step.
      off_policy_threshold: see `on_policy_enough`; None: nothing is left out.
      importance: `(old_logprobs, behaviour_logprobs, mask) -> [S, N]`, of `corrections`, for
        batches that have behaviour_logprobs; None: no correction.

    Returns:
      An Objective. It raises ValueError when a batch lacks an array that these options need.
    """
    bonus = entropy is not None  # without one no gradient is taken of the entropy, which costs
    entropy = entropy or fixed_entropy(0.0)

    def weigh(batch: PPOBatch) -> Weights:
        mask = batch.mask
        weights = method.normaliser(mask, max_length)
        scale = mask.astype(weights.dtype)
        if entropy_share < 1:
            _need(batch.old_entropy, "old_entropy", "entropy_share")
            scale *= top_entropy(batch.old_entropy, mask, share=entropy_share)
        if importance is not None:
            _need(batch.behaviour_logprobs, "behaviour_logprobs", "importance")
            scale *= importance(batch.old_logprobs, batch.behaviour_logprobs, mask)
        return Weights(weights, token_mean(mask), scale)

    def sums(seen: Evaluation, batch: PPOBatch, weights: Weights, prices: Prices):
        scale, kl = weights.scale, {}
        if off_policy_threshold is not None:
            drawn = batch.old_logprobs
            drawn = drawn if batch.behaviour_logprobs is None else batch.behaviour_logprobs
            scale = scale * on_policy_enough(
                seen.logprobs, drawn, batch.advantages, batch.mask, threshold=off_policy_threshold
            )
        if method.kl.loss == "exact":
            _need(seen.kl, "an exact kl from evaluate", "the exact KL in the loss")
            kl = {"kl": seen.kl}
        elif method.kl.loss is not None:
            _need(batch.ref_logprobs, "ref_logprobs", "the KL in the loss")
            kl = {
                "ref_logprobs": batch.ref_logprobs,
                "kl_kind": method.kl.loss,
                "behaviour_logprobs": batch.behaviour_logprobs,
            }
        result = policy_loss_sums(
            seen.logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.mask,
            weights.policy,
            ratio=method.ratio,
            clip=method.clip,
            scale=scale,
            **kl,
            kl_coef=prices.kl,
            entropy=seen.entropy,
            entropy_weights=weights.token if bonus else None,
            entropy_coef=prices.entropy,
        )
        if not method.critic:
            return result
        critic = value_loss_sums(
            seen.values,
            batch.old_values,
            batch.returns,
            batch.mask,
            cliprange_value=cliprange_value,
        )
        # Every real token weighs the same, so the sum takes the weight of any.
        summed = critic["losses/value_loss"]
        critic["losses/value_loss"] = summed * jnp.max(weights.token).astype(summed.dtype)
        total = result["losses/total_loss"] + vf_coef * critic["losses/value_loss"]
        return {**result, **critic, "losses/total_loss": total}

    return Objective(weigh, sums, entropy)


def _need(array, name: str, why: str) -> None:
    if array is None:
        raise ValueError(f"{why} needs {name}, which the batch does not have.")
