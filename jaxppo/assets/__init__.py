"""The embedded default: a small language model of film reviews, a sentiment classifier, prompts.

`reviews-gpt2/` and `reviews-sentiment/` are Hugging Face folders that load as any checkpoint does;
`reviews_prompts.txt` holds one prompt a line. NOTICE says what they were made from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxppo.collect import Task
    from jaxppo.rewards import Reward


def asset(name: str) -> Path:
    """The path of an asset: "reviews-gpt2", "reviews-sentiment" or "reviews_prompts.txt"."""
    path = Path(__file__).parent / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; this installation of jaxppo is incomplete")
    return path


def review_prompts() -> list[str]:
    """The first four words of sentences in film reviews, about 4,000 of them."""
    return asset("reviews_prompts.txt").read_text(encoding="utf-8").splitlines()


def sentiment_task(
    reward_fn: Callable | Reward | None = None,
    *,
    model_path: str | None = None,
    held_out: int = 256,
) -> Task:
    """Reviews that are to become positive: the embedded prompts, model, and reward.

    Args:
      reward_fn: in place of the embedded classifier's probability of "positive".
      model_path: in place of the embedded model.
      held_out: so many prompts, the last ones, are only evaluated on.
    """
    from jaxppo import Task, reward_model

    prompts = review_prompts()
    return Task(
        prompts=prompts[:-held_out],
        eval_prompts=prompts[-held_out:],
        reward_fn=reward_fn or reward_model(asset("reviews-sentiment"), label="POSITIVE"),
        metric_fn=lexicon_metric(),
        model_path=model_path or asset("reviews-gpt2"),
    )


def lexicon_metric() -> Callable | None:
    """VADER's compound score in [-1, 1], a lexicon that shares nothing with the reward model.

    None where the package vaderSentiment is missing.
    """
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        return None
    vader = SentimentIntensityAnalyzer()
    return lambda samples, **_: {"vader": [vader.polarity_scores(s)["compound"] for s in samples]}


def character_model(
    folder: str | Path, characters: str, *, positions: int = 16, seed: int = 0, **sizes: int
) -> Path:
    """A small GPT-2 with random weights and one token a character, to learn from nothing.

    Args:
      folder: a Hugging Face folder, which is written if it is not there.
      characters: the vocabulary, besides a padding token.
      positions: the most tokens of prompt and response together.
      seed: of the weights.
      **sizes: n_embd (64), n_layer (2), n_head (4), or other keys of a GPT-2's config.json.

    Returns:
      The folder.
    """
    folder = Path(folder)
    if (folder / "config.json").exists():
        return folder
    import jax
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from jaxppo import create_model, save_pretrained

    vocabulary = {token: i for i, token in enumerate([*characters, "<pad>"])}
    inner = Tokenizer(models.WordLevel(vocabulary, "<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>")
    model = create_model({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": len(vocabulary),
        "n_positions": positions, "n_embd": 64, "n_layer": 2, "n_head": 4,
    } | sizes)  # fmt: skip
    save_pretrained(folder, model, model.init(jax.random.key(seed)), tokenizer)
    return folder
