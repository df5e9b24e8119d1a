"""Pure maths on arrays: no models, no files, no state that is not passed in."""

from jaxppo.core.advantages import gae, whiten
from jaxppo.core.kl import (
    KLController,
    KLState,
    adaptive_kl,
    exact_kl,
    fixed_kl,
    kl_estimate,
)
from jaxppo.core.logprobs import chunked_logprobs, entropy, response_states, token_logprobs
from jaxppo.core.losses import LOG_RATIO_LIMIT, finish_metrics, ppo_loss, ppo_loss_sums
from jaxppo.core.moments import MomentsState, init_moments, moments_std, update_moments

__all__ = [
    "LOG_RATIO_LIMIT",
    "KLController",
    "KLState",
    "MomentsState",
    "adaptive_kl",
    "chunked_logprobs",
    "entropy",
    "exact_kl",
    "finish_metrics",
    "fixed_kl",
    "gae",
    "init_moments",
    "kl_estimate",
    "moments_std",
    "ppo_loss",
    "ppo_loss_sums",
    "response_states",
    "token_logprobs",
    "update_moments",
    "whiten",
]
