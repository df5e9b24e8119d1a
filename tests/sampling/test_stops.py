"""Stop strings: the automaton over tokens against a search in the bytes that they write."""

import numpy as np
import pytest
from helpers import byte_fallback_tokenizer, byte_level_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxppo.sampling import stop_table, token_bytes

E_ACUTE, SMILE = "é".encode(), "😀".encode()
PIECES = [
    *(bytes([b]) for b in range(256)),
    *(b"ab", b"abab", b"ba", b" a", b"  ", b"\n\n", b"\na", b"b\n", b"User", b":", b" b b"),
    *(E_ACUTE, b"a" + E_ACUTE[:1], E_ACUTE[1:] + b"b", SMILE[:2], SMILE[2:], SMILE),
]
PIECES = list(dict.fromkeys(PIECES))
WORDS = [
    "\u2581",
    "a",
    "b",
    "\u2581a",
    "ab",
    "ba",
    "\n\n",
    "b\u2581a",
    "é",
    "éb",
    "😀",
    "\u2581\u2581",
]

BYTE_LEVEL = byte_level_tokenizer(PIECES, added=("<|plain added|>",))
EOS = len(PIECES)
ADDED = EOS + 1
BYTE_FALLBACK = byte_fallback_tokenizer(WORDS)

STOPS = [
    ("a",),
    ("ab",),
    ("abab", "bb"),
    ("aab", "ab a", "\n\n"),
    ("\n\na", "\na", "a\n\nb"),
    ("é",),
    ("aéb", "😀a"),
    (" a b", "  "),
    ("aaaa", "aab"),
]


def frequent(interesting: list[int], size: int):
    """Token sequences in which stops are not rare."""
    token = st.one_of(st.sampled_from(interesting), st.integers(0, size - 1))
    return st.lists(st.one_of(st.sampled_from(interesting), token), max_size=12)


def run(table, tokens):
    state, states = 0, []
    for token in tokens:
        state = table.next_state[state, token]
        states.append(state == table.matched)
    return states


TABLES = {
    (kind, stops): stop_table(tokenizer, stops, len(tokenizer))
    for kind, tokenizer in (("byte-level", BYTE_LEVEL), ("byte-fallback", BYTE_FALLBACK))
    for stops in STOPS
}

BYTE_LEVEL_TOKENS = frequent(
    [ord("a"), ord("b"), ord(" "), ord("\n"), *range(256, len(PIECES)), EOS], len(PIECES) + 1
)
BYTE_FALLBACK_TOKENS = frequent(
    [ord("a"), ord("b"), *E_ACUTE, *SMILE, *range(256, 256 + len(WORDS)), 256 + len(WORDS)],
    256 + len(WORDS) + 1,
)


@settings(max_examples=400, deadline=None)
@given(BYTE_LEVEL_TOKENS, st.sampled_from(STOPS))
def test_byte_level_stops_are_found_as_text_search_finds_them(tokens, stops):
    written = [PIECES[t] if t < EOS else b"" for t in tokens]
    hits = [
        any(stop.encode() in b"".join(written[: n + 1]) for stop in stops)
        for n in range(len(tokens))
    ]
    assert run(TABLES["byte-level", stops], tokens) == hits
    # a stop is whole characters, so searching in the decoded text must find the same
    text = BYTE_LEVEL.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert any(stop in text for stop in stops) == any(hits)


@settings(max_examples=400, deadline=None)
@given(BYTE_FALLBACK_TOKENS, st.sampled_from(STOPS))
def test_byte_fallback_stops_are_found_as_text_search_finds_them(tokens, stops):
    spelled = [word.replace("\u2581", " ").encode() for word in WORDS]
    written = [
        bytes([t]) if t < 256 else spelled[t - 256] if t < 256 + len(WORDS) else b"" for t in tokens
    ]
    hits = [
        any(stop.encode() in b"".join(written[: n + 1]) for stop in stops)
        for n in range(len(tokens))
    ]
    assert run(TABLES["byte-fallback", stops], tokens) == hits


@pytest.mark.parametrize("stops", STOPS)
def test_tables_are_closed_and_stay_matched(stops):
    table = TABLES["byte-level", stops]
    assert table.next_state.dtype == np.int32
    assert table.next_state.shape == (table.matched + 1, len(BYTE_LEVEL))
    assert table.next_state.min() >= 0
    assert table.next_state.max() == table.matched
    np.testing.assert_array_equal(table.next_state[table.matched], table.matched)


