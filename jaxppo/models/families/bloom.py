"""BLOOM: no positions but a bias on distance (alibi), and a norm on the embeddings."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import decoder, heads, linear, norm
from jaxppo.models.tables import Family, Rule, split_heads
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a BLOOM `config.json`."""
    width = hf.get("n_embed") or hf["hidden_size"]
    count = hf.get("n_head") or hf["num_attention_heads"]
    return decoder(
        hf,
        tied=True,
        neutral={"apply_residual_connection_post_layernorm": False},
        width=width,
        layers=hf.get("n_layer") or hf["num_hidden_layers"],
        heads=count,
        mlp_width=4 * width,
        max_positions=hf.get("seq_length") or 2048,  # alibi has no end; they were trained on 2048
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        activation="gelu_pytorch_tanh",
        learned_positions=False,
        alibi=True,
        embedding_norm=True,
    )


def rules(c: DecoderConfig) -> list[Rule]:
    """The tensors of a BLOOM checkpoint."""
    top = "transformer"
    table = [Rule(f"{top}.word_embeddings.weight", ("tokens",))]
    table += norm(f"{top}.word_embeddings_layernorm", "embedding_norm", True)
    for i in range(c.layers):
        name, b = f"{top}.h.{i}", f"block_{i}"
        table += norm(f"{name}.input_layernorm", f"{b}/norm_1", True)
        table += norm(f"{name}.post_attention_layernorm", f"{b}/norm_2", True)
        for theirs, ours in {"weight": "kernel", "bias": "bias"}.items():
            paths = tuple(f"{b}/attention/{part}/{ours}" for part in ("query", "key", "value"))
            qkv = f"{name}.self_attention.query_key_value.{theirs}"
            table.append(Rule(qkv, paths, split_heads(c.heads)))
        table += linear(f"{name}.self_attention.dense", f"{b}/attention/out", True)
        table += linear(f"{name}.mlp.dense_h_to_4h", f"{b}/up", True)
        table += linear(f"{name}.mlp.dense_4h_to_h", f"{b}/down", True)
    return table + norm(f"{top}.ln_f", "norm", True) + heads(c)


FAMILY = Family(config=config, rules=rules, prefix="transformer.", ignored=("lm_head.weight",))
