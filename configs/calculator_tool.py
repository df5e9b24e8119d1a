r"""A tool that must be used: products of two-digit numbers, a calculator, and a model from scratch.

    python -m jaxppo.main --config=configs/calculator_tool.py

A prompt is "37*58=". In the first turn the policy types into a calculator, whose display it then
reads; in the second it answers. Nobody could learn the products by heart, of which an eighth is
only evaluated on, but to copy the question and the display is enough. A quarter of a point is
earned by a key that is right, an eighth by a digit of the answer, and one by the whole answer. The
policy is a two-layer GPT-2 with random weights and one token a character, trained by Dr.GRPO.

Two CPU cores, 2.4 minutes: of the products that it never saw, asked with samples and not with the
likeliest characters, 0 % are right before, 1 % after 200 cycles, 24 % after 300, 96 % after 400.
"""

import random

CHARACTERS = "0123456789*=#"


def get_config():
    from jaxppo.config import default_config

    config = default_config()
    config.train.update(
        seq_length=32, epochs=400, batch_size=512, eval_interval=100, checkpoint_interval=200
    )
    config.optimizer.kwargs.update(lr=2e-3, weight_decay=0.0)
    config.scheduler.kwargs.update(T_max=400, eta_min=2e-4)
    config.method.update(
        name="dr_grpo",
        group_size=16,
        num_rollouts=512,
        chunk_size=512,
        ppo_epochs=1,
        init_kl_coef=0.0,
        entropy_coef=0.005,
    )
    config.method.gen_kwargs.update(max_new_tokens=5, eos_token_id=())
    config.environment.update(max_turns=2, observation_tokens=4)
    return config


class Calculator:
    """Shows the product of what is typed in four digits, or "####"."""

    def reset(self, prompt, product):
        self.question, self.product, self.typed = prompt.rstrip("="), product, False
        return ""

    def step(self, action):
        if self.typed:
            answer = action[:4]
            digits = sum(a == b for a, b in zip(answer, self.product))
            return "", digits / 8 + (answer == self.product), True
        self.typed = True
        keys = sum(a == b for a, b in zip(action, self.question))
        a, _, b = action.partition("*")
        shown = f"{int(a) * int(b):04d}" if a.isdigit() and b.isdigit() else "####"
        return shown[:4], keys / 4, False


def make_task(config):
    from jaxppo import Task
    from jaxppo.assets import character_model

    every = [
        {"prompt": f"{a}*{b}=", "product": f"{a * b:04d}"}
        for a in range(10, 100)
        for b in range(10, 100)
    ]
    random.Random(0).shuffle(every)
    held_out = len(every) // 8
    folder = config.train.checkpoint_dir + "-start"
    return Task(
        prompts=every[held_out:],
        eval_prompts=every[: min(held_out, 512)],
        environment=Calculator,
        metric_fn=solved,
        model_path=config.model.model_path
        or character_model(folder, CHARACTERS, positions=32, seed=config.train.seed),
    )


def solved(outputs, product):
    """The share of right answers; what is said is "37*58", "2146", "2146" and one more letter."""
    return {"right": [float(text[9:13] == right) for text, right in zip(outputs, product)]}
