r"""Film reviews tuned to be positive: the main job, and the shortest way to see PPO work.

    python -m jaxppo.main --config=configs/gpt2_sentiment.py

A small GPT-2 that writes film reviews continues sentence beginnings; the reward is a sentiment
classifier's probability of "positive" for what it wrote. Both come with jaxppo, so nothing is
downloaded. If `vaderSentiment` is installed, its score is logged as a second opinion that training
never sees.

    python -m jaxppo.main --config=configs/gpt2_sentiment.py:imdb

is trlx's example: the first words of IMDB reviews, continued by `lvwerra/gpt2-imdb` (124M
parameters, 0.5 GB; the top two layers are trained), scored by `lvwerra/distilbert-imdb` (0.3 GB).
Models and reviews come from the Hugging Face hub; it needs `pip install 'jaxppo[datasets]'` and
wants a GPU. It is tested on small models of these architectures; with the real ones it has not been
run yet.

Two CPU cores, float32: 2:43 minutes for 60 cycles of 128 rollouts, 480 optimizer steps. On 256
held-out prompts, fresh samples: P(positive) .507 -> .922, VADER .12 -> .61, at 13.4 nats of KL a
sample; the samples' perplexity under the starting model falls from 55.8 to 21.8. Seed 1: .521 ->
.927, .09 -> .63, 14.0 nats.
"""

HELD_OUT = 256  # prompts that only evaluations see


def get_config(arg=None):
    from jaxppo.config import ConfigError, default_config

    if arg not in (None, "", "imdb"):
        raise ConfigError(f"gpt2_sentiment has no variant {arg!r}; leave it out or say imdb")
    config = default_config()
    if arg == "imdb":
        config.model.update(model_path="lvwerra/gpt2-imdb", num_layers_unfrozen=2)
        config.reward.update(model_path="lvwerra/distilbert-imdb", label="POSITIVE")
        config.method.cliprange_reward = 10.0
        return config
    config.train.update(
        seq_length=64,
        epochs=60,
        total_steps=10_000,
        batch_size=64,
        eval_interval=80,
        checkpoint_interval=80,
    )
    config.optimizer.kwargs.update(lr=2e-4, betas=(0.9, 0.95))
    config.scheduler.name = "constant"
    config.method.update(
        num_rollouts=128,
        chunk_size=128,
        ppo_epochs=4,
        init_kl_coef=0.02,
        target=15.0,
        horizon=2000,
    )
    # at least 12 tokens, or the policy learns to say "great." and stop
    config.method.gen_kwargs.update(max_new_tokens=24, min_new_tokens=12)
    return config


def make_task(config):
    from jaxppo import Task
    from jaxppo.assets import lexicon_metric, sentiment_task
    from jaxppo.train import configured_reward

    if config.reward.model_path:
        return Task(
            prompts=imdb_beginnings(),
            eval_prompts=["I don't know much about Hungarian underground"] * HELD_OUT,
            reward_fn=configured_reward(config),
            metric_fn=lexicon_metric(),
        )
    return sentiment_task(model_path=config.model.model_path, held_out=HELD_OUT)


def imdb_beginnings():
    """The first four words of each review of the IMDB dataset."""
    from jaxppo import PromptError

    try:
        from datasets import load_dataset
    except ImportError:
        raise PromptError(
            "the IMDB reviews need the package datasets: pip install 'jaxppo[datasets]'"
        ) from None
    try:
        reviews = load_dataset("imdb", split="train+test")["text"]
    except Exception as error:  # network, disk, hub
        raise PromptError(f"the IMDB reviews can't be loaded: {error}") from error
    return [" ".join(review.split()[:4]) for review in reviews]
