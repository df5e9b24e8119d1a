"""Rewards: Python functions, reward models, verifiers, judges; failure policies; scaling."""

from jaxppo.rewards.functions import RewardError, Scores, Span, call_metric, call_reward
from jaxppo.rewards.judges import judge, score_between
from jaxppo.rewards.model import reward_model
from jaxppo.rewards.scaling import ScalingState, init_scaling, scale_scores
from jaxppo.rewards.scoring import Reward, Tally, as_rewards, score_samples
from jaxppo.rewards.verifiers import (
    exact_answer,
    last_number,
    matches,
    math_equal,
    numeric_answer,
    reasoning_task,
)

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
    "exact_answer",
    "init_scaling",
    "judge",
    "last_number",
    "matches",
    "math_equal",
    "numeric_answer",
    "reasoning_task",
    "reward_model",
    "scale_scores",
    "score_between",
    "score_samples",
]
