r"""Film reviews tuned to please a language model, which is asked for the score of each.

    JUDGE_URL=http://localhost:8000/v1 JUDGE_MODEL=Qwen/Qwen2.5-7B-Instruct \
        python -m jaxppo.main --config=configs/judge_sentiment.py

Any OpenAI-compatible endpoint will do: vLLM, SGLang, llama.cpp, Ollama, or a service, whose key is
read from OPENAI_API_KEY. It needs `pip install 'jaxppo[judge]'`. A review that gets no score after
several tries leaves the batch and is counted in `rewards/judge/dropped`.

The rest is gpt2_sentiment.py. It is tested against a local server that plays the judge; with a real
one the time of a cycle is that of 128 short requests, eight at once.
"""

TEMPLATE = """\
Here is the beginning of a film review. How positive is it? Answer with a number from 0 (very
negative) to 10 (very positive), and nothing else.

{prompt}{output}"""


def get_config():
    from jaxppo.config import default_config

    config = default_config()
    config.train.update(
        seq_length=64, epochs=60, batch_size=64, eval_interval=80, checkpoint_interval=80
    )
    config.optimizer.kwargs.lr = 2e-4
    config.scheduler.name = "constant"
    config.method.update(
        num_rollouts=128,
        chunk_size=128,
        ppo_epochs=4,
        init_kl_coef=0.02,
        target=15.0,
        horizon=2000,
        scale_reward="ref_centred",  # judges have scales of their own
    )
    config.method.gen_kwargs.update(max_new_tokens=24, min_new_tokens=12)
    return config


def make_task(config):
    import os

    from jaxppo import ConfigError, Reward
    from jaxppo.assets import sentiment_task
    from jaxppo.rewards import judge

    try:
        url, model = os.environ["JUDGE_URL"], os.environ["JUDGE_MODEL"]
    except KeyError as error:
        raise ConfigError(
            f"the environment variable {error} is not set: the judge's endpoint is JUDGE_URL, such "
            "as http://localhost:8000/v1, its model JUDGE_MODEL"
        ) from None
    reward = Reward(judge(url, model, TEMPLATE), on_error="drop", retries=0)
    return sentiment_task(reward, model_path=config.model.model_path)
