"""Reward models: scores of a tiny classifier against its own logits under other padding."""

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxppo.models import ModelError, create_model, load_pretrained, save_pretrained
from jaxppo.prompts import left_pad
from jaxppo.rewards import call_reward, reward_model

POSITIONS = 40
SIZES = {
    "model_type": "gpt2", "vocab_size": 257, "n_positions": POSITIONS, "n_embd": 16, "n_layer": 2,
    "n_head": 2, "initializer_range": 0.5, "pad_token_id": 256,
}  # fmt: skip
TEXTS = [
    "good", "bad bad bad", "", "x", "a text of 33 bytes, over one step", "y" * 39, "z" * 100, "é😀",
]  # fmt: skip


def tokenizer():
    """A token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({x: i for i, x in enumerate([*letters, "</s>"])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="</s>")


def write(folder, labels, *, words=tokenizer, architecture="GPT2ForSequenceClassification"):
    """A checkpoint with random weights."""
    config = {**SIZES, "architectures": [architecture], "num_labels": len(labels)}
    config["id2label"] = {str(i): label for i, label in enumerate(labels)}
    model = create_model(config)
    save_pretrained(folder, model, model.init(jax.random.key(1)), words and words())
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return write(tmp_path_factory.mktemp("two"), ["NEGATIVE", "POSITIVE"])


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return write(tmp_path_factory.mktemp("one"), ["reward"])


def logits_of(folder, texts=TEXTS):
    """The classifier's logits, padded on the other side and to the full width."""
    model, params, words = load_pretrained(folder)
    rows = [words(text)["input_ids"][:POSITIONS] or [0] for text in texts]
    tokens, mask = left_pad(rows, POSITIONS, 7)
    return np.asarray(jax.jit(model.score)(params, tokens, mask))


@pytest.fixture(scope="module")
def logits(two):
    return logits_of(two)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_scores_are_the_probability_of_the_label(two, logits):
    expected = np.exp(logits[:, 1]) / np.exp(logits).sum(1)
    scores = reward_model(two, label="POSITIVE")(TEXTS)
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert expected.std() > 0.01  # the texts differ at all
    assert all(type(x) is float for x in scores)
    np.testing.assert_allclose(reward_model(two, label="NEGATIVE")(TEXTS), 1 - expected, atol=1e-6)


def test_labels_by_name_and_number_and_logits(two, logits):
    for label, column in (("POSITIVE", 1), (1, 1), ("NEGATIVE", 0), (0, 0)):
        scores = reward_model(two, label=label, output="logit")(TEXTS)
        np.testing.assert_allclose(scores, logits[:, column], atol=1e-5)


def test_a_single_label_needs_no_name(one):
    logits = logits_of(one)[:, 0]
    np.testing.assert_allclose(reward_model(one, output="logit")(TEXTS), logits, atol=1e-5)
    for label in (None, 0, "reward"):
        scores = reward_model(one, label=label)(TEXTS)
        np.testing.assert_allclose(scores, sigmoid(logits), atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_a_score_depends_on_its_text_alone(two, batch_size):
    fn = reward_model(two, label=1, output="logit", batch_size=batch_size)
    whole = np.array(fn(TEXTS))
    order = np.random.default_rng(0).permutation(len(TEXTS))
    np.testing.assert_allclose(fn([TEXTS[i] for i in order]), whole[order], atol=1e-6)
    for text, score in zip(TEXTS[:3], whole):  # alone, with no longer text beside it
        np.testing.assert_allclose(fn([text]), [score], atol=1e-6)


def test_texts_are_read_from_their_beginning_up_to_a_limit(two):
    fn = reward_model(two, label=0, output="logit", max_length=5)
    a, b, c = fn(["abcde", "abcdefgh", "xbcdefgh"])
    assert a == pytest.approx(b, abs=1e-6)
    assert abs(a - c) > 1e-4
    # more than the model's positions are never read
    fn = reward_model(two, label=0, output="logit", max_length=1000)
    np.testing.assert_allclose(*([x] for x in fn(["z" * 40, "z" * 400])), atol=1e-6)


def test_it_is_a_reward_function(one):
    fn = reward_model(one)
    scores = call_reward(
        fn, samples=TEXTS, prompts=TEXTS, outputs=TEXTS, tokenizer=None, columns={"k": TEXTS},
        lengths=[2] * len(TEXTS), width=2,
    )  # fmt: skip
    np.testing.assert_allclose(scores.grid[:, 1], fn(TEXTS), atol=1e-6)
    assert str(one) in fn.__name__
    assert fn([]) == []


def test_labels_that_are_not_there_are_refused(two, one):
    for folder, label in ((two, "GOOD"), (two, None), (two, 2), (two, -1), (one, 1)):
        with pytest.raises(ModelError, match=f"has no label {label!r}; choose one of: ") as caught:
            reward_model(folder, label=label)
        for name in ("NEGATIVE, POSITIVE",) if folder == two else ("reward",):
            assert str(caught.value).endswith(name)


def test_what_is_no_reward_model_is_refused(tmp_path, two):
    policy = write(tmp_path / "policy", ["x"], architecture="GPT2LMHeadModel")
    with pytest.raises(ModelError, match=r"policy has no score head.*must be a classifier"):
        reward_model(policy)
    mute = write(tmp_path / "mute", ["x"], words=None)
    with pytest.raises(ModelError, match="mute holds no tokenizer"):
        reward_model(mute)
    with pytest.raises(ValueError, match="'odds' is unknown; choose 'probability' or 'logit'"):
        reward_model(two, label=1, output="odds")
