"""Hugging Face folders: exact round trips, every form of checkpoint, clear refusals."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import GOLDEN_MODELS, byte_level_tokenizer, random_params, tiny_config, tiny_model
from safetensors.numpy import load_file, save_file

from jaxppo import create_model, init_value_head, load_pretrained, save_pretrained
from jaxppo.models import ModelError, eos_ids, load_tokenizer

GOLDEN = GOLDEN_MODELS / "gpt2"


def assert_trees_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.fixture
def folder(tmp_path):
    """A writable copy of the golden checkpoint."""
    return shutil.copytree(GOLDEN, tmp_path / "model")


def rewrite(folder, change):
    """Replaces the tensors of a folder by `change(tensors)`."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)


@pytest.mark.parametrize("name", ["gpt2", "gpt2_seqcls"])
def test_the_export_is_the_import_run_backwards(name, tmp_path):
    model, params, _ = load_pretrained(GOLDEN_MODELS / name)
    save_pretrained(tmp_path, model, params)
    original = load_file(GOLDEN_MODELS / name / "model.safetensors")
    written = load_file(tmp_path / "model.safetensors")
    original.pop("lm_head.weight", None)
    assert original.keys() == written.keys()
    for key, tensor in original.items():
        assert written[key].dtype == tensor.dtype
        np.testing.assert_array_equal(written[key], tensor)


def test_a_second_round_trip_is_equal_byte_for_byte(tmp_path):
    model, params, _ = load_pretrained(GOLDEN)
    save_pretrained(tmp_path / "1", model, params)
    again, loaded, _ = load_pretrained(tmp_path / "1")
    assert_trees_equal(params, loaded)
    assert again.config == model.config
    save_pretrained(tmp_path / "2", again, loaded)
    names = sorted(file.name for file in (tmp_path / "1").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_json_files_are_kept(tmp_path):
    model, params, _ = load_pretrained(GOLDEN)
    save_pretrained(tmp_path, model, params)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((GOLDEN / name).read_text())


def test_no_generation_config_is_no_generation_config(folder, tmp_path):
    (folder / "generation_config.json").unlink()
    model, params, _ = load_pretrained(folder)
    save_pretrained(tmp_path / "out", model, params)
    assert not (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_checkpoints_of_other_dtypes_load_as_float32(folder, kind):
    rewrite(folder, lambda tensors: {k: v.astype(kind) for k, v in tensors.items()})
    _, params, _ = load_pretrained(folder)
    _, exact, _ = load_pretrained(GOLDEN)
    rounded = jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(kind).astype("f4")), exact)
    assert_trees_equal(params, rounded)


@pytest.mark.parametrize(("dtype", "name"), [(jnp.bfloat16, "bfloat16"), (jnp.float16, "float16")])
def test_parameters_of_other_dtypes_are_exported_as_they_are(tmp_path, dtype, name):
    model, params, _ = load_pretrained(GOLDEN, dtype=dtype)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    save_pretrained(tmp_path, model, params)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == name
    _, again, _ = load_pretrained(tmp_path, dtype=dtype)
    assert_trees_equal(params, again)


def test_the_old_name_of_dtype_is_replaced(tmp_path):
    model = create_model(tiny_config(torch_dtype="float16"))
    save_pretrained(tmp_path, model, random_params(model))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert "torch_dtype" not in config


