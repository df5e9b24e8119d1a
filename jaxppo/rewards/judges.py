"""A language model behind an OpenAI-compatible endpoint as a reward."""

import asyncio
import os
import string
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxppo.rewards.functions import RewardError
from jaxppo.rewards.verifiers import last_number

RETRIED = (408, 409, 425, 429)  # and what is wrong with the server, 500 and above
LONGEST_WAIT = 60.0  # seconds

TEMPLATE = """\
How good is this answer? Give it a score from 0, useless, to 10, perfect. Write the score last.

Question:
{prompt}

Answer:
{output}"""


def score_between(low: float, high: float) -> Callable[[str], float]:
    """Makes a parser: the last number of a judge's answer, which must lie in the range."""

    def parse(text: str) -> float:
        score = last_number(text)
        if score is None:
            raise ValueError("holds no number")
        if not low <= score <= high:
            raise ValueError(f"gives {score:g}, which is not from {low:g} to {high:g}")
        return score

    return parse


def judge(
    base_url: str,
    model: str,
    template: str = TEMPLATE,
    *,
    parse: Callable[[str], float] | None = None,
    system: str | None = None,
    concurrency: int = 8,
    timeout: float = 30.0,
    retries: int = 3,
    backoff: float = 1.0,
    key_env: str = "OPENAI_API_KEY",
    temperature: float = 0.0,
    max_tokens: int = 256,
) -> Callable:
    """Makes a reward function that asks a language model for each sample's score.

    A sample whose score can't be had (no answer, no number, a number out of range) is a failure of
    that sample alone: with `Reward(judge(...), on_error="drop")` it leaves the batch, and by
    default it ends the run. Wrong keys and unknown models are told at once.

    Args:
      base_url: of the endpoint, such as "http://localhost:8000/v1".
      model: the name that the endpoint knows it by.
      template: what it is asked; {prompt}, {output}, and {columns} of the prompts are filled in.
      parse: `(answer) -> score`, raises ValueError where there is none; None: `score_between(0,
        10)`.
      system: a system message.
      concurrency: requests under way at once.
      timeout: seconds, of one request.
      retries: further tries after time-outs, lost connections, and answers 429 and 5xx.
      backoff: seconds before the first of them, then twice as long each time; the endpoint's
        Retry-After is heeded, up to a minute.
      key_env: the environment variable with the key; unset: none is sent. It is shown nowhere.
      temperature, max_tokens: of the judge's answers.

    Raises:
      RewardError: the extra `judge` is not installed, or an option can't be used.
    """
    try:
        import httpx
    except ImportError:
        raise RewardError("a judge needs the package httpx: pip install 'jaxppo[judge]'") from None
    if not base_url.startswith(("http://", "https://")):
        raise RewardError(f"the judge's base_url {base_url!r} must begin with http:// or https://")
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(template) if field}
    except ValueError as error:
        raise RewardError(f"the judge's template can't be used: {error}") from None
    if concurrency < 1:
        raise RewardError(f"the judge's concurrency is {concurrency}; it must be at least 1")
    read = parse or score_between(0, 10)
    url = base_url.rstrip("/") + "/chat/completions"

    async def ask(client, slots, text: str) -> str:
        """The judge's answer to a text, after as many tries as it takes."""
        messages = [{"role": "system", "content": system}] if system else []
        body = {
            "model": model,
            "messages": [*messages, {"role": "user", "content": text}],
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        problem, wait = "", backoff
        for attempt in range(1 + retries):
            if attempt:
                await asyncio.sleep(min(wait, LONGEST_WAIT))
                wait = backoff * 2**attempt
            try:
                async with slots:
                    response = await client.post(url, json=body)
            except httpx.TimeoutException:
                problem = f"gave no answer within {timeout:g} s"
                continue
            except httpx.HTTPError as error:
                problem = f"can't be reached: {error or type(error).__name__}"
                continue
            status = response.status_code
            if status == 200:
                return _content(response)
            problem = f"answered {status}: {' '.join(response.text.split())[:200]}"
            if status < 500 and status not in RETRIED:
                raise _Refused(problem)
            wait = max(wait, _seconds(response.headers.get("retry-after")))
        raise ValueError(f"{problem} (tried {1 + retries} times)")

    async def judge(prompts, outputs, **columns):
        given = {"prompt": prompts, "output": outputs, **columns}
        if missing := sorted(fields - set(given)):
            raise RewardError(f"the judge's template asks for {{{missing[0]}}}, which is no column")
        key = os.environ.get(key_env, "")
        hide = partial(_hide, key)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        slots = asyncio.Semaphore(concurrency)

        async def score(client, row: int) -> Any:
            text = template.format(**{name: given[name][row] for name in fields})
            try:
                answer = await ask(client, slots, text)
            except _Refused:
                raise
            except ValueError as error:
                return RewardError(f"the judge at {base_url} {hide(str(error))}")
            try:
                return float(read(answer))
            except (TypeError, ValueError) as error:
                shown = " ".join(answer.split())[:100]
                return RewardError(f"the judge's answer {hide(shown)!r} {error}")

        async with httpx.AsyncClient(timeout=timeout, headers=headers) as client:
            tasks = [asyncio.ensure_future(score(client, row)) for row in range(len(outputs))]
            try:
                return await asyncio.gather(*tasks)
            except _Refused as error:  # it will be no better for the others
                for task in tasks:
                    task.cancel()
                raise RewardError(f"the judge at {base_url} {hide(str(error))}") from None

    return judge


class _Refused(RewardError):
    """The endpoint will refuse every request for the same reason."""


def _content(response) -> str:
    """The text of a chat completion; ValueError if it is none."""
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        raise ValueError(f"answered what is no chat completion: {response.text[:100]!r}")
    return content


def _seconds(text: str | None) -> float:
    """The seconds of a Retry-After header; 0 where it has none, or a date."""
    try:
        return max(float(text or 0), 0.0)
    except ValueError:
        return 0.0


def _hide(key: str, text: str) -> str:
    """Endpoints like to quote the key that they refuse."""
    return text.replace(key, "***") if key else text
