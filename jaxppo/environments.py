"""Conversations with an environment: the policy acts, the environment answers, several times.

Tokens go in and tokens come out: what was sampled is never decoded and encoded again. Letters: `B`
rows, `N` the most tokens of a conversation after its prompt.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxppo.prompts import PromptError, decode_outputs, encode_bare, left_pad
from jaxppo.rewards.functions import RewardError, function_name
from jaxppo.sampling import Samples

MULTIPLE = 32  # prompts are padded to multiples of so many tokens, so that few shapes are compiled


class Environment(Protocol):
    """One conversation; `Task.environment`, called without arguments, makes one for each prompt.

    An observation is text, or token ids, which are taken as they are. The policy reads it, but it
    is no action: it is in no loss, no KL and no advantage.

    A class with the attribute `takes_ids = True` is given the token ids of actions, not their text.
    """

    def reset(self, prompt: str) -> str | Sequence[int]:
        """Begins. What is returned follows the prompt, "" for nothing.

        Those columns of the prompt that it has parameters for come as keyword arguments.
        """

    def step(self, action: str | list[int]) -> tuple[str | Sequence[int], float, bool]:
        """Answers an action: an observation, the action's reward, and whether that was the end."""


class Conversations(NamedTuple):
    """What was said, on the response grid.

    samples: `mask` is true at actions only, `ended` where an environment ended its conversation.
    seen: `[B, N]` bool, actions and observations, of which an action is the last.
    earned: `[B, N]` float32, each action's reward, at its last token.
    turns: `[B]`, actions.
    """

    samples: Samples
    seen: np.ndarray
    earned: np.ndarray
    turns: np.ndarray


