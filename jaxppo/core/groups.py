"""Advantages from a sample's siblings: the responses drawn for the same prompt.

Letters: B samples, G groups, n samples a group. Samples of a group need not stand together and
groups may differ in size. A sample may be missing (`present` False): its reward was not given, or
it holds no action. It takes no part in its group and has advantage 0.

A group without spread says nothing about which of its responses is better. Whether there is spread
is found by comparing the largest and the smallest reward, never by a small number: in float32 the
mean of seven rewards of 0.1 is not 0.1, and dividing the residue by a standard deviation of the
same size makes an advantage of order 1 out of rounding. So equal rewards, and a group of one, have
advantage 0 exactly, in every function here.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class GroupStats(NamedTuple):
    """What each sample's group looks like, `[B]` each; all 0 where no sample is present.

    ids: the group's number in 0..B - 1, by rank of the ids that were given.
    count: samples present.
    mean, low, high: of the rewards present.
    """

    ids: jax.Array
    count: jax.Array
    mean: jax.Array
    low: jax.Array
    high: jax.Array

    @property
    def varies(self) -> jax.Array:
        """`[B]` bool: whether two rewards of the sample's group differ."""
        return self.high > self.low


def flatten_groups(
    rewards: chex.Array, groups: chex.Array | None, present: chex.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Brings both ways of giving groups to one.

    Args:
      rewards: [B] with `groups`, or [G, n] without.
      groups: [B], integers, equal for siblings.
      present: the shape of rewards, bool; None: all are.

    Returns:
      (rewards, groups, present), [B] each; missing rewards are 0, so that NaN cannot spread.

    Raises:
      ValueError: if groups are missing, or given twice.
      AssertionError: if the shapes differ.
    """
    rewards = jnp.asarray(rewards)
    present = jnp.ones(rewards.shape, bool) if present is None else jnp.asarray(present, bool)
    chex.assert_equal_shape([rewards, present])
    if rewards.ndim == 2 and groups is None:
        groups = jnp.broadcast_to(jnp.arange(rewards.shape[0])[:, None], rewards.shape)
    elif groups is None:
        raise ValueError(
            "rewards of shape [B] need groups of shape [B], which tell the samples of one prompt: "
            "give groups, or rewards of shape [prompts, samples a prompt]."
        )
    groups = jnp.asarray(groups)
    chex.assert_equal_shape([rewards, groups])
    rewards, groups, present = rewards.reshape(-1), groups.reshape(-1), present.reshape(-1)
    dtype = jnp.promote_types(rewards.dtype, jnp.float32)
    return jnp.where(present, rewards, 0).astype(dtype), groups, present


def group_stats(rewards: chex.Array, groups: chex.Array, present: chex.Array) -> GroupStats:
    """Computes each group's figures, as seen by each of its samples; arguments [B] each."""
    ids = jnp.unique(groups, return_inverse=True, size=groups.size)[1].reshape(-1)

    def of_group(reduce, x):
        return reduce(x, ids, num_segments=ids.size)[ids]

    count = of_group(jax.ops.segment_sum, present.astype(rewards.dtype))
    low = of_group(jax.ops.segment_min, jnp.where(present, rewards, jnp.inf))
    high = of_group(jax.ops.segment_max, jnp.where(present, rewards, -jnp.inf))
    low, high = jnp.where(count > 0, low, 0), jnp.where(count > 0, high, 0)
    # Summed from the smallest up: the mean of equal rewards is that reward to the bit.
    above = of_group(jax.ops.segment_sum, jnp.where(present, rewards - low, 0))
    return GroupStats(ids, count, low + above / jnp.maximum(count, 1), low, high)


def group_mean(
    rewards: chex.Array, groups: chex.Array | None = None, present: chex.Array | None = None
) -> jax.Array:
    r"""Subtracts the mean of the group.

        A_i = r_i - mean_{j in group(i)} r_j

    Source: Liu et al. 2025 (Dr. GRPO), https://arxiv.org/abs/2503.20783.

    Args:
      rewards: [B] with `groups`, or [G, n] without, in units of reward.
      groups: [B], integers, equal for siblings.
      present: the shape of rewards, bool; None: all are.

    Returns:
      The shape of rewards, float32 or wider; 0 for missing samples and in groups without spread.

    Raises:
      ValueError: if rewards are [B] and there are no groups.
      AssertionError: if the shapes differ.
    """
    flat, groups, real = flatten_groups(rewards, groups, present)
    stats = group_stats(flat, groups, real)
    advantages = jnp.where(real & stats.varies, flat - stats.mean, 0)
    return advantages.reshape(jnp.shape(rewards))


def group_normalised(
    rewards: chex.Array,
    groups: chex.Array | None = None,
    present: chex.Array | None = None,
    *,
    eps: float = 1e-4,
) -> jax.Array:
    r"""Subtracts the mean of the group and divides by its standard deviation.

        A_i = (r_i - mean) / (std + eps),   std^2 = sum_j (r_j - mean)^2 / (n - 1)

    The paper leaves open by what the variance is divided; n - 1 (and eps) are TRL's and verl's.

    Source: Shao et al. 2024 (GRPO), https://arxiv.org/abs/2402.03300, section 4.1.2.

    Args, returns and errors: see `group_mean`; eps in units of reward. The result has no unit.
    """
    flat, groups, real = flatten_groups(rewards, groups, present)
    stats = group_stats(flat, groups, real)
    used = real & stats.varies
    centred = jnp.where(used, flat - stats.mean, 0)
    square = jax.ops.segment_sum(jnp.square(centred), stats.ids, num_segments=flat.size)[stats.ids]
    std = jnp.sqrt(jnp.where(used, square, 1) / jnp.maximum(stats.count - 1, 1))
    return (centred / (std + eps)).reshape(jnp.shape(rewards))


def group_mean_over_batch_std(
    rewards: chex.Array,
    groups: chex.Array | None = None,
    present: chex.Array | None = None,
    *,
    eps: float = 1e-4,
) -> jax.Array:
    r"""Subtracts the mean of the group and divides by the standard deviation of the whole batch.

        A_i = (r_i - mean_{group(i)}) / (std + eps),   std over all rewards present, by n - 1

    So an easy group, whose rewards hardly differ, is not blown up to the size of a hard one.

    Source: Liu et al. 2025, "Part I: Tricks or Traps?", https://arxiv.org/abs/2508.08221.

    Args, returns and errors: see `group_normalised`.
    """
    flat, groups, real = flatten_groups(rewards, groups, present)
    advantages = group_mean(flat, groups, real)
    return (advantages / (_std(flat, real) + eps)).reshape(jnp.shape(rewards))


def batch_scaled(
    advantages: chex.Array, present: chex.Array | None = None, *, eps: float = 1e-8
) -> jax.Array:
    r"""Divides by the standard deviation of the whole batch; the mean stays, so 0 stays 0.

        y_i = x_i / (std + eps),   std^2 = sum_j (x_j - mean)^2 / (n - 1)

    For advantages that their groups have centred already. Equal values become 0.

    Source: Hu et al. 2025 (REINFORCE++), https://arxiv.org/abs/2501.03262, global normalisation.

    Args:
      advantages: any shape.
      present: the shape of advantages, bool; None: all are.
      eps: added to the standard deviation.

    Returns:
      The shape of advantages, float32 or wider; 0 for missing samples.
    """
    x = jnp.asarray(advantages)
    real = jnp.ones(x.shape, bool) if present is None else jnp.asarray(present, bool)
    chex.assert_equal_shape([x, real])
    x = jnp.where(real, x, 0).astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.where(_varies(x, real), x / (_std(x, real) + eps), 0)


def leave_one_out(
    rewards: chex.Array, groups: chex.Array | None = None, present: chex.Array | None = None
) -> jax.Array:
    r"""Subtracts the mean of the *other* samples of the group, a baseline without bias.

        A_i = r_i - sum_{j != i} r_j / (n - 1)  =  n / (n - 1) (r_i - mean)

    Source: Ahmadian et al. 2024 (RLOO), https://arxiv.org/abs/2402.14740.

    Args, returns and errors: see `group_mean`.
    """
    flat, groups, real = flatten_groups(rewards, groups, present)
    count = group_stats(flat, groups, real).count
    advantages = group_mean(flat, groups, real) * (count / jnp.maximum(count - 1, 1))
    return advantages.reshape(jnp.shape(rewards))


def above_baseline(
    rewards: chex.Array, baseline: chex.Array, present: chex.Array | None = None
) -> jax.Array:
    r"""Subtracts a baseline of each sample's own, such as the reward of the greedy response.

        A_i = r_i - b_i

    Source: Li et al. 2023 (ReMax), https://arxiv.org/abs/2310.10505.

    Args:
      rewards: any shape, in units of reward.
      baseline: the shape of rewards; must not depend on the sample, only on its prompt.
      present: the shape of rewards, bool; False where the reward or the baseline is missing.

    Returns:
      The shape of rewards, float32 or wider; 0 for missing samples.
    """
    rewards, baseline = jnp.asarray(rewards), jnp.asarray(baseline)
    present = jnp.ones(rewards.shape, bool) if present is None else jnp.asarray(present, bool)
    chex.assert_equal_shape([rewards, baseline, present])
    dtype = jnp.promote_types(jnp.result_type(rewards, baseline), jnp.float32)
    rewards, baseline = (jnp.where(present, x, 0).astype(dtype) for x in (rewards, baseline))
    return rewards - baseline


def pass_at_k(
    rewards: chex.Array,
    groups: chex.Array | None = None,
    present: chex.Array | None = None,
    *,
    k: int,
) -> jax.Array:
    r"""Credits a sample with what it adds to the best of k.

        A_i = mean over S of  max(r_i, max_{j in S} r_j) - max_{j in S} r_j

    over all sets S of k - 1 of its siblings. The mean of A_i grad log pi(i) over the group is 1/k
    of an unbiased estimate of the gradient of E[max of k rewards]: pass@k for rewards 0 and 1.
    With k the size of the group only the best sample has an advantage, its lead over the second.

    Sources: Tang et al. 2025, https://arxiv.org/abs/2503.19595, for k = n; Walder and Karkhanis
    2025, https://arxiv.org/abs/2505.15201, for any k.

    Args:
      rewards, groups, present: see `group_mean`.
      k: samples of which the best counts, >= 2. For k = 1 use `leave_one_out`.

    Returns:
      The shape of rewards, float32 or wider, >= 0; 0 for missing samples, in groups without spread
      and in groups of fewer than k, where no set exists. Time and memory grow with B^2.

    Raises:
      ValueError: if k < 2.
    """
    if k < 2:
        raise ValueError(f"pass_at_k needs k >= 2, got {k}: the best of one is leave_one_out.")
    flat, groups, real = flatten_groups(rewards, groups, present)
    stats = group_stats(flat, groups, real)
    rank = ranks(flat, groups, real)
    # j is the largest of S in C(rank_j, k - 2) of the C(n - 1, k - 1) sets, as factors <= 1; in a
    # group of fewer than k one of them is 0.
    chance = (k - 1) / jnp.maximum(stats.count - 1, 1)
    for t in range(k - 2):
        chance *= jnp.maximum(rank - t, 0) / jnp.maximum(stats.count - 2 - t, 1)
    lead = jnp.maximum(flat[:, None] - flat, 0)
    lead = jnp.where(siblings(groups, real), lead, 0)
    return (lead @ jnp.where(real, chance, 0)).reshape(jnp.shape(rewards))


def siblings(groups: chex.Array, present: chex.Array) -> jax.Array:
    """[B, B] bool: whether both samples are present and of one group; a sample is its own."""
    return (groups[:, None] == groups) & present[:, None] & present


def ranks(rewards: chex.Array, groups: chex.Array, present: chex.Array) -> jax.Array:
    """[B] integers: siblings that come before the sample, from the smallest reward up.

    Of equal rewards the earlier sample comes first, so the ranks of a group are 0..n - 1.
    """
    order = jnp.arange(rewards.size)
    before = (rewards < rewards[:, None]) | (
        (rewards == rewards[:, None]) & (order < order[:, None])
    )
    return jnp.sum(before & siblings(groups, present), axis=1)


def _varies(x: jax.Array, real: jax.Array) -> jax.Array:
    low = jnp.min(x, where=real, initial=jnp.inf)
    return jnp.max(x, where=real, initial=-jnp.inf) > low


def _std(x: jax.Array, real: jax.Array) -> jax.Array:
    """Standard deviation of the real entries, by n - 1; 1 where they do not vary."""
    count = jnp.sum(real).astype(x.dtype)
    mean = jnp.sum(jnp.where(real, x, 0)) / jnp.maximum(count, 1)
    square = jnp.sum(jnp.where(real, jnp.square(x - mean), 0))
    return jnp.where(_varies(x, real), jnp.sqrt(square / jnp.maximum(count - 1, 1)), 1)
