"""OPT: GPT-2 with plain matrices; its smallest sibling norms behind, through narrow embeddings."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import decoder, heads, linear, norm
from jaxppo.models.tables import Family, Rule, transposed
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads an OPT `config.json`."""
    before, bias = hf.get("do_layer_norm_before", True), bool(hf.get("enable_bias", True))
    narrow = hf.get("word_embed_proj_dim")
    return decoder(
        {**hf, "initializer_range": hf.get("init_std", 0.02)},
        tied=True,
        neutral={"layer_norm_elementwise_affine": True},
        width=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        heads=hf["num_attention_heads"],
        mlp_width=hf["ffn_dim"],
        max_positions=hf["max_position_embeddings"],
        position_offset=2,
        activation=hf.get("activation_function", "relu"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        norm_place="before" if before else "last",
        final_norm=before and not hf.get("_remove_final_layer_norm", False),
        embedding_width=narrow if narrow != hf["hidden_size"] else None,
    )


def rules(c: DecoderConfig) -> list[Rule]:
    """The tensors of an OPT checkpoint."""
    top = "model.decoder"
    table = [
        Rule(f"{top}.embed_tokens.weight", ("tokens",)),
        Rule(f"{top}.embed_positions.weight", ("positions",)),
    ]
    if c.embedding_width:
        table += [
            Rule(f"{top}.{part}.weight", (part,), transposed)
            for part in ("project_in", "project_out")
        ]
    for i in range(c.layers):
        name, b = f"{top}.layers.{i}", f"block_{i}"
        table += norm(f"{name}.self_attn_layer_norm", f"{b}/norm_1", True)
        table += norm(f"{name}.final_layer_norm", f"{b}/norm_2", True)
        for part in ("query", "key", "value"):
            table += linear(f"{name}.self_attn.{part[0]}_proj", f"{b}/attention/{part}", c.qkv_bias)
        table += linear(f"{name}.self_attn.out_proj", f"{b}/attention/out", c.out_bias)
        table += linear(f"{name}.fc1", f"{b}/up", c.mlp_bias)
        table += linear(f"{name}.fc2", f"{b}/down", c.mlp_bias)
    if c.final_norm:
        table += norm(f"{top}.final_layer_norm", "norm", True)
    return table + heads(c)


FAMILY = Family(config=config, rules=rules, prefix="model.", ignored=("lm_head.weight",))
