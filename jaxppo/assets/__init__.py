"""The embedded default: a small language model of film reviews, a sentiment classifier, prompts.

`reviews-gpt2/` and `reviews-sentiment/` are Hugging Face folders that load as any checkpoint does;
`reviews_prompts.txt` holds one prompt a line. NOTICE says what they were made from.
"""

from pathlib import Path


def asset(name: str) -> Path:
    """The path of an asset: "reviews-gpt2", "reviews-sentiment" or "reviews_prompts.txt"."""
    path = Path(__file__).parent / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; this installation of jaxppo is incomplete")
    return path


def review_prompts() -> list[str]:
    """The first four words of sentences in film reviews, about 4,000 of them."""
    return asset("reviews_prompts.txt").read_text(encoding="utf-8").splitlines()
