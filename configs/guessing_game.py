r"""A guessing game in several turns, learned from scratch: what the other side says must be read.

    python -m jaxppo.main --config=configs/guessing_game.py

The environment thinks of a number from 1 to 3 (`:TURNS` turns: up to 2**TURNS - 1). Each turn the
policy says a number and hears "<", ">" or "="; the game ends with the right one, which earns 1, or
after two turns. Who begins in the middle and listens always wins; who guesses blindly wins two
games of three at best. The policy is a two-layer GPT-2 with random weights and one token a
character, trained by Dr.GRPO with many games on each number.

Two CPU cores, 20 seconds: of games that are played with samples, not the likeliest numbers, 14 %
are won before, 95 % after 60 cycles, 99 % after 120. With three turns and seven numbers, 40
seconds: 23 % before, 73 % after 180 cycles.
"""

CHARACTERS = "123456789<>=?"


def get_config(turns=None):
    from jaxppo.config import ConfigError, default_config

    if turns not in (None, "", "2", "3"):
        raise ConfigError(f"guessing_game can have 2 or 3 turns, not {turns!r}")
    turns = int(turns or 2)
    config = default_config()
    config.train.update(
        seq_length=16, epochs=60 * turns, batch_size=256, eval_interval=60, checkpoint_interval=60
    )
    config.optimizer.kwargs.update(lr=2e-3, weight_decay=0.0)
    config.scheduler.name = "constant"
    config.method.update(
        name="dr_grpo",
        group_size=64,
        num_rollouts=256,
        chunk_size=256,
        ppo_epochs=1,
        init_kl_coef=0.0,
        entropy_coef=0.01,
    )
    config.method.gen_kwargs.update(max_new_tokens=1, eos_token_id=())
    config.environment.update(max_turns=turns, observation_tokens=turns)
    return config


class GuessingGame:
    """Knows a number, and says whether a guess is below or above it."""

    def reset(self, prompt, number):
        self.number = number
        return ""

    def step(self, action):
        if action == str(self.number):
            return "=", 1.0, True
        guess = int(action) if action.isdigit() else 0
        return "<" if guess < self.number else ">", 0.0, False


def make_task(config):
    from jaxppo import Task
    from jaxppo.assets import character_model

    numbers = range(1, 2**config.environment.max_turns)
    every = [{"prompt": "?", "number": number} for number in numbers]
    folder = config.train.checkpoint_dir + "-start"
    return Task(
        prompts=every,
        eval_prompts=every * 32,
        environment=GuessingGame,
        model_path=config.model.model_path
        or character_model(folder, CHARACTERS, seed=config.train.seed),
    )
