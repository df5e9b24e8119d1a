"""Online reinforcement learning of language models in JAX.

Pure functions over parameter trees: sampling, experience, the PPO update; and `train`, which ties
them together.
"""

from jaxppo.checkpoint import CheckpointError
from jaxppo.collect import Task
from jaxppo.config import ConfigError, default_config
from jaxppo.core import (
    KLController,
    KLState,
    MomentsState,
    adaptive_entropy,
    adaptive_kl,
    exact_kl,
    finish_metrics,
    fixed_kl,
    gae,
    init_moments,
    kl_estimate,
    kl_loss,
    moments_std,
    policy_loss,
    ppo_loss,
    ppo_loss_sums,
    update_moments,
    whiten,
)
from jaxppo.core.batch import Evaluation, PPOBatch
from jaxppo.environments import Environment
from jaxppo.experience import Rollout, make_evaluate, make_experience, make_trunk
from jaxppo.methods import METHODS, Feedback, Method
from jaxppo.models import (
    Model,
    ModelError,
    create_model,
    eos_ids,
    init_value_head,
    load_pretrained,
    save_pretrained,
)
from jaxppo.objectives import make_objective
from jaxppo.ppo import PPOConfig, PPOState, ppo_init, ppo_step, ppo_update
from jaxppo.prompts import PromptError
from jaxppo.rewards import Reward, RewardError, Span, reward_model
from jaxppo.sampling import Samples, sample, stop_table
from jaxppo.train import Trained, TrainingError, train

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "CheckpointError",
    "ConfigError",
    "Environment",
    "Evaluation",
    "Feedback",
    "KLController",
    "KLState",
    "Method",
    "Model",
    "ModelError",
    "MomentsState",
    "PPOBatch",
    "PPOConfig",
    "PPOState",
    "PromptError",
    "Reward",
    "RewardError",
    "Rollout",
    "Samples",
    "Span",
    "Task",
    "Trained",
    "TrainingError",
    "adaptive_entropy",
    "adaptive_kl",
    "create_model",
    "default_config",
    "eos_ids",
    "exact_kl",
    "finish_metrics",
    "fixed_kl",
    "gae",
    "init_moments",
    "init_value_head",
    "kl_estimate",
    "kl_loss",
    "load_pretrained",
    "make_evaluate",
    "make_experience",
    "make_objective",
    "make_trunk",
    "moments_std",
    "policy_loss",
    "ppo_init",
    "ppo_loss",
    "ppo_loss_sums",
    "ppo_step",
    "ppo_update",
    "reward_model",
    "sample",
    "save_pretrained",
    "stop_table",
    "train",
    "update_moments",
    "whiten",
]
