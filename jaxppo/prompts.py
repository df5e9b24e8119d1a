"""Prompts: from what users pass to token ids, and which of them a cycle samples.

The source is stateless: the prompts of a cycle are a function of (seed, cycle), so that a resumed
run needs no position in a stream.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

RESERVED = ("samples", "prompts", "outputs", "tokenizer")  # names of a reward function's arguments


class PromptError(ValueError):
    """A prompt that can't be used, and why."""


class Prompts(NamedTuple):
    """Tokenised prompts.

    texts: the strings that reward functions see.
    ids: one int32 array each, not padded.
    columns: further data of dict prompts, by name, one value a prompt.
    """

    texts: list[str]
    ids: list[np.ndarray]
    columns: dict[str, list]


def take(prompts: Prompts, indices: Iterable[int]) -> Prompts:
    """Picks prompts by number, repeats allowed."""
    indices = [int(i) for i in indices]
    return Prompts(
        [prompts.texts[i] for i in indices],
        [prompts.ids[i] for i in indices],
        {name: [column[i] for i in indices] for name, column in prompts.columns.items()},
    )


def encode(tokenizer, text: str, *, sets_bos: bool | None = None) -> list[int]:
    """Tokenises a text that a model is to continue.

    It begins with exactly one BOS token if the tokenizer sets one, whether or not the text (a
    rendered chat template, say) holds it already, and no EOS or separator is put behind it.
    `sets_bos` says whether the tokenizer sets one; None finds it out, as costly as a short prompt.
    """
    ids = encode_bare(tokenizer, text)
    if sets_bos is None:
        sets_bos = _sets_bos(tokenizer)
    if sets_bos and ids[:1] != [tokenizer.bos_token_id]:
        ids = [tokenizer.bos_token_id, *ids]
    return ids


def prepare(
    prompts: Sequence, tokenizer, *, max_tokens: int, truncate: str | None = None
) -> Prompts:
    """Tokenises what users pass as prompts. Nothing that is passed in is changed.

    Args:
      prompts: strings, dicts with the key "prompt" (the other keys become columns; all dicts have
        the same), or chats: lists of `{"role", "content"}`, also as a dict's "prompt".
      tokenizer: a `transformers` tokenizer.
      max_tokens: the most tokens a prompt may have.
      truncate: the side on which longer prompts are cut, "left" or "right"; None refuses them.

    Raises:
      PromptError: there are none, or one can't be used; it is named by its number.
    """
    if isinstance(prompts, str | Mapping) or not np.iterable(prompts):
        raise PromptError(f"prompts is one {_kind(prompts)}; pass a list of them")
    if truncate not in (None, "left", "right"):
        raise PromptError(f"truncate is {truncate!r}; it must be 'left', 'right' or None")
    if max_tokens < 1:
        raise PromptError(f"max_tokens is {max_tokens}, which leaves no room for a prompt")
    prompts = list(prompts)
    if not prompts:
        raise PromptError("the list of prompts is empty; give at least one")
    keys = set(prompts[0]) if isinstance(prompts[0], Mapping) else None
    if clash := sorted((keys or set()) & set(RESERVED)):
        raise PromptError(f"the column {clash[0]!r} has the name of a reward function's argument")
    if odd := [key for key in keys or () if not isinstance(key, str)]:
        raise PromptError(f"the column {odd[0]!r} is no keyword; name columns with strings")
    sets_bos = _sets_bos(tokenizer)
    texts, ids = [], []
    columns: dict[str, list] = {key: [] for key in prompts[0] if key != "prompt"} if keys else {}
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, Mapping) != (keys is not None):
            raise PromptError(
                f"prompt {number} is a {_kind(prompt)}, prompt 0 is not: mix no kinds"
            )
        if isinstance(prompt, Mapping):
            if "prompt" not in prompt:
                raise PromptError(f"prompt {number} is a dict without the key 'prompt'")
            if set(prompt) != keys:
                odd = ", ".join(sorted(map(str, set(prompt) ^ keys)))
                raise PromptError(f"prompt {number} has other columns than prompt 0: {odd}")
            for name, column in columns.items():
                column.append(prompt[name])
            prompt = prompt["prompt"]
        text = _render(tokenizer, prompt, number)
        texts.append(text)
        try:
            row = encode(tokenizer, text, sets_bos=sets_bos)
        except PromptError as error:
            raise PromptError(f"prompt {number} {error}") from None
        if not row and tokenizer.bos_token_id is not None:
            row = [tokenizer.bos_token_id]
        if not row:
            raise PromptError(f"prompt {number} is empty, and the tokenizer has no BOS token")
        if len(row) > max_tokens:
            if truncate is None:
                raise PromptError(
                    f"prompt {number} has {len(row)} tokens, but train.seq_length and the model's "
                    f"positions leave {max_tokens} beside max_new_tokens: shorten it, raise "
                    "train.seq_length, or set tokenizer.truncate_prompts to True"
                )
            first = row[:1] if row[0] == tokenizer.bos_token_id else []  # BOS is not cut off
            kept = max_tokens - len(first)
            rest = row[len(first) :]
            row = first + (rest[len(rest) - kept :] if truncate == "left" else rest[:kept])
        ids.append(np.asarray(row, np.int32))
    return Prompts(texts, ids, columns)