def shard(folder):
    """Cuts model.safetensors in two with an index, as big models are stored."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[:11], names[11:])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({k: tensors[k] for k in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_sharded_checkpoints_load(folder):
    shard(folder)
    _, params, _ = load_pretrained(folder)
    assert_trees_equal(params, load_pretrained(GOLDEN)[1])


def test_a_missing_shard_is_named(folder):
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors"):
        load_pretrained(folder)


@pytest.mark.parametrize("text", ["{torn", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(folder, text):
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        load_pretrained(folder)


def test_saving_over_a_sharded_checkpoint_replaces_it(folder):
    shard(folder)
    model, params, _ = load_pretrained(folder)
    params = dict(params, tokens=params["tokens"] + 1)
    save_pretrained(folder, model, params)
    assert_trees_equal(params, load_pretrained(folder)[1])


def test_names_without_prefix_load(folder):
    rewrite(folder, lambda ts: {k.removeprefix("transformer."): v for k, v in ts.items()})
    assert "wte.weight" in load_file(folder / "model.safetensors")
    assert_trees_equal(load_pretrained(folder)[1], load_pretrained(GOLDEN)[1])


def test_tied_copies_and_stored_masks_are_ignored(folder):
    extra = {
        "lm_head.weight": np.zeros((128, 48), np.float32),
        "transformer.h.0.attn.bias": np.ones((1, 1, 64, 64), bool),
        "transformer.h.0.attn.masked_bias": np.full((), -1e4, np.float32),
    }
    rewrite(folder, lambda tensors: tensors | extra)
    assert_trees_equal(load_pretrained(folder)[1], load_pretrained(GOLDEN)[1])


def test_all_tensors_that_do_not_fit_are_named_together(folder):
    def spoil(tensors):
        del tensors["transformer.ln_f.bias"]
        tensors["transformer.h.7.ln_1.bias"] = np.zeros(48, np.float32)
        tensors["transformer.wpe.weight"] = np.zeros((63, 48), np.float32)
        tensors["transformer.h.1.attn.c_attn.weight"] = np.zeros((48, 100), np.float32)
        tensors["transformer.h.2.attn.c_attn.bias"] = np.zeros((), np.float32)
        tensors["wte.weight"] = tensors["transformer.wte.weight"]
        return tensors

    rewrite(folder, spoil)
    with pytest.raises(ModelError) as caught:
        load_pretrained(folder)
    message = str(caught.value)
    for part in (
        str(folder),
        "transformer.ln_f.bias is missing",
        "transformer.h.7.ln_1.bias is not used",
        "transformer.wpe.weight gives positions the shape (63, 48), not (64, 48)",
        "transformer.h.1.attn.c_attn.weight",
        "transformer.h.2.attn.c_attn.bias",
        "wte.weight occurs twice",
    ):
        assert part in message


def test_a_long_list_of_problems_is_cut_and_counted(folder):
    rewrite(folder, lambda tensors: {"one": np.zeros(1, np.float32)})
    with pytest.raises(ModelError, match=r"and 29 more$"):  # 1 left over + 40 missing, 12 shown
        load_pretrained(folder)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(ModelError, match=r"pickled \.bin.*not read.*safe_serialization"):
        load_pretrained(folder)


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model\.safetensors"):
        load_pretrained(folder)


@pytest.mark.parametrize("length", [0, 5, 300, -1])
def test_torn_weights_are_refused(folder, length):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ModelError, match=r"model\.safetensors can't be read"):
        load_pretrained(folder)


def test_other_families_are_refused_with_the_list(folder):
    (folder / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ModelError, match=r"'t5' is not supported; supported are: .*gpt2"):
        load_pretrained(folder)
    with pytest.raises(ModelError, match=r"None is not supported"):
        create_model({})


def test_no_config_is_refused(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_pretrained(folder)


@pytest.mark.parametrize("text", [b"{torn", b"[1, 2]", b"\xff\xfe\x00", b""])
def test_a_config_that_is_no_json_object_is_refused(folder, text):
    (folder / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_pretrained(folder)


@pytest.mark.parametrize("name", ["./nowhere", "/no/where/at/all", "a/b/c"])
def test_missing_folders_are_refused_without_asking_the_hub(name, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: 1 / 0)
    with pytest.raises(ModelError, match="does not exist"):
        load_pretrained(name)


@pytest.mark.parametrize("name", ["no-such-model-anywhere", "nobody/no-such-model-anywhere"])
def test_without_network_a_hub_name_gives_one_clear_error(name, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # it read the variable at its import
    with pytest.raises(ModelError, match=rf"^{name} is neither a folder.*connection$"):
        load_pretrained(name)


def test_hub_models_are_downloaded_without_pickles(folder, monkeypatch):
    import huggingface_hub

    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    _, params, _ = load_pretrained("someone/gpt2")
    assert_trees_equal(params, load_pretrained(GOLDEN)[1])
    assert asked["name"] == "someone/gpt2"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any(p in ("*", "*.bin", "*.py", "*.pt") for p in asked["allow_patterns"])


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_value_head_lies_beside_the_model(tmp_path, kind):
    model, params = tiny_model()
    head = init_value_head(jax.random.key(3), 16, kind)
    params = dict(params, value_head=jax.tree.map(lambda x: x + 0.5, head))
    save_pretrained(tmp_path, model, params)
    assert not any("value" in key for key in load_file(tmp_path / "model.safetensors"))
    assert_trees_equal(load_pretrained(tmp_path)[1], params)


def test_saving_without_a_value_head_removes_the_old_one(tmp_path):
    model, params = tiny_model()
    save_pretrained(
        tmp_path, model, dict(params, value_head=init_value_head(jax.random.key(3), 16))
    )
    save_pretrained(tmp_path, model, params)
    assert "value_head" not in load_pretrained(tmp_path)[1]


def test_a_torn_value_head_is_refused(tmp_path):
    model, params = tiny_model()
    save_pretrained(
        tmp_path, model, dict(params, value_head=init_value_head(jax.random.key(3), 16))
    )
    file = tmp_path / "value_head.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ModelError, match=r"value_head\.safetensors can't be read"):
        load_pretrained(tmp_path)


def test_eos_ids_come_from_model_generation_config_and_tokenizer():
    class Tokenizer:
        eos_token_id = 9

    def of(model_eos, generation_eos, tokenizer=None):
        generation = {} if generation_eos == "none" else {"eos_token_id": generation_eos}
        return eos_ids(create_model(tiny_config(eos_token_id=model_eos), generation), tokenizer)

    assert of(5, 2) == (2, 5)
    assert of(5, [7, 3, 5]) == (3, 5, 7)
    assert of([4, 1], "none", Tokenizer()) == (1, 4, 9)
    assert of(None, "none") == ()
    assert of(None, None, Tokenizer()) == (9,)
    assert of(0, "none") == (0,)
    assert of(37, [36, -1]) == (36,)  # ids beyond the table can't be sampled
    assert eos_ids(create_model(tiny_config()), object()) == ()


def test_a_folder_without_tokenizer_gives_none():
    assert load_pretrained(GOLDEN)[2] is None
    assert load_tokenizer(GOLDEN) is None


def test_the_tokenizer_is_saved_and_loaded_with_the_model(tmp_path):
    model, params = tiny_model()
    save_pretrained(tmp_path, model, params, byte_level_tokenizer([b"a", b"b ", b"\xc3\xa9"]))
    _, _, tokenizer = load_pretrained(tmp_path)
    assert tokenizer.decode([0, 1, 2, 0]) == "ab éa"
    assert tokenizer.eos_token_id == 3
    assert eos_ids(model, tokenizer) == (3,)


def test_a_broken_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{torn")
    with pytest.raises(ModelError, match=r"the tokenizer in .* can't be loaded"):
        load_pretrained(folder)


def test_transformers_reads_the_exported_config(tmp_path):
    from transformers import AutoConfig, GenerationConfig

    model, params, _ = load_pretrained(GOLDEN)
    save_pretrained(tmp_path, model, params)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.model_type == "gpt2"
    assert (config.n_embd, config.n_layer, config.n_head, config.vocab_size) == (48, 3, 4, 128)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 2


@pytest.mark.parametrize("source", ["golden", "made here"])
def test_torch_computes_the_same_from_the_export(tmp_path, source):
    torch = pytest.importorskip("torch")
    from transformers import GPT2LMHeadModel

    if source == "golden":
        model, params, _ = load_pretrained(GOLDEN)
    else:
        model, params = tiny_model(n_inner=20, activation_function="relu")
    save_pretrained(tmp_path, model, params)
    peer, info = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 9))
    with torch.no_grad():
        expected = peer.eval()(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(
        jax.jit(model.logits)(params, tokens), expected, atol=2e-4, rtol=1e-4
    )
