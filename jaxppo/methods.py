"""Every method as five choices: advantage, ratio, clip, normaliser, and where the KL stands.

`METHODS` is the whole list; a method is a row of it, and docs/methods.md has the formulas. A new
one is a function for the place where it differs, and a row.

Letters: B samples, N positions of the response.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxppo.core import clips, groups, normalisers, ratios, selection
from jaxppo.core.advantages import gae, whiten
from jaxppo.core.policy_loss import Clip, Normaliser, Ratio


class Feedback(NamedTuple):
    """What is known of the samples of a cycle when advantages are estimated.

    rewards: `[B, N]`, what each action earned: a score of the whole response stands on its last
      action, and the price of KL is subtracted where the method has it in the reward.
    mask: `[B, N]` bool, true at actions.
    groups: `[B]` integers, equal for samples of one prompt; None where the method needs none.
    present: `[B]` bool, false where no reward applies to the sample; None: all have one.
    values: `[B, N]`, the critic's; None without one.
    baseline: `[B]`, the reward of the greedy response to the same prompt; None without one.
    step: cycles done so far, for methods whose choice tightens over time.
    """

    rewards: chex.Array
    mask: chex.Array
    groups: chex.Array | None = None
    present: chex.Array | None = None
    values: chex.Array | None = None
    baseline: chex.Array | None = None
    step: chex.Numeric = 0


class Credit(NamedTuple):
    """What the samples are worth to the update.

    advantages: `[B, N]`, 0 at masked positions.
    returns: `[B, N]`, what a critic is to predict: the sum of rewards from the action on, where the
      method has no better one.
    keep: `[B]` bool. The other samples leave the update: no loss, no KL, no part in a denominator.
    """

    advantages: jax.Array
    returns: jax.Array
    keep: jax.Array


class KLPlace(NamedTuple):
    """Where the KL to the reference stands, and how it is measured; None for not.

    reward: a kind of `kl_estimate` of two log-probs, subtracted from each action's reward by who
      makes the rewards.
    loss: a kind of `kl_loss`, or "exact" for what `Evaluation.kl` holds, added to the loss.
    """

    reward: str | None = None
    loss: str | None = None


class Method(NamedTuple):
    """A row of the table.

    advantage: `(Feedback) -> Credit`.
    ratio: of `jaxppo.core.ratios`.
    clip: of `jaxppo.core.clips`.
    normaliser: of `jaxppo.core.normalisers`.
    kl: where the KL stands, unless its coefficient is 0.
    critic: whether values are learnt.
    """

    advantage: Callable[[Feedback], Credit]
    ratio: Ratio
    clip: Clip
    normaliser: Normaliser
    kl: KLPlace
    critic: bool = False


def gae_credit(
    feedback: Feedback, *, gamma: float = 1.0, lam: float = 0.95, whitened: bool = True
) -> Credit:
    """Generalised advantage estimation with a critic, whitened over the cycle's tokens.

    Raises:
      ValueError: if there are no values.
    """
    if feedback.values is None:
        raise ValueError("this method needs a critic: give values, or choose a group method.")
    keep = _trainable(feedback)
    mask = feedback.mask & keep[:, None]
    advantages, returns = gae(feedback.rewards, feedback.values, mask, gamma=gamma, lam=lam)
    return Credit(whiten(advantages, mask) if whitened else advantages, returns, keep)


def reinforce_credit(feedback: Feedback, *, gamma: float = 1.0) -> Credit:
    """Rewards from the action on, whitened over the cycle's tokens; equal ones are 0 exactly."""
    keep = _trainable(feedback)
    mask = feedback.mask & keep[:, None]
    returns = _to_go(feedback.rewards, mask, gamma)
    low = jnp.min(returns, where=mask, initial=jnp.inf)
    varies = jnp.max(returns, where=mask, initial=-jnp.inf) > low
    return Credit(jnp.where(varies, whiten(returns, mask), 0), returns, keep)


def group_credit(feedback: Feedback, *, baseline: Callable) -> Credit:
    """One advantage a response, from its siblings: `baseline(rewards, groups, present)`, of [B].

    Raises:
      ValueError: if there are no groups.
    """
    return _by_sample(feedback, baseline(*_sample_rewards(feedback)))


def greedy_credit(feedback: Feedback) -> Credit:
    """The lead over the greedy response.

    Raises:
      ValueError: if there is no baseline.
    """
    if feedback.baseline is None:
        raise ValueError("this method needs the reward of the greedy response as a baseline.")
    rewards, _, present = _sample_rewards(feedback, grouped=False)
    return _by_sample(feedback, groups.above_baseline(rewards, feedback.baseline, present))


def chosen_credit(feedback: Feedback, *, choose: Callable) -> Credit:
    """Advantage 1 for chosen responses, and the others leave: `choose(rewards, groups, present)`.

    Raises:
      ValueError: if there are no groups.
    """
    chosen = choose(*_sample_rewards(feedback))
    credit = _by_sample(feedback, chosen.astype(jnp.result_type(feedback.rewards, jnp.float32)))
    return credit._replace(keep=credit.keep & chosen)