def test_overlapping_stops_by_hand():
    table = TABLES["byte-level", ("abab", "bb")]
    a, b, ab, x = ord("a"), ord("b"), PIECES.index(b"ab"), ord("x")
    assert run(table, [a, b, a, b]) == [False, False, False, True]
    assert run(table, [ab, ab]) == [False, True]
    assert run(table, [a, ab, a, b]) == [False, False, False, True]
    assert run(table, [a, b, b]) == [False, False, True]  # the other stop, from inside the first
    assert run(table, [a, b, x, a, b, x]) == [False] * 6
    assert run(table, [b, b, x, x]) == [False, True, True, True]


def test_a_stop_inside_one_token_counts():
    assert run(TABLES["byte-level", ("a",)], [PIECES.index(b" a")]) == [True]
    assert run(TABLES["byte-level", ("ab",)], [PIECES.index(b"abab")]) == [True]


def test_characters_may_lie_across_tokens():
    table = TABLES["byte-level", ("aéb", "😀a")]
    half, rest = PIECES.index(b"a" + E_ACUTE[:1]), PIECES.index(E_ACUTE[1:] + b"b")
    assert run(table, [half, rest]) == [False, True]
    assert run(table, [half, ord("a"), rest]) == [False] * 3
    assert run(table, [*SMILE, ord("a")]) == [False] * 4 + [True]
    assert run(TABLES["byte-fallback", ("é",)], list(E_ACUTE)) == [False, True]


def test_special_tokens_write_nothing_and_interrupt_nothing():
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        table = stop_table(tokenizer, ["<eos>", "eo", "ab"], len(tokenizer))
        eos = tokenizer.eos_token_id
        np.testing.assert_array_equal(table.next_state[:, eos], np.arange(table.matched + 1))
        assert run(table, [ord("a"), eos, ord("b")]) == [False, False, True]


def test_added_special_tokens_write_nothing_either():
    """Decoding skips every token that is marked special, also those without a role."""
    tokenizer = byte_level_tokenizer([b"a", b"b"])
    tokenizer.backend_tokenizer.add_special_tokens(["<|turn|>"])
    turn = tokenizer.backend_tokenizer.token_to_id("<|turn|>")
    assert tokenizer.decode([0, turn, 1], skip_special_tokens=True) == "ab"
    assert token_bytes(tokenizer)[turn] == b""


def test_ordinary_added_tokens_write_their_text():
    table = stop_table(BYTE_LEVEL, ["plain added|>b"], len(BYTE_LEVEL))
    assert run(table, [ADDED, ord("b")]) == [False, True]
    assert token_bytes(BYTE_LEVEL)[ADDED] == b"<|plain added|>"


def test_ids_beyond_the_tokenizer_do_nothing_and_beyond_the_model_are_left_out():
    wide = stop_table(BYTE_LEVEL, ["ab"], len(BYTE_LEVEL) + 5)
    np.testing.assert_array_equal(wide.next_state[:, -5:], np.tile(np.arange(3)[:, None], 5))
    narrow = stop_table(BYTE_LEVEL, ["ab"], 100)
    np.testing.assert_array_equal(narrow.next_state, wide.next_state[:, :100])


def test_token_bytes_of_both_kinds():
    written = token_bytes(BYTE_LEVEL)
    assert [written[i] for i in range(EOS)] == PIECES
    assert written[EOS] == b""
    written = token_bytes(BYTE_FALLBACK)
    assert [written[i] for i in range(256)] == [bytes([i]) for i in range(256)]
    assert written[256 + WORDS.index("b\u2581a")] == b"b a"


def test_tokenizers_without_a_known_decoder_are_asked_token_by_token():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"x": 0, "yz": 1, "<eos>": 2}, unk_token="x"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    assert token_bytes(tokenizer) == {0: b"x", 1: b"yz", 2: b""}
    assert run(stop_table(tokenizer, ["xy"], 3), [0, 1]) == [False, True]


def test_plain_metaspace_tokenizers():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"\u2581x": 0, "y": 1, "<eos>": 2}, unk_token="y"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    assert run(stop_table(tokenizer, ["y x"], 3), [1, 1, 0]) == [False, False, True]


def test_no_stops_give_no_table_and_empty_ones_are_refused():
    assert stop_table(BYTE_LEVEL, [], 10) is None
    assert stop_table(BYTE_LEVEL, (), 10) is None
    with pytest.raises(ValueError, match="empty"):
        stop_table(BYTE_LEVEL, ["a", ""], 10)
