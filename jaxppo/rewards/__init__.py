"""Rewards: Python functions, reward models, scaling."""

from jaxppo.rewards.functions import RewardError, Scores, call_metric, call_reward
from jaxppo.rewards.model import reward_model
from jaxppo.rewards.scaling import ScalingState, init_scaling, scale_scores

__all__ = [
    "RewardError",
    "ScalingState",
    "Scores",
    "call_metric",
    "call_reward",
    "init_scaling",
    "reward_model",
    "scale_scores",
]