def converse(
    make: Callable[[], Environment],
    generate: Callable[..., Samples],
    params,
    key: jax.Array,
    *,
    prompts: Sequence[np.ndarray],
    texts: Sequence[str],
    columns: Mapping[str, Sequence],
    row_ids: Sequence[int],
    rows: int,
    max_turns: int,
    action_tokens: int,
    observation_tokens: int,
    prompt_width: int,
    tokenizer: Any,
    pad_id: int,
    stop_sequences: Sequence[str] = (),
) -> Conversations:
    """Plays one conversation a prompt, side by side, turn by turn.

    Those that are over are not paid for: the others are decoded, padded to a power of two.

    Args:
      make: makes an environment.
      generate: `(params, key, prompts, prompt_mask, row_ids) -> Samples`, one action a row.
      params: the policy's.
      key: consumed; turn `t` of a row draws with `fold_in(fold_in(key, t), row_id)`.
      prompts, texts, columns: `B` prompts as ids and as text, and what came with them.
      row_ids: `B` numbers.
      rows: the most rows that `generate` is given, at least `B`.
      max_turns: the most actions of a conversation.
      action_tokens: the most tokens of an action.
      observation_tokens: the most tokens of a conversation's observations together; one for which
        there is no room left ends it.
      prompt_width: of the longest prompt there is.
      tokenizer, pad_id, stop_sequences: for text.

    Raises:
      RewardError: an environment raised, or answered what can't be used.
    """
    B, N = len(prompts), max_turns * action_tokens + observation_tokens
    said = Samples(
        tokens=np.full((B, N), pad_id, np.int32),
        logprobs=np.zeros((B, N), np.float32),
        mask=np.zeros((B, N), bool),
        ended=np.zeros(B, bool),
    )
    seen, earned = np.zeros((B, N), bool), np.zeros((B, N), np.float32)
    lengths, observed, turns = (np.zeros(B, int) for _ in range(3))
    environments = [_Named(make, texts[row]) for row in range(B)]

    def observe(row: int, observation) -> bool:
        """Writes an observation behind what was said; false where there is no room for it."""
        ids = environments[row].ids(observation, tokenizer)
        if observed[row] + len(ids) > observation_tokens:
            return False
        place = slice(lengths[row], lengths[row] + len(ids))
        said.tokens[row, place], seen[row, place] = ids, True
        lengths[row] += len(ids)
        observed[row] += len(ids)
        return True

    for row in range(B):
        first = environments[row].reset({name: column[row] for name, column in columns.items()})
        if not observe(row, first):
            raise environments[row].error(
                f"begins with more than the {observation_tokens} tokens of "
                "environment.observation_tokens; raise it"
            )
    going = list(range(B))
    for turn in range(max_turns):
        if not going:
            break
        asked = going + going[:1] * (min(rows, 1 << (len(going) - 1).bit_length()) - len(going))
        before = [np.concatenate([prompts[row], said.tokens[row, : lengths[row]]]) for row in asked]
        width = -(-max(map(len, before)) // MULTIPLE) * MULTIPLE
        grid = left_pad(before, min(width, prompt_width + N - action_tokens), pad_id)
        ids = jnp.asarray([row_ids[row] for row in asked])
        part = generate(params, jax.random.fold_in(key, turn), *map(jnp.asarray, grid), ids)
        part = jax.device_get(part)
        if part.kept is not None and said.kept is None:
            said = said._replace(kept=np.zeros((B, N), np.int32))
        actions = [part.tokens[i, part.mask[i]] for i in range(len(going))]
        spoken = decode_outputs(tokenizer, before[: len(going)], actions, stop_sequences)
        left = []
        for i, row in enumerate(going):
            place = slice(lengths[row], lengths[row] + len(actions[i]))
            for field in ("tokens", "logprobs", "kept"):
                if getattr(said, field) is not None:
                    getattr(said, field)[row, place] = getattr(part, field)[i, part.mask[i]]
            said.mask[row, place] = seen[row, place] = True
            lengths[row] = place.stop
            turns[row] += 1
            observation, reward, done = environments[row].step(spoken[i], actions[i])
            earned[row, place.stop - 1], said.ended[row] = reward, done
            if not done and turn + 1 < max_turns and observe(row, observation):
                left.append(row)
        going = left
    return Conversations(said, seen, earned, turns)


class _Named:
    """An environment whose errors and odd answers are told with its name and prompt."""

    def __init__(self, make: Callable[[], Environment], prompt: str):
        self.name, self.prompt = function_name(make), prompt
        self.inner = self._call(make)

    def error(self, what: str) -> RewardError:
        shown = self.prompt if len(self.prompt) <= 60 else self.prompt[:57] + "..."
        return RewardError(f"the environment {self.name} {what} (prompt {shown!r})")

    def _call(self, function: Callable, *arguments, **keywords):
        try:
            return function(*arguments, **keywords)
        except (Exception, SystemExit) as error:  # sys.exit() would end a run as if it were done
            text = " ".join([f"{type(error).__name__}:", *str(error).split()])
            raise self.error(f"raised {text.removesuffix(':')}") from error

    def reset(self, columns: dict):
        parameters = inspect.signature(self.inner.reset).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            columns = {name: value for name, value in columns.items() if name in parameters}
        return self._call(self.inner.reset, self.prompt, **columns)

    def step(self, text: str, ids: np.ndarray) -> tuple[Any, float, bool]:
        action = ids.tolist() if getattr(self.inner, "takes_ids", False) else text
        answer = self._call(self.inner.step, action)
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise self.error(
                f"answered {answer!r:.60}; it must return an observation, a reward, and whether "
                "that was the end"
            )
        observation, reward, done = answer
        try:
            reward = float(reward)
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(np.float32(reward)):
            raise self.error(f"gave the reward {answer[1]!r:.60}; it must be a finite number")
        if not done and not len(observation):
            raise self.error("observed nothing after an action, and did not end")
        return observation, reward, bool(done)

    def ids(self, observation, tokenizer) -> list[int]:
        if isinstance(observation, str):
            try:
                return encode_bare(tokenizer, observation)
            except PromptError as error:
                raise self.error(f"observed text that {error}") from None
        try:
            ids = [int(x) for x in observation]
        except (TypeError, ValueError):
            ids = [-1]
        if not all(0 <= i < len(tokenizer) for i in ids):
            raise self.error(f"observed {observation!r:.60}; give text, or ids of tokens")
        return ids
