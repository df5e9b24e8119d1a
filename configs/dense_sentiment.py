r"""Film reviews tuned to be positive, each word paid for what it adds.

    python -m jaxppo.main --config=configs/dense_sentiment.py

As gpt2_sentiment.py, but the classifier reads a review after each of its words, and the last token
of a word earns the change of P(positive). The words of a review together earn the difference
between the whole and its beginning, so the best policy is the same; PPO is told sooner which word
did it.

Two CPU cores, float32: 6 minutes for 60 cycles of 128 rollouts, 480 optimizer steps, on a machine
where gpt2_sentiment.py took 4.6. On 256 held-out prompts: what the words add -.01 -> .38, and with
it P(positive) .507 -> .895, VADER .12 -> .48, at 20.0 nats of KL a sample.
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
        num_rollouts=128, chunk_size=128, ppo_epochs=4, init_kl_coef=0.02, target=15.0, horizon=2000
    )
    config.method.gen_kwargs.update(max_new_tokens=24, min_new_tokens=12)
    return config


def gains(classify):
    """A reward function: the change of a classifier's score with each word."""
    import re

    from jaxppo import Span

    def dense(prompts, outputs):
        ends = [[match.end() for match in re.finditer(r"\S+", output)] for output in outputs]
        beginnings = [
            prompt + output[:end]
            for prompt, output, row in zip(prompts, outputs, ends)
            for end in [0, *row]
        ]
        scores = iter(classify(beginnings))
        rewards = []
        for row in ends:
            before, spans, start = next(scores), [], 0
            for end in row:
                after = next(scores)
                spans.append(Span(start, end, float(after - before)))
                before, start = after, end
            rewards.append(spans)
        return rewards

    return dense


def make_task(config):
    from jaxppo import reward_model
    from jaxppo.assets import asset, sentiment_task

    classify = reward_model(asset("reviews-sentiment"), label="POSITIVE")
    task = sentiment_task(gains(classify), model_path=config.model.model_path)
    metric_fn = task.metric_fn or (lambda samples, **_: {})
    return task._replace(
        metric_fn=lambda samples, **_: {**metric_fn(samples), "positive": list(classify(samples))}
    )