def left_pad(ids: Sequence[np.ndarray], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens `[B, width]` int32 and their mask (bool), padded on the left."""
    tokens = np.full((len(ids), width), pad_id, np.int32)
    mask = np.zeros((len(ids), width), bool)
    for row, x in enumerate(ids):
        tokens[row, width - len(x) :] = x
        mask[row, width - len(x) :] = True
    return tokens, mask


def prompt_indices(num_prompts: int, batch: int, size: int, seed: int) -> np.ndarray:
    """Returns the numbers of the prompts in a batch, `[size]`.

    They are entries `batch * size` and following of an endless sequence in which every prompt
    comes once, in an order drawn from (seed, 0), then once more in one drawn from (seed, 1), ...
    """
    place = np.arange(batch * size, (batch + 1) * size)
    epochs = place // num_prompts
    orders = {
        int(epoch): np.random.default_rng([seed, int(epoch)]).permutation(num_prompts)
        for epoch in np.unique(epochs)
    }
    return np.asarray([orders[int(e)][p] for e, p in zip(epochs, place % num_prompts)])


def decode_outputs(
    tokenizer,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    stop_sequences: Sequence[str] = (),
) -> list[str]:
    """Decodes responses to the text that follows their prompts.

    Prompt and response are decoded together, since some tokenizers drop the space in front of a
    text. The text is cut at the first stop string in it; the ids stay as they were sampled.

    Raises `PromptError` for a stop string that is empty, and for one that stands in no list.
    """
    if isinstance(stop_sequences, str):
        raise PromptError(f"stop_sequences is one string; pass a list, [{stop_sequences!r}]")
    if "" in stop_sequences:
        raise PromptError("a stop sequence is empty, so every output would be too; leave it out")
    outputs = []
    for prompt, response in zip(prompts, responses):
        before = _decode(tokenizer, prompt)
        text = _decode(tokenizer, np.concatenate([prompt, response]))
        text = text[len(before) :] if text.startswith(before) else _decode(tokenizer, response)
        stops = [at for stop in stop_sequences if (at := text.find(stop)) >= 0]
        outputs.append(text[: min(stops)].rstrip() if stops else text)
    return outputs


def token_ends(tokenizer, prompt: np.ndarray, response: np.ndarray) -> list[int]:
    """How many characters of the output are written once each token of the response is."""
    parts = [response[: end + 1] for end in range(len(response))]
    return [len(text) for text in decode_outputs(tokenizer, [prompt] * len(parts), parts)]


def _sets_bos(tokenizer) -> bool:
    """Whether the tokenizer itself begins a text with a BOS token.

    Its ids are compared with those of the text alone, since an unknown text may be a BOS token:
    one token often serves as both.
    """
    bare, whole = encode_bare(tokenizer, "a"), _encode(tokenizer, "a", special=True)
    bos = tokenizer.bos_token_id
    return bos is not None and whole[: len(bare) + 1] == [bos, *bare]


def encode_bare(tokenizer, text: str) -> list[int]:
    """Tokenises a text that follows another one: no BOS in front of it, nothing behind it."""
    return _encode(tokenizer, text, special=False)


def _encode(tokenizer, text: str, *, special: bool) -> list[int]:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise PromptError("holds half of a surrogate pair, which is no text") from None
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def _decode(tokenizer, ids: np.ndarray) -> str:
    return tokenizer.decode(
        ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def _render(tokenizer, prompt: Any, number: int) -> str:
    """The text of a prompt: a string as it is, a chat through the tokenizer's template."""
    if isinstance(prompt, np.ndarray):  # chats out of parquet files come so
        prompt = prompt.tolist()
    if isinstance(prompt, str):
        return str(prompt)  # numpy's strings are strings, but show themselves otherwise
    is_chat = isinstance(prompt, Sequence) and all(
        isinstance(turn, Mapping) and {"role", "content"} <= set(turn) for turn in prompt
    )
    if not is_chat or not prompt:
        raise PromptError(
            f"prompt {number} is a {_kind(prompt)}; give a string, a dict with a 'prompt', or a "
            "list of messages with 'role' and 'content'"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(f"prompt {number} is a chat, but the tokenizer has no chat template")
    try:
        return tokenizer.apply_chat_template(
            list(prompt), tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates refuse roles and orders with errors of their own
        raise PromptError(
            f"prompt {number} is a chat that the template refuses: {error}"
        ) from error


def _kind(x: Any) -> str:
    return type(x).__name__
