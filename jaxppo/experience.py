"""Experience: samples and their scores become advantages. `B` rows, `P` prompt, `N` response."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxppo.core.advantages import gae, whiten
from jaxppo.core.batch import Evaluation, PPOBatch
from jaxppo.core.kl import kl_estimate
from jaxppo.core.logprobs import chunked_logprobs, chunked_logprobs_and_kl, response_states
from jaxppo.core.masks import ended_only
from jaxppo.core.selection import has_signal
from jaxppo.methods import Feedback, Method
from jaxppo.models import Model, apply_value_head
from jaxppo.sampling import forbid, is_truncating, keep_most_probable, scale


class Rollout(NamedTuple):
    """Prompts and the responses to them: the `PPOBatch.inputs` of a transformer.

    prompts, prompt_mask: `[B, P]`, padded on the left.
    tokens, mask: `[B, N]`, padded on the right.
    kept: `[B, N]` from `Samples`, None without truncation.
    seen: `[B, N]` bool, what the model reads of the response: the actions that `mask` says, and
      what it was told between them; None: nothing but actions.
    trunk: `[B, P+N-1, D]` from `make_trunk`, states that need no computing; None: all are computed.
    """

    prompts: jax.Array
    prompt_mask: jax.Array
    tokens: jax.Array
    mask: jax.Array
    kept: jax.Array | None = None
    seen: jax.Array | None = None
    trunk: jax.Array | None = None


def make_trunk(model: Model, layers: int):
    """Makes `trunk(params, rollout) -> [B, P+N-1, D]`: the states after so many blocks.

    Where no gradient reaches those blocks, and policy and reference share them, they are computed
    once: put the result into `Rollout.trunk` and tell `make_evaluate` their number.
    """

    def trunk(params, rollout: Rollout):
        tokens, mask = _fed(rollout)
        return model.apply(params, tokens, mask=mask, last=layers)[0]

    return trunk


def _fed(rollout: Rollout):
    """Tokens and mask of what the model is fed; the last response token predicts nothing."""
    seen = rollout.mask if rollout.seen is None else rollout.seen
    tokens = jnp.concatenate([rollout.prompts, rollout.tokens[:, :-1]], axis=1)
    return tokens, jnp.concatenate([rollout.prompt_mask, seen[:, :-1]], axis=1)


def make_evaluate(
    model: Model,
    *,
    temperature=1.0,
    top_k: int = 0,
    top_p=1.0,
    min_p=0.0,
    eos_ids: tuple[int, ...] = (),
    min_new_tokens: int = 0,
    chunk_size: int | None = None,
    trunk_layers: int = 0,
    critic: Model | None = None,
):
    """Makes the transformer's `evaluate(params, batch, reference=None) -> Evaluation`.

    It reproduces the log-probs of `sample` called with the same options. The batch is a
    `PPOBatch` whose `inputs` is a `Rollout`, or a `Rollout` by itself. Values come from
    `params["value_head"]`, and are 0 without one. The head reads the last states of the policy; or
    of the blocks and the norm in `params["value_branch"]`, put in place of the policy's top ones;
    or of a model of its own with the parameters `params["critic"]`.

    With `reference`, the parameters of a language model of the same architecture, it gives the
    exact KL to that as well, at the cost of another pass and of twice the logits.

    Args:
      model: the bundle of functions.
      temperature, top_k, top_p, min_p, eos_ids, min_new_tokens: as given to `sample`.
      chunk_size: tokens whose logits exist at once; None picks about 64 MB of them.
      trunk_layers: after how many blocks the states in `Rollout.trunk` are, if it has some.
      critic: the separate critic's architecture.

    Raises:
      ValueError: temperature 0. Greedy decoding has no distribution to take a ratio of.
    """
    if isinstance(temperature, int | float) and temperature <= 0:
        raise ValueError("temperature must be above 0: greedy samples can't be trained on")
    truncating = is_truncating(top_k=top_k, top_p=top_p, min_p=min_p)
    chunk_size = chunk_size or max(128, 2**24 // model.config.vocab_size)

    def forward(params, rollout: Rollout):
        """Final states of the policy, and those that the value head reads."""
        tokens, mask = _fed(rollout)
        hidden, first = rollout.trunk, trunk_layers if rollout.trunk is not None else 0
        branch = params.get("value_branch")
        value_hidden = None
        if branch is not None:
            top = model.config.layers - sum(name.startswith("block_") for name in branch)
            hidden, _ = model.apply(params, tokens, mask=mask, hidden=hidden, first=first, last=top)
            first = top
            value_hidden, _ = model.apply(
                {**params, **branch}, tokens, mask=mask, hidden=hidden, first=first
            )
        elif "critic" in params:
            value_hidden, _ = critic.apply(params["critic"], tokens, mask=mask)
        hidden, _ = model.apply(params, tokens, mask=mask, hidden=hidden, first=first)
        return hidden, hidden if value_hidden is None else value_hidden

    def evaluate(params, batch, reference=None) -> Evaluation:
        rollout: Rollout = batch.inputs if isinstance(batch, PPOBatch) else batch
        B, P = rollout.prompts.shape
        N = rollout.tokens.shape[1]
        if truncating and rollout.kept is None:
            raise ValueError(
                "these samples were drawn without top_k, top_p and min_p, but are evaluated with "
                "them: pass Samples.kept in the Rollout, or evaluate as they were sampled"
            )
        hidden, value_hidden = forward(params, rollout)
        states = response_states(hidden, P, response_length=N)

        def logits_of(params):
            def logits_fn(states, tokens, step, kept):
                x = scale(model.unembed(params, states), temperature)
                x = forbid(x, eos_ids, step < min_new_tokens) if min_new_tokens else x
                return keep_most_probable(x, kept, tokens) if truncating else x

            return logits_fn

        step = jnp.broadcast_to(jnp.arange(N), (B, N))
        if rollout.seen is not None:  # tokens of this action so far
            told = rollout.seen & ~rollout.mask
            step = step - jax.lax.cummax(jnp.where(told, step + 1, 0), axis=1)
        kept = rollout.kept if truncating else step
        extras, kl = (rollout.tokens, step, kept), None
        if reference is None:
            logprobs, entropy = chunked_logprobs(
                logits_of(params), states, *extras, chunk_size=chunk_size
            )
        else:
            reference = jax.lax.stop_gradient(reference)
            ref_states = response_states(forward(reference, rollout)[0], P, response_length=N)
            logprobs, entropy, kl = chunked_logprobs_and_kl(
                logits_of(params), logits_of(reference), states, ref_states, *extras,
                chunk_size=chunk_size,
            )  # fmt: skip
        if "value_head" in params:
            states = response_states(value_hidden, P, response_length=N)
            values = apply_value_head(params["value_head"], states)
        else:
            values = jnp.zeros_like(logprobs)
        return Evaluation(logprobs, values, entropy, kl)

    return evaluate


def shape_rewards(scores, kl, mask, kl_coef):
    """Returns `scores - kl_coef * kl` at the response's tokens, `[B, N]`, and 0 in padding.

    `scores` is on the response grid already: a sample's score lies on its last action.
    """
    return jnp.where(mask, scores - kl_coef * jnp.where(mask, kl, 0.0), 0.0)


def make_experience(
    rollout: Rollout,
    scores,
    old: Evaluation,
    ref_logprobs,
    *,
    kl_coef,
    gamma: float,
    lam: float,
    kl_estimator: str = "k1",
    whiten_advantages: bool = True,
    present=None,
) -> tuple[PPOBatch, dict[str, jax.Array]]:
    """Turns scored samples into a batch for `ppo_step`. Called once a cycle, on all its samples.

    Args:
      rollout: the samples.
      scores: `[B, N]` float, the scaled scores on the response grid; or `[B]`, one a sample, which
        goes to its last action.
      old: the sampling policy's evaluation of the rollout.
      ref_logprobs: `[B, N]`, the reference's log-probs of the same tokens under the same transform.
      kl_coef: weight of the KL penalty (nats to units of score).
      gamma, lam: of `gae`, a token.
      kl_estimator: the per-token penalty, see `kl_estimate`.
      whiten_advantages: to mean 0 and variance 1 over the real tokens of the whole cycle.
      present: `[B]` bool, samples that have a score; None: all. The others count nowhere.

    Returns:
      The batch, and metrics of the cycle (scalars). `policy/kl` is the mean over samples of the
      summed log-ratio, the unbiased estimate whose target the controller holds.
    """
    rollout, rewards, kl, metrics = _shaped(
        rollout, scores, old, ref_logprobs, kl_coef, kl_estimator, present
    )
    mask = rollout.mask
    advantages, returns = gae(rewards, old.values, mask, gamma=gamma, lam=lam)
    metrics |= _of_credit(old, advantages, returns, mask)
    if whiten_advantages:
        advantages = whiten(advantages, mask)
    batch = PPOBatch(
        inputs=rollout,
        old_logprobs=old.logprobs,
        old_values=old.values,
        advantages=advantages,
        returns=returns,
        mask=mask,
        kl=kl,
    )
    return batch, metrics


def make_method_experience(
    rollout: Rollout,
    scores,
    old: Evaluation,
    ref_logprobs,
    *,
    method: Method,
    kl_coef,
    kl_estimator: str = "k1",
    groups=None,
    present=None,
    ended=None,
    baseline=None,
    step=0,
) -> tuple[PPOBatch, dict[str, jax.Array]]:
    """Turns scored samples into a batch for `ppo_step(..., objective=make_objective(method))`.

    Args:
      rollout, scores, old, ref_logprobs: as for `make_experience`.
      method: a row of `METHODS`.
      kl_coef, kl_estimator: of the KL in the reward, where the method has it there.
      groups: `[B]` int32, equal for samples of one prompt.
      present: `[B]` bool, samples that have a score; None: all.
      ended: `[B]` bool from the sampler: responses that were cut off leave the loss, while their
        rewards stay in their groups' baselines. None: they stay.
      baseline: `[B]`, the reward of the greedy response to the same prompt, for `remax`.
      step: cycles done.

    Returns:
      The batch, and metrics of the cycle (scalars) as from `make_experience`.
    """
    coef = kl_coef if method.kl.reward else 0.0
    rollout, rewards, kl, metrics = _shaped(
        rollout, scores, old, ref_logprobs, coef, kl_estimator, present
    )
    mask = rollout.mask
    feedback = Feedback(rewards, mask, groups, present, old.values, baseline, step)
    credit = method.advantage(feedback)
    kept = mask & credit.keep[:, None]
    metrics |= _of_credit(old, credit.advantages, credit.returns, kept)
    if groups is not None:
        totals = jnp.where(mask, rewards, 0.0).sum(1)
        metrics["rollout/groups_with_signal"] = has_signal(totals, groups, credit.keep).mean()
    kept = kept if ended is None else ended_only(kept, ended)
    metrics["rollout/kept"] = kept.any(1).mean()
    batch = PPOBatch(
        inputs=rollout,
        old_logprobs=old.logprobs,
        old_values=old.values,
        advantages=credit.advantages,
        returns=credit.returns,
        mask=kept,
        kl=kl,
        ref_logprobs=ref_logprobs,
        old_entropy=old.entropy,
    )
    return batch, metrics


def _shaped(rollout: Rollout, scores, old: Evaluation, ref_logprobs, kl_coef, kind, present):
    """Samples that are present, rewards `[B, N]` with the price of KL, KL `[B]`, and metrics."""
    scores = jnp.asarray(scores)
    if present is None:
        present = jnp.ones(len(scores), bool)
    mask = rollout.mask & present[:, None]
    if scores.ndim == 1:
        scores = jnp.where(last_action(mask), scores[:, None], 0.0)
    chex.assert_equal_shape([scores, mask])
    log_ratio = jnp.where(mask, old.logprobs - ref_logprobs, 0.0)
    penalty = jnp.where(mask, kl_estimate(old.logprobs, ref_logprobs, kind), 0.0)
    rewards = shape_rewards(scores, penalty, mask, kl_coef)
    mean = lambda x: x.sum() / jnp.maximum(present.sum(), 1)  # noqa: E731
    kl = log_ratio.sum(1)
    k3 = jnp.where(mask, kl_estimate(old.logprobs, ref_logprobs, "k3"), 0.0)
    metrics = {
        "policy/kl": mean(kl),
        "policy/kl_k3": mean(k3.sum(1)),
        "policy/sqrt_kl": jnp.sqrt(mean(k3.sum(1))),
        "policy/kl_per_token": log_ratio.sum() / jnp.maximum(mask.sum(), 1),
        "rollout/reward_after_kl": mean(rewards.sum(1)),
    }
    # the controller takes the mean over all rows, which so is that over those present
    kl = jnp.where(present, kl, mean(kl))
    return rollout._replace(mask=mask), rewards, kl, metrics


def last_action(mask):
    """`[B, N]` bool, true at each response's last token, where a score lies."""
    return mask & (jnp.cumsum(mask, axis=1) == mask.sum(1, keepdims=True))


def _of_credit(old: Evaluation, advantages, returns, mask) -> dict[str, jax.Array]:
    count = jnp.maximum(mask.sum(), 1)
    return {
        **_spread("old_values", old.values, mask),
        **_spread("returns", returns, mask),
        "rollout/advantage_mean": jnp.where(mask, advantages, 0).sum() / count,
        "rollout/advantage_std": jnp.sqrt(jnp.where(mask, advantages**2, 0).sum() / count),
    }


def _spread(name: str, x, mask) -> dict[str, jax.Array]:
    """Mean, standard deviation, least and largest real entry; zeros when there is none."""
    count = jnp.maximum(mask.sum(), 1)
    x = jnp.where(mask, x, 0.0)
    mean = x.sum() / count
    return {
        f"{name}/mean": mean,
        f"{name}/std": jnp.sqrt(jnp.where(mask, jnp.square(x - mean), 0.0).sum() / count),
        f"{name}/min": jnp.where(mask.any(), jnp.where(mask, x, jnp.inf).min(), 0.0),
        f"{name}/max": jnp.where(mask.any(), jnp.where(mask, x, -jnp.inf).max(), 0.0),
    }