def rft_credit(
    feedback: Feedback, *, start: float = 0.7, end: float = 0.95, n_improve_steps: int = 4
) -> Credit:
    """Advantage 1 for responses above their group's percentile, which rises with the step."""
    percentile = selection.rft_percentile(
        feedback.step, start=start, end=end, n_improve_steps=n_improve_steps
    )
    return chosen_credit(
        feedback, choose=partial(selection.above_percentile, percentile=percentile)
    )


def centred_and_scaled(rewards, group_ids, present) -> jax.Array:
    """The mean of the group subtracted, then the standard deviation of the batch divided by."""
    return groups.batch_scaled(groups.group_mean(rewards, group_ids, present), present)


def _trainable(feedback: Feedback) -> jax.Array:
    """[B] bool: samples with a reward and an action. A response of no action teaches nothing."""
    some = jnp.any(jnp.asarray(feedback.mask, bool), axis=1)
    return some if feedback.present is None else some & jnp.asarray(feedback.present, bool)


def _to_go(rewards, mask, gamma: float) -> jax.Array:
    rewards = jnp.asarray(rewards)
    return gae(rewards, jnp.zeros_like(rewards), mask, gamma=gamma, lam=1.0)[0]


def _sample_rewards(feedback: Feedback, *, grouped: bool = True):
    if grouped and feedback.groups is None:
        raise ValueError("this method compares the samples of one prompt: give groups, [B].")
    return (
        jnp.sum(jnp.where(feedback.mask, feedback.rewards, 0), axis=1),
        feedback.groups,
        _trainable(feedback),
    )


def _by_sample(feedback: Feedback, advantages: jax.Array) -> Credit:
    keep = _trainable(feedback)
    mask = jnp.asarray(feedback.mask, bool) & keep[:, None]
    spread = jnp.where(mask, advantages[:, None], 0)
    return Credit(spread, _to_go(feedback.rewards, mask, 1.0), keep)


_no_kl = KLPlace()
_normalised = partial(group_credit, baseline=groups.group_normalised)

METHODS: dict[str, Method] = {
    "ppo": Method(
        gae_credit, ratios.token_ratio, clips.clip_ratio, normalisers.token_mean,
        KLPlace(reward="k1"), critic=True,
    ),
    "grpo": Method(
        _normalised, ratios.token_ratio, clips.clip_ratio, normalisers.sequence_mean,
        KLPlace(loss="k3"),
    ),
    "dr_grpo": Method(
        partial(group_credit, baseline=groups.group_mean), ratios.token_ratio, clips.clip_ratio,
        normalisers.fixed_length, _no_kl,
    ),
    "rloo": Method(
        partial(group_credit, baseline=groups.leave_one_out), ratios.trajectory_ratio,
        clips.clip_ratio, normalisers.sequence_mean, KLPlace(reward="k1"),
    ),
    "reinforce_pp": Method(
        reinforce_credit, ratios.token_ratio, clips.clip_ratio, normalisers.token_mean,
        KLPlace(reward="k1"),
    ),
    "reinforce_pp_baseline": Method(
        partial(group_credit, baseline=centred_and_scaled), ratios.token_ratio, clips.clip_ratio,
        normalisers.token_mean, KLPlace(loss="k2"),
    ),
    "remax": Method(
        greedy_credit, ratios.token_ratio, clips.likelihood, normalisers.sequence_sum,
        KLPlace(reward="k1"),
    ),
    "gspo": Method(
        _normalised, ratios.sequence_ratio, partial(clips.clip_ratio, low=3e-4, high=4e-4),
        normalisers.sequence_mean, _no_kl,
    ),
    "gspo_token": Method(
        _normalised, ratios.sequence_token_ratio, partial(clips.clip_ratio, low=3e-4, high=4e-4),
        normalisers.sequence_mean, _no_kl,
    ),
    "luspo": Method(
        _normalised, ratios.sequence_ratio, partial(clips.clip_ratio, low=3e-4, high=4e-4),
        normalisers.sequence_sum, _no_kl,
    ),
    "dapo": Method(
        _normalised, ratios.token_ratio, partial(clips.clip_ratio, low=0.2, high=0.28),
        normalisers.token_mean, _no_kl,
    ),
    "two_sided_grpo": Method(
        _normalised, ratios.token_ratio, clips.two_sided_clip, normalisers.token_mean,
        KLPlace(loss="k3"),
    ),
    "cispo": Method(
        _normalised, ratios.token_ratio, clips.cispo, normalisers.token_mean, _no_kl
    ),
    "sapo": Method(
        _normalised, ratios.token_ratio, clips.sapo, normalisers.sequence_mean, _no_kl
    ),
    "gmpo": Method(
        _normalised, ratios.token_ratio, clips.geometric_mean, normalisers.sequence_mean, _no_kl
    ),
    "vespo": Method(
        _normalised, ratios.token_ratio, clips.vespo, normalisers.token_mean, _no_kl
    ),
    "pass_at_k": Method(
        partial(group_credit, baseline=partial(groups.pass_at_k, k=2)), ratios.token_ratio,
        clips.clip_ratio, normalisers.token_mean, _no_kl,
    ),
    "best_of_n": Method(
        partial(chosen_credit, choose=selection.top_of_group), ratios.token_ratio,
        clips.likelihood, normalisers.token_mean, _no_kl,
    ),
    "rft": Method(
        rft_credit, ratios.token_ratio, clips.likelihood, normalisers.token_mean, _no_kl
    ),
}  # fmt: skip
