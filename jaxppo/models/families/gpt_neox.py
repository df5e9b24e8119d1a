"""GPT-NeoX and Pythia: parallel or sequential residual, part of each head rotated."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import decoder, heads, linear, norm, rope
from jaxppo.models.tables import Family, Rule, split_heads
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a GPT-NeoX `config.json`."""
    size = hf["hidden_size"] // hf["num_attention_heads"]
    theta, part = hf.get("rotary_emb_base", 10_000), hf.get("rotary_pct", 0.25)
    rotation, limit = rope(hf, size, theta=theta, partial=part)
    bias = bool(hf.get("attention_bias", True))
    return decoder(
        hf,
        tied=False,
        width=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        heads=hf["num_attention_heads"],
        mlp_width=hf["intermediate_size"],
        max_positions=limit,
        activation=hf.get("hidden_act", "gelu"),
        norm_eps=hf.get("layer_norm_eps", 1e-5),
        qkv_bias=bias,
        out_bias=bias,
        residual="parallel" if hf.get("use_parallel_residual", True) else "sequential",
        learned_positions=False,
        ropes=(rotation,) * hf["num_hidden_layers"],
    )


def rules(c: DecoderConfig) -> list[Rule]:
    """The tensors of a GPT-NeoX checkpoint."""
    table = [Rule("gpt_neox.embed_in.weight", ("tokens",))]
    fused = {"weight": "kernel", "bias": "bias"} if c.qkv_bias else {"weight": "kernel"}
    for i in range(c.layers):
        name, b = f"gpt_neox.layers.{i}", f"block_{i}"
        table += norm(f"{name}.input_layernorm", f"{b}/norm_1", True)
        table += norm(f"{name}.post_attention_layernorm", f"{b}/norm_2", True)
        for theirs, ours in fused.items():
            paths = tuple(f"{b}/attention/{part}/{ours}" for part in ("query", "key", "value"))
            qkv = f"{name}.attention.query_key_value.{theirs}"
            table.append(Rule(qkv, paths, split_heads(c.heads)))
        table += linear(f"{name}.attention.dense", f"{b}/attention/out", c.out_bias)
        table += linear(f"{name}.mlp.dense_h_to_4h", f"{b}/up", True)
        table += linear(f"{name}.mlp.dense_4h_to_h", f"{b}/down", True)
    return table + norm("gpt_neox.final_layer_norm", "norm", True) + heads(c, "embed_out")


FAMILY = Family(
    config=config,
    rules=rules,
    prefix="gpt_neox.",
    ignored=(
        ".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq", "embed_out.weight",
    ),
)  # fmt: skip
