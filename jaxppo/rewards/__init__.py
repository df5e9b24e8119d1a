"""Rewards: Python functions, reward models, scaling."""

from jaxppo.rewards.functions import RewardError, Scores, Span, call_metric, call_reward
from jaxppo.rewards.model import reward_model
from jaxppo.rewards.scaling import ScalingState, init_scaling, scale_scores
from jaxppo.rewards.scoring import Reward, Tally, as_rewards, score_samples

__all__ = [
    "Reward",
    "RewardError",
    "ScalingState",
    "Scores",
    "Span",
    "Tally",
    "as_rewards",
    "call_metric",
    "call_reward",
    "init_scaling",
    "reward_model",
    "scale_scores",
    "score_samples",
]
