r"""Film reviews tuned to be positive by GSPO: ratio and clip of whole responses, no critic.

    python -m jaxppo.main --config=configs/gspo_sentiment.py

Model, prompts, reward, and the number of rollouts are those of gpt2_sentiment.py; a cycle has 16
prompts of 8 samples in place of 128 prompts. GSPO's row has no KL; here it stands in the reward, so
that methods can be compared.

Two CPU cores, float32: 4.6 minutes for 60 cycles of 128 rollouts, 480 optimizer steps. On 256
held-out prompts: P(positive) .507 -> .911, VADER .12 -> .63, at 12.3 nats of KL a sample.
"""


def get_config():
    from jaxppo.config import default_config

    config = default_config()
    config.train.update(
        seq_length=64, epochs=60, batch_size=64, eval_interval=80, checkpoint_interval=80
    )
    config.optimizer.kwargs.lr = 2e-4
    config.scheduler.name = "constant"
    config.method.update(
        name="gspo",
        kl_in="reward",
        group_size=8,
        num_rollouts=128,
        chunk_size=128,
        ppo_epochs=4,
        init_kl_coef=0.02,
        target=15.0,
        horizon=2000,
    )
    config.method.gen_kwargs.update(max_new_tokens=24, min_new_tokens=12)
    return config


def make_task(config):
    from jaxppo.assets import sentiment_task

    return sentiment_task(model_path=config.model.model_path)
