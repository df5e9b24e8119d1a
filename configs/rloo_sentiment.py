r"""Film reviews tuned to be positive by RLOO: no critic, eight reviews a prompt as its baseline.

    python -m jaxppo.main --config=configs/rloo_sentiment.py

Model, prompts, reward, and the number of rollouts are those of gpt2_sentiment.py, and the KL stands
in the reward as there; a cycle has 16 prompts of 8 samples in place of 128 prompts. With
`--config.method.name=grpo` it is GRPO, whose KL stands in the loss.

Two CPU cores, float32: 4.3 minutes for 60 cycles of 128 rollouts, 480 optimizer steps, on a machine
where gpt2_sentiment.py took 4.6. On 256 held-out prompts: P(positive) .507 -> .917, VADER .12 ->
.47, at 12.9 nats of KL a sample. GRPO: .507 -> .947, VADER .12 -> .89, at 44.8 nats: in the loss
the same price holds the policy less.
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
        name="rloo",
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
