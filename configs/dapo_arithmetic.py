r"""Arithmetic learned from scratch with DAPO: clip-higher, token mean, and no group without signal.

    python -m jaxppo.main --config=configs/dapo_arithmetic.py

Problems, model and reward are those of grpo_arithmetic.py. Groups whose answers are all right or
all wrong say nothing about what is better; here others are drawn in their place, up to three times
a cycle, and what is too much begins the next cycle, weighted for the weights that drew it.

Two CPU cores, 6 minutes: of the unseen problems 0 % right before, 52 % after 300 cycles, 86 % after
400, 98.5 % from 500 to 800, at 2.3 draws a cycle. On so small a task GRPO is there sooner, since a
draw without signal costs as much as one with it.
"""

import itertools
import random

CHARACTERS = "0123456789+-="


def get_config():
    from jaxppo.config import default_config

    config = default_config()
    config.train.update(
        seq_length=16,
        epochs=800,
        batch_size=1024,
        eval_interval=100,
        checkpoint_interval=200,
    )
    config.optimizer.kwargs.update(lr=2e-3, weight_decay=0.0)
    config.scheduler.kwargs.update(T_max=800, eta_min=1e-4)
    config.method.update(
        name="dapo",
        dynamic_rounds=3,
        group_size=8,
        num_rollouts=1024,
        chunk_size=1024,
        ppo_epochs=1,
        init_kl_coef=0.0,
        entropy_coef=0.02,  # without one it settles on the commonest answers
    )
    config.method.gen_kwargs.update(max_new_tokens=1, eos_token_id=(), do_sample=False)
    config.method.gen_experience_kwargs.do_sample = True
    return config


def problems():
    """All `a+b-c` whose result is a digit, shuffled."""
    every = [
        {"prompt": f"{a}+{b}-{c}=", "answer": str(a + b - c)}
        for a, b, c in itertools.product(range(10), repeat=3)
        if 0 <= a + b - c < 10
    ]
    random.Random(0).shuffle(every)
    return every


def make_task(config):
    from jaxppo import Task
    from jaxppo.assets import character_model
    from jaxppo.rewards import exact_answer

    every = problems()
    held_out = len(every) // 5
    folder = config.train.checkpoint_dir + "-start"
    return Task(
        prompts=every[held_out:],
        eval_prompts=every[:held_out],
        reward_fn=exact_answer(),
        model_path=config.model.model_path
        or character_model(folder, CHARACTERS, seed=config.train.seed),
    )
