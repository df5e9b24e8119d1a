"""Pure maths on arrays: no models, no files, no state that is not passed in.

The parts that methods are made of are modules of their own: `groups`, `selection` and `combine`
(advantages), `ratios`, `clips`, `normalisers`, `corrections`, `masks`.
"""

from jaxppo.core.advantages import gae, whiten
from jaxppo.core.combine import combine_rewards, normalised_sum
from jaxppo.core.entropy_bonus import (
    EntropyController,
    EntropyState,
    adaptive_entropy,
    fixed_entropy,
)
from jaxppo.core.groups import (
    above_baseline,
    batch_scaled,
    group_mean,
    group_mean_over_batch_std,
    group_normalised,
    leave_one_out,
    pass_at_k,
)
from jaxppo.core.kl import (
    LOG_RATIO_LIMIT,
    KLController,
    KLState,
    adaptive_kl,
    exact_kl,
    fixed_kl,
    kl_estimate,
    kl_loss,
)
from jaxppo.core.logprobs import (
    chunked_logprobs,
    chunked_logprobs_and_kl,
    entropy,
    response_states,
    token_logprobs,
)
from jaxppo.core.losses import finish_metrics, ppo_loss, ppo_loss_sums, value_loss_sums
from jaxppo.core.moments import MomentsState, init_moments, moments_std, update_moments
from jaxppo.core.policy_loss import policy_loss, policy_loss_sums
from jaxppo.core.selection import above_percentile, first_of_equal, has_signal, top_of_group

__all__ = [
    "LOG_RATIO_LIMIT",
    "EntropyController",
    "EntropyState",
    "KLController",
    "KLState",
    "MomentsState",
    "above_baseline",
    "above_percentile",
    "adaptive_entropy",
    "adaptive_kl",
    "batch_scaled",
    "chunked_logprobs",
    "chunked_logprobs_and_kl",
    "combine_rewards",
    "entropy",
    "exact_kl",
    "finish_metrics",
    "first_of_equal",
    "fixed_entropy",
    "fixed_kl",
    "gae",
    "group_mean",
    "group_mean_over_batch_std",
    "group_normalised",
    "has_signal",
    "init_moments",
    "kl_estimate",
    "kl_loss",
    "leave_one_out",
    "moments_std",
    "normalised_sum",
    "pass_at_k",
    "policy_loss",
    "policy_loss_sums",
    "ppo_loss",
    "ppo_loss_sums",
    "response_states",
    "token_logprobs",
    "top_of_group",
    "update_moments",
    "value_loss_sums",
    "whiten",
]
