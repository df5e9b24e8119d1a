"""Adapters as PEFT folders: round trips, and what `peft` computes from them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import random_params, tiny_model

from jaxppo import create_model, save_pretrained
from jaxppo.models import ModelError, add_lora, load_adapter, save_adapter, with_options

TOKENS = np.arange(12).reshape(2, 6)
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 37,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
NEOX = {
    "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "vocab_size": 37,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


def models():
    yield "gpt2", *tiny_model()
    for name, config in (("llama", LLAMA), ("gpt_neox", NEOX)):
        model = create_model(config)
        yield name, model, random_params(model)


@pytest.fixture(scope="module", params=list(models()), ids=lambda x: x[0])
def adapted(request):
    """A model whose query, value and MLP adapters do something."""
    _, model, params = request.param
    model = with_options(model, lora_scale=1.5)
    targets = ["query", "value", "up", "down"]
    tree = add_lora(jax.random.key(0), params, rank=2, targets=targets)
    keys = iter(jax.random.split(jax.random.key(1), 100))

    def fill(path, x):
        return 0.3 * jax.random.normal(next(keys), x.shape) if path[-1].key == "lora_b" else x

    return model, params, jax.tree_util.tree_map_with_path(fill, tree)


def test_a_folder_of_adapters_goes_back_onto_its_base(adapted, tmp_path):
    model, base, tree = adapted
    save_adapter(tmp_path, model, tree, base="some/base")
    again, loaded = load_adapter(tmp_path, with_options(model, lora_scale=1.0), base)
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    np.testing.assert_allclose(
        again.logits(loaded, TOKENS), model.logits(tree, TOKENS), atol=1e-5, rtol=1e-5
    )
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_peft_computes_the_same_from_the_folder(adapted, tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model, base, tree = adapted
    save_pretrained(tmp_path / "base", model, base)
    save_adapter(tmp_path / "adapter", model, tree, base=tmp_path / "base")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    ours = model.logits(tree, TOKENS)
    np.testing.assert_allclose(ours, expected, atol=2e-4, rtol=1e-4)
    assert jnp.abs(ours - model.logits(base, TOKENS)).max() > 0.1


def test_adapters_merged_into_an_export_are_the_adapted_model(adapted, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model, _, tree = adapted
    save_pretrained(tmp_path, model, tree)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor(TOKENS)).logits
    np.testing.assert_allclose(model.logits(tree, TOKENS), expected.numpy(), atol=2e-4, rtol=1e-4)


def test_what_is_not_supported_is_refused(adapted, tmp_path):
    model, base, tree = adapted
    with pytest.raises(ValueError, match="hold no adapters"):
        save_adapter(tmp_path, model, base, base="x")
    save_adapter(tmp_path, model, tree, base="x")
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ModelError, match="use_dora=True: not supported"):
        load_adapter(tmp_path, model, base)
    file.write_text(json.dumps(config))
    small = create_model(LLAMA | {"num_hidden_layers": 1, "model_type": "llama"})
    with pytest.raises(ModelError, match="adapts what this model has not"):
        load_adapter(tmp_path, small, random_params(small))
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match="pickled adapters are not read"):
        load_adapter(tmp_path, model, base)
