"""Stop strings as a finite automaton over tokens, so that the device can stop decoding.

A stop string may begin and end inside tokens and may be written by many token sequences. The
automaton reads bytes (Aho and Corasick, 1975: its states are the prefixes of the stop strings),
and every token's effect on every state is tabulated once on the host.
"""

import json
from typing import NamedTuple

import jax
import numpy as np


class StopTable(NamedTuple):
    """The automaton: `state = next_state[state, token]`; the last state means "stopped".

    next_state: `[states, V]` int32; state 0 is the start, and the last state is never left.
    """

    next_state: jax.Array | np.ndarray

    @property
    def matched(self) -> int:
        return self.next_state.shape[0] - 1


def stop_table(tokenizer, stop_sequences, vocab_size: int) -> StopTable | None:
    """Tabulates the stop strings for a tokenizer; None when there are none.

    Raises `ValueError` for an empty stop string. Special tokens write no text and so leave the
    state as it is. Ids beyond the tokenizer's vocabulary do the same.
    """
    if not stop_sequences:
        return None
    if any(not text for text in stop_sequences):
        raise ValueError("a stop sequence is empty; every response would be empty too")
    step, matched = _automaton([text.encode("utf-8") for text in stop_sequences])
    table = np.tile(np.arange(matched + 1, dtype=np.int32)[:, None], (1, vocab_size))
    for token, written in token_bytes(tokenizer).items():
        if token >= vocab_size:
            continue
        for state in range(matched):
            now = state
            for byte in written:
                now = step[now][byte]
                if now == matched:
                    break
            table[state, token] = now
    return StopTable(table)


def token_bytes(tokenizer) -> dict[int, bytes]:
    """What each token writes, in bytes; nothing for special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    kind = _decoder_kind(tokenizer)
    written = {}
    for token, i in tokenizer.get_vocab().items():
        if i in special:
            written[i] = b""
        elif kind == "ByteLevel":
            unknown = any(c not in _BYTE_OF for c in token)  # an added token, written as it is
            written[i] = token.encode() if unknown else bytes(_BYTE_OF[c] for c in token)
        elif kind == "Metaspace":
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                written[i] = bytes([int(token[3:5], 16)])
            else:
                written[i] = token.replace("\u2581", " ").encode()
        else:
            written[i] = tokenizer.decode([i]).encode()
    return written


def _decoder_kind(tokenizer) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    spec = json.loads(backend.to_str()).get("decoder") if backend is not None else None
    kinds = json.dumps(spec)
    if '"ByteLevel"' in kinds:
        return "ByteLevel"
    return "Metaspace" if '"Metaspace"' in kinds or "\u2581" in kinds or "\\u2581" in kinds else ""


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte, inverted.

    Visible Latin-1 characters stand for themselves; the other 68 bytes, in order, are given the
    characters from U+0100 on.
    """
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def _automaton(stops: list[bytes]) -> tuple[list[list[int]], int]:
    """Transitions `step[state][byte]` over the prefixes of the stops; the last state is a match."""
    prefixes = sorted({s[:n] for s in stops for n in range(len(s))}, key=lambda x: (len(x), x))
    number = {prefix: i for i, prefix in enumerate(prefixes)}
    matched = len(prefixes)

    def target(text: bytes) -> int:
        if any(text.endswith(stop) for stop in stops):
            return matched
        return next(number[text[i:]] for i in range(len(text) + 1) if text[i:] in number)

    return [[target(p + bytes([b])) for b in range(256)] for p in prefixes], matched
