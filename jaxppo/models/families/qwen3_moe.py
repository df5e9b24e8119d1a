"""Qwen3 with experts in some or all layers."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import (
    LLAMA_FILES,
    decoder,
    llama_fields,
    llama_mlp,
    llama_rules,
)
from jaxppo.models.families.mistral import windows_everywhere
from jaxppo.models.tables import Family, Rule, transposed
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Qwen3-MoE `config.json`."""
    count = hf.get("num_experts", hf.get("num_local_experts", 128))
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    layers = range(hf["num_hidden_layers"])
    # max_window_layers is not asked here: transformers gives every layer the window
    windows = windows_everywhere(hf, 4096) if hf.get("use_sliding_window") else {}
    return decoder(
        hf,
        tied=False,
        qk_norm="head",
        experts=count,
        experts_per_token=hf.get("num_experts_per_tok", 8),
        expert_width=hf.get("moe_intermediate_size", 768),
        normalize_experts=bool(hf.get("norm_topk_prob", False)),
        expert_layers=tuple(i for i in layers if count and i not in dense and (i + 1) % step == 0),
        **llama_fields({"num_key_value_heads": 4, **hf}),
        **windows,
    )


def mlp(c: DecoderConfig, name: str, block: str, layer: int) -> list[Rule]:
    """Router and experts of one layer, or its MLP."""
    if layer not in c.expert_layers:
        return llama_mlp(c, name, block, layer)
    ours = f"{block}/experts"
    return [Rule(f"{name}.mlp.gate.weight", (f"{ours}/router",), transposed)] + [
        Rule(f"{name}.mlp.experts.{e}.{p}_proj.weight", (f"{ours}/{p}",), transposed, index=e)
        for e in range(c.experts)
        for p in ("gate", "up", "down")
    ]


def rules(c: DecoderConfig) -> list[Rule]:
    """The tensors of a Qwen3-MoE checkpoint."""
    return llama_rules(c, mlp=mlp)


FAMILY = Family(config=config, rules=rules, **LLAMA_FILES)
