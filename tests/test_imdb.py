"""configs/gpt2_sentiment.py:imdb on small models of its architectures, without a network."""

import json
import sys
import types

import jax
import pytest
from helpers_train import ARCHITECTURE, make_tokenizer, read_lines
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxppo import create_model, load_pretrained, save_pretrained
from jaxppo.main import main

REVIEWS = ["a b c d e f", "gh ij kl", "m", "no  pq\nrs tt"]


def word_pieces():
    """A BERT tokenizer of letters: [CLS] in front of a text and [SEP] behind it."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    inner = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]",
    )  # fmt: skip


@pytest.fixture
def classifier(tmp_path):
    config = {
        "model_type": "distilbert", "architectures": ["DistilBertForSequenceClassification"],
        "vocab_size": 56, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32,
        "max_position_embeddings": 24, "initializer_range": 0.5,
        "id2label": {"0": "NEGATIVE", "1": "POSITIVE"},
    }  # fmt: skip
    model = create_model(config)
    save_pretrained(tmp_path / "bert", model, model.init(jax.random.key(0)), word_pieces())
    return tmp_path / "bert"


def arguments(tmp_path, classifier, **others):
    model = create_model(ARCHITECTURE | {"n_positions": 64})
    save_pretrained(tmp_path / "policy", model, model.init(jax.random.key(0)), make_tokenizer())
    options = {
        "model.model_path": tmp_path / "policy", "reward.model_path": classifier,
        "model.num_layers_unfrozen": 1, "train.total_steps": 4, "train.batch_size": 8,
        "train.seq_length": 64, "method.num_rollouts": 8, "method.chunk_size": 8,
        "method.gen_kwargs.max_new_tokens": 6,
    }  # fmt: skip
    return [
        "jaxppo", "--config=configs/gpt2_sentiment.py:imdb", f"--workdir={tmp_path / 'run'}",
        *(f"--config.{name}={value}" for name, value in (options | others).items()),
    ]  # fmt: skip


def test_the_config_trains_with_an_encoder_of_another_vocabulary(tmp_path, classifier, monkeypatch):
    def load_dataset(name, split):
        assert (name, split) == ("imdb", "train+test")
        return {"text": REVIEWS}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    from jaxppo.config import default_config
    from jaxppo.train import configured_reward

    config = default_config()
    config.reward.update(model_path=str(classifier), label="POSITIVE")
    reward = configured_reward(config)
    assert main(arguments(tmp_path, classifier)) == 0
    rows = read_lines(tmp_path / "run" / "samples.jsonl")
    scores = reward([row["prompt"] + row["output"] for row in rows])
    assert [row["reward"] for row in rows] == pytest.approx(scores, abs=1e-6)
    assert {row["prompt"] for row in rows} == {"I don't know much about Hungarian underground"}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())
    load_pretrained(tmp_path / "run" / "model")


def test_long_texts_keep_the_special_tokens_around_them(classifier):
    from jaxppo import reward_model

    _, _, tokenizer = load_pretrained(classifier)
    assert tokenizer("ab " * 40, truncation=True, max_length=24)["input_ids"][-1] == 3
    fn = reward_model(classifier, label="POSITIVE", output="logit")
    long, cut, other = fn(["ab " * 40, "ab " * 11, "ab " * 10])  # 22 pieces fit
    assert long == pytest.approx(cut, abs=1e-5)
    assert abs(long - other) > 1e-4


def test_without_the_package_the_sentence_says_what_to_install(
    tmp_path, classifier, monkeypatch, capfd
):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(arguments(tmp_path, classifier)) == 1
    assert "pip install 'jaxppo[datasets]'" in capfd.readouterr().err
