"""BERT, RoBERTa and DistilBERT classifiers against torch, padding, and refusals."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make_models import VOCAB, padded, tokens, weight, write_checkpoint
from safetensors.numpy import load_file

from jaxppo import create_model, load_pretrained, save_pretrained
from jaxppo.models import ModelError

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "models" / "encoders.json"
_BERT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 32, "type_vocab_size": 2, "pad_token_id": 0,
}  # fmt: skip
CASES = {
    "bert": ("bert", 3, _BERT),
    "roberta": ("roberta", 1, _BERT | {"type_vocab_size": 1, "pad_token_id": 1}),
    "distilbert": (
        "distilbert", 2,
        {
            "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48,
            "max_position_embeddings": 32, "pad_token_id": 0,
        },
    ),
}  # fmt: skip


def rows(seed=0):
    return [row % (VOCAB - 5) + 5 for row in tokens(seed)]  # no special id


def compute(case, folder, seed=0):
    """Writes the case's checkpoint and computes its scores and gradient norms with torch."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    kind, labels, options = CASES[case]
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, num_labels=labels, **options)
    maker = AutoModelForSequenceClassification
    maker.from_config(config).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    shapes = {k: list(v.shape) for k, v in load_file(folder / "model.safetensors").items()}
    write_checkpoint(folder, saved, shapes, seed)
    model = maker.from_pretrained(folder, attn_implementation="eager").eval().float()
    scores = torch.cat([model(torch.tensor(row)[None]).logits for row in rows(seed)])
    scores.square().sum().backward()
    norms = {n: float(p.grad.norm()) for n, p in model.named_parameters() if p.grad is not None}
    scores = scores.detach().numpy().tolist()
    return {"config": saved, "shapes": shapes, "scores": scores, "norms": norms}


def check(folder, golden, seed=0):
    model, params, tokenizer = load_pretrained(folder)
    assert tokenizer is None
    score = jax.jit(model.score)
    expected = np.asarray(golden["scores"])
    for side in ("left", "right"):
        grid, mask = padded(rows(seed), side)
        np.testing.assert_allclose(score(params, grid, mask), expected, atol=2e-4, rtol=1e-5)
        other = np.where(mask, grid, 7)  # what padding holds is nobody's business
        np.testing.assert_array_equal(score(params, other, mask), score(params, grid, mask))
    alone = np.concatenate([score(params, row[None]) for row in rows(seed)])
    np.testing.assert_allclose(alone, expected, atol=2e-4, rtol=1e-5)
    return model, params


@pytest.mark.parametrize("case", CASES)
def test_scores_and_gradients_are_torchs(case, tmp_path):
    golden = json.loads(GOLDEN.read_text())[case]
    write_checkpoint(tmp_path, golden["config"], golden["shapes"])
    model, params = check(tmp_path, golden)
    grid, mask = padded(rows())
    loss = lambda params: jnp.square(model.score(params, grid, mask)).sum()  # noqa: E731
    grads = jax.jit(jax.grad(loss))(params)
    save_pretrained(tmp_path / "grads", model, grads)
    for name, grad in load_file(tmp_path / "grads" / "model.safetensors").items():
        expected = golden["norms"].get(name, 0.0)
        assert np.linalg.norm(grad) == pytest.approx(expected, rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("case", CASES)
def test_fresh_weights_give_torchs_scores(case, tmp_path):
    pytest.importorskip("torch")
    check(tmp_path, compute(case, tmp_path, seed=5), seed=5)


@pytest.mark.parametrize("case", CASES)
def test_an_export_is_the_import_run_backwards(case, tmp_path):
    golden = json.loads(GOLDEN.read_text())[case]
    write_checkpoint(tmp_path, golden["config"], golden["shapes"])
    model, params, _ = load_pretrained(tmp_path)
    save_pretrained(tmp_path / "out", model, params)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, weight(name, golden["shapes"][name]))


def test_what_is_no_classifier_or_not_supported_is_refused():
    config = json.loads(GOLDEN.read_text())["bert"]["config"]
    with pytest.raises(ModelError, match="only ForSequenceClassification is supported, not BertM"):
        create_model(config | {"architectures": ["BertModel"]})
    with pytest.raises(ModelError, match="position_embedding_type=relative_key"):
        create_model(config | {"position_embedding_type": "relative_key"})
    with pytest.raises(ModelError, match="is_decoder=True"):
        create_model(config | {"is_decoder": True})


def main():
    """Writes the golden file anew (needs torch)."""
    import tempfile

    kept = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            kept[case] = compute(case, pathlib.Path(folder))
    GOLDEN.write_text(json.dumps(kept, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
