"""Prompts from what users pass, their order over cycles, and the text of responses."""

import copy

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxppo.prompts import (
    PromptError,
    Prompts,
    decode_outputs,
    encode,
    left_pad,
    prepare,
    prompt_indices,
    take,
)

CHAT = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
CHAT += "{% if add_generation_prompt %}a:{% endif %}"


def byte_level(add_bos=False, **names):
    """A token a byte; <s> is 0, </s> 1."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {x: i for i, x in enumerate(["<s>", "</s>", *letters])}
    inner = Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if add_bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>", **names}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def sentencepiece_like():
    """A token a letter, with the mark of a space that decoding drops in front of a text."""
    letters = "▁abcdefghijklmnopqrstuvwxyz!"
    special = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    inner = Tokenizer(models.Unigram([*special, *((x, -2.0) for x in letters)], 0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def bert_like(**names):
    vocab = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "hi": 3, "you": 4}
    inner = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", **names
    )


def ids_of(tokenizer, text):
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


PLAIN, WITH_BOS = byte_level(), byte_level(add_bos=True)


@pytest.mark.parametrize("make", [lambda: WITH_BOS, sentencepiece_like])
def test_a_bos_that_the_tokenizer_sets_comes_exactly_once(make):
    tokenizer = make()
    bos = tokenizer.bos_token_id
    assert encode(tokenizer, "hi") == [bos, *ids_of(tokenizer, "hi")]
    for text in ("hi", "<s>hi"):
        ids = encode(tokenizer, text)
        assert (ids[0], ids.count(bos)) == (bos, 1)
        assert tokenizer.eos_token_id not in ids
    assert encode(tokenizer, "") == [bos]


def test_a_tokenizer_that_sets_no_bos_gets_none():
    assert encode(PLAIN, "hi") == list(ids_of(PLAIN, "hi"))
    # a vocabulary may hold a BOS token that its tokenizer never sets: GPT-2's does
    assert encode(PLAIN, "<s>hi") == [0, *ids_of(PLAIN, "hi")]
    assert encode(byte_level(bos_token=None), "hi") == list(ids_of(PLAIN, "hi"))


def test_an_unknown_word_that_is_the_bos_token_too_is_no_bos_set():
    # such as GPT-2's: one token is BOS, EOS and unknown; "a" alone encodes to it
    vocab = {"<b>": 0, "hi": 1}
    for added, bos in (("$A", []), ("<b> $A", [0])):
        inner = Tokenizer(models.WordLevel(vocab, "<b>"))
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
        inner.post_processor = processors.TemplateProcessing(
            single=added, special_tokens=[("<b>", 0)]
        )
        names = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), "<b>")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
        assert encode(tokenizer, "hi") == [*bos, 1]
        assert list(prepare(["hi"], tokenizer, max_tokens=4).ids[0]) == [*bos, 1]


def test_whether_a_bos_is_set_is_found_out_once_not_for_each_prompt():
    calls = []

    class Counting(PreTrainedTokenizerFast):
        def __call__(self, text, **options):
            calls.append(text)
            return super().__call__(text, **options)

    tokenizer = Counting(
        tokenizer_object=WITH_BOS.backend_tokenizer, bos_token="<s>", eos_token="</s>"
    )
    prepare(["hi", "ho", "he"], tokenizer, max_tokens=4)
    assert [text for text in calls if text != "a"] == ["hi", "ho", "he"]
    assert calls.count("a") == 2  # with and without special tokens


def test_a_separator_is_not_put_behind_a_prompt():
    assert bert_like()("hi you")["input_ids"] == [1, 3, 4, 2]
    assert encode(bert_like(), "hi you") == [3, 4]
    assert encode(bert_like(bos_token="[CLS]"), "hi you") == [1, 3, 4]


@pytest.mark.parametrize("head", ["", "{{ bos_token }}"])
def test_a_chat_has_one_bos_with_and_without_one_in_its_template(head):
    tokenizer = byte_level(add_bos=True, chat_template=head + CHAT)
    turns = [{"role": "user", "content": "ho"}]
    found = prepare([turns], tokenizer, max_tokens=20)
    assert found.texts == [("<s>" if head else "") + "u:ho;a:"]
    assert list(found.ids[0]) == [0, *ids_of(PLAIN, "u:ho;a:")]


def test_an_empty_prompt_is_the_bos_or_refused():
    # whether the tokenizer sets its BOS or not: trlx's default prompt is one
    for tokenizer in (PLAIN, WITH_BOS):
        assert list(prepare(["x", ""], tokenizer, max_tokens=4).ids[1]) == [0]
    with pytest.raises(PromptError, match=r"prompt 1 is empty.* no BOS"):
        prepare(["x", ""], byte_level(bos_token=None), max_tokens=4)


def test_dict_prompts_give_columns_and_stay_as_they_were():
    given = [{"prompt": "a", "answer": 1, "meta": [1]}, {"meta": None, "answer": 2, "prompt": "bc"}]
    before = copy.deepcopy(given)
    for _ in range(2):  # trlx popped the prompt out of the users' dicts: the second use failed
        found = prepare(given, PLAIN, max_tokens=4)
        assert found.texts == ["a", "bc"]
        assert found.columns == {"answer": [1, 2], "meta": [[1], None]}
        assert given == before
    chosen = take(found, np.array([1, 0, 1]))
    assert chosen.texts == ["bc", "a", "bc"]
    assert chosen.columns["answer"] == [2, 1, 2]
    assert [list(x) for x in chosen.ids] == [list(found.ids[i]) for i in (1, 0, 1)]


def test_a_dict_holds_a_chat_too():
    tokenizer = byte_level(chat_template=CHAT)
    turns = ({"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n"})
    found = prepare([{"prompt": turns, "key": 7}], tokenizer, max_tokens=20)
    assert found.texts == ["s:s;u:u;a:"]
    assert found.columns == {"key": [7]}


def test_a_chat_in_a_numpy_array_is_one_too():
    # what pandas makes of a parquet file's lists
    turns = np.array([{"role": "user", "content": "u"}], object)
    found = prepare([{"prompt": turns}], byte_level(chat_template=CHAT), max_tokens=20)
    assert found.texts == ["u:u;a:"]


REFUSALS = {
    "None instead of a list": (None, "prompts is one NoneType"),
    "a number instead of a list": (5, "prompts is one int"),
    "a column without a name": ([{"prompt": "a", 1: 2}], "the column 1 is no keyword"),
    "one string": ("abc", "one str"),
    "a dict of lists": ({"prompt": ["a", "b"]}, "one dict"),
    "nothing": ([], "empty"),
    "no prompt key": ([{"text": "a"}], "prompt 0 is a dict without the key 'prompt'"),
    "no prompt key later": ([{"prompt": "a"}, {"x": 1}], "prompt 1 is a dict without"),
    "a column more": ([{"prompt": "a"}, {"prompt": "a", "b": 1}], "prompt 1 .* prompt 0: b"),
    "a column less": ([{"prompt": "a", "b": 1}, {"prompt": "a"}], "prompt 1 .* prompt 0: b"),
    "dict and string": ([{"prompt": "a"}, "b"], "prompt 1 is a str.* mix no kinds"),
    "string and dict": (["b", {"prompt": "a"}], "prompt 1 is a dict.* mix no kinds"),
    "a number": (["a", 5], "prompt 1 is a int"),
    "None": ([{"prompt": None}], "prompt 0 is a NoneType"),
    "bytes": ([b"a"], "prompt 0 is a bytes"),
    "token ids": ([[1, 2, 3]], "prompt 0 is a list"),
    "an empty chat": ([[]], "prompt 0 is a list"),
    "a turn without content": ([[{"role": "user"}]], "prompt 0 is a list"),
    "a chat": (["a", [{"role": "user", "content": "a"}]], "prompt 1 is a chat.* no chat template"),
    "half a character": (["a", "b\ud83d"], "prompt 1 holds half of a surrogate pair"),
}


@pytest.mark.parametrize(("prompts", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_no_prompt_is_named(prompts, message):
    with pytest.raises(PromptError, match=message):
        prepare(prompts, PLAIN, max_tokens=20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 4, "truncate": "middle"}, "truncate is 'middle'"),
        ({"max_tokens": 4, "truncate": True}, "truncate is True"),
        ({"max_tokens": 0, "truncate": "right"}, "max_tokens is 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(PromptError, match=message):
        prepare(["abcdef"], WITH_BOS, **options)


@pytest.mark.parametrize("name", ["samples", "prompts", "outputs", "tokenizer"])
def test_columns_with_the_name_of_an_argument_are_refused(name):
    with pytest.raises(PromptError, match=f"'{name}'"):
        prepare([{"prompt": "a", name: 1}], PLAIN, max_tokens=20)


def test_a_chat_that_its_template_refuses_is_named():
    tokenizer = byte_level(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match=r"prompt 0 .*roles must alternate"):
        prepare([[{"role": "user", "content": "a"}]], tokenizer, max_tokens=20)


def test_half_a_character_in_a_chat_is_refused_too():
    tokenizer = byte_level(chat_template=CHAT)
    with pytest.raises(PromptError, match="prompt 0 holds half"):
        prepare([[{"role": "user", "content": "\udc00"}]], tokenizer, max_tokens=20)


@pytest.mark.parametrize("make", [tuple, np.array, lambda x: np.array(x, object), iter])
def test_any_sequence_of_prompts_will_do(make):
    found = prepare(make(["ab", "é"]), PLAIN, max_tokens=4)
    assert found.texts == ["ab", "é"]
    assert [len(x) for x in found.ids] == [2, 2]
    assert all(x.dtype == np.int32 for x in found.ids)
    assert {type(x) for x in found.texts} == {str}  # numpy's own would show as np.str_('ab')


def test_prompts_too_long_are_refused_with_the_remedy_or_cut_on_a_side():
    with pytest.raises(PromptError) as caught:
        prepare(["abcd", "abcde"], PLAIN, max_tokens=4)
    for part in ("prompt 1", "5 tokens", "leave 4", "train.seq_length", "truncate_prompts"):
        assert part in str(caught.value)
    cut = {
        side: [
            PLAIN.decode(x)
            for x in prepare(["abcdef", "ab"], PLAIN, max_tokens=4, truncate=side).ids
        ]
        for side in ("left", "right")
    }
    assert cut == {"left": ["cdef", "ab"], "right": ["abcd", "ab"]}


@pytest.mark.parametrize(("side", "rest"), [("left", "def"), ("right", "abc")])
def test_cutting_keeps_the_bos(side, rest):
    def cut(width):
        return list(prepare(["abcdef"], WITH_BOS, max_tokens=width, truncate=side).ids[0])

    assert cut(4) == [0, *ids_of(PLAIN, rest)]
    assert cut(1) == [0]
    assert cut(7) == [0, *ids_of(PLAIN, "abcdef")]


def test_padding_follows_lengths_not_ids():
    # the padding's id occurs in prompts, as EOS does where it is the pad
    rows = [np.array([1, 5, 1], np.int32), np.array([1], np.int32), np.array([], np.int32)]
    tokens, mask = left_pad(rows, 4, 1)
    np.testing.assert_array_equal(tokens, [[1, 1, 5, 1], [1, 1, 1, 1], [1, 1, 1, 1]])
    np.testing.assert_array_equal(mask, np.array([[0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]], bool))
    assert (tokens.dtype, mask.dtype) == (np.int32, bool)
    tokens, mask = left_pad([np.array([3, 4])], 2, 0)
    assert (tokens.tolist(), mask.tolist()) == ([[3, 4]], [[True, True]])


def stream(num_prompts, size, count, seed):
    """The first `count` numbers, taken in batches of a size."""
    batches = [prompt_indices(num_prompts, i, size, seed) for i in range(-(-count // size))]
    assert all(batch.shape == (size,) for batch in batches)
    return np.concatenate(batches)[:count]


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(st.integers(1, 20), st.integers(1, 50), st.integers(1, 50), st.integers(0, 2**31))
def test_every_epoch_is_a_permutation_however_the_stream_is_cut(num_prompts, one, other, seed):
    found = stream(num_prompts, one, 3 * num_prompts, seed)
    np.testing.assert_array_equal(found, stream(num_prompts, other, 3 * num_prompts, seed))
    for epoch in found.reshape(3, num_prompts):
        assert sorted(epoch) == list(range(num_prompts))


def test_orders_differ_between_epochs_and_seeds():
    first, second = stream(50, 7, 100, seed=3).reshape(2, 50)
    other = stream(50, 7, 50, seed=4)
    assert any(first != second)
    assert any(first != other)
    assert any(first != np.arange(50))


@pytest.mark.parametrize("make", [lambda: PLAIN, lambda: WITH_BOS, sentencepiece_like])
@pytest.mark.parametrize("between", [0, 2, 3])
def test_outputs_are_what_follows_the_prompt_spaces_kept(make, between):
    tokenizer = make()
    text, prompt_text = "hi you all", "hi you all"[:between]
    whole = np.asarray(encode(tokenizer, text), np.int32)
    at = len(encode(tokenizer, prompt_text))
    prompt, response = whole[:at], np.append(whole[at:], tokenizer.eos_token_id)
    before = prompt.copy(), response.copy()
    (output,) = decode_outputs(tokenizer, [prompt], [response])
    # the piece-wise text of a sentencepiece-like tokenizer has no space where "hi| you" is cut
    assert output == text[between:]
    np.testing.assert_array_equal((*prompt, *response), (*before[0], *before[1]))


def test_special_tokens_are_no_text_wherever_they_stand():
    response = np.array([*ids_of(PLAIN, " a"), 1, *ids_of(PLAIN, "b"), 0, 1], np.int32)
    assert decode_outputs(PLAIN, [np.array([0, 0])], [response]) == [" ab"]
    assert decode_outputs(PLAIN, [ids_of(PLAIN, "x")], [np.array([1])]) == [""]
    assert decode_outputs(PLAIN, [ids_of(PLAIN, "x")], [np.array([], np.int32)]) == [""]


def test_punctuation_keeps_the_space_in_front():
    # told to clean up, transformers would make "a." of "a ." and eat the response's spaces too
    name = "clean_up_tokenization_spaces"
    anyway = f"{name}_for_bpe_even_though_it_will_corrupt_output"
    tokenizer = byte_level(**{name: True, anyway: True})
    response = ids_of(PLAIN, " b , c")
    assert tokenizer.decode(response) == " b, c"
    assert decode_outputs(tokenizer, [ids_of(PLAIN, "a .")], [response]) == [" b , c"]


def test_outputs_are_cut_at_the_earliest_stop_string():
    prompts = [ids_of(PLAIN, "Q END:")] * 4
    texts = [" yes \n\nEND no STOP", " yes STOP END", " yes ", "END"]
    responses = [ids_of(PLAIN, text) for text in texts]
    before = [x.copy() for x in responses]
    # a prompt's own stop string ends nothing, and spaces are stripped in front of a stop only
    assert decode_outputs(PLAIN, prompts, responses, ["STOP", "END"]) == [
        " yes",
        " yes",
        " yes ",
        "",
    ]
    assert decode_outputs(PLAIN, prompts, responses) == texts
    for now, then in zip(responses, before):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize(
    ("stops", "message"),
    [(["STOP", ""], "a stop sequence is empty"), ("STOP", r"one string; pass a list, \['STOP'\]")],
)
def test_stop_strings_that_would_cut_everything_are_refused(stops, message):
    a = [ids_of(PLAIN, "a")]
    with pytest.raises(PromptError, match=message):
        decode_outputs(PLAIN, a, a, stops)


def test_a_character_cut_in_the_middle_is_marked_and_harms_nothing():
    smile = ids_of(PLAIN, "😀")
    assert len(smile) == 4
    a, b = ids_of(PLAIN, "a"), ids_of(PLAIN, "b")
    # at the end of a response
    (output,) = decode_outputs(PLAIN, [a], [np.concatenate([b, smile[:2]])])
    assert output == "b�"
    # between prompt and response: neither half is text, and what follows is not lost
    (output,) = decode_outputs(
        PLAIN, [np.concatenate([a, smile[:2]])], [np.concatenate([smile[2:], b])]
    )
    assert output.strip("�") == "b"
    assert "�" in output


def test_rows_are_decoded_apart():
    prompts, responses = [ids_of(PLAIN, "a")] * 2, [ids_of(PLAIN, "b"), ids_of(PLAIN, "c")]
    assert decode_outputs(PLAIN, prompts, responses) == ["b", "c"]
    assert isinstance(prepare(["a"], PLAIN, max_tokens=2), Prompts)
