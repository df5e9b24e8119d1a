"""Mixtral: Mistral with experts instead of MLPs."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import LLAMA_FILES, decoder, llama_fields, llama_rules
from jaxppo.models.families.mistral import windows_everywhere
from jaxppo.models.tables import Family, Rule, transposed
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Mixtral `config.json`."""
    fields = llama_fields({"num_key_value_heads": 8, **hf}, theta=1e6, eps=1e-5)
    return decoder(
        hf,
        tied=False,
        experts=hf.get("num_local_experts", 8),
        experts_per_token=hf.get("num_experts_per_tok", 2),
        expert_width=hf["intermediate_size"],
        expert_layers=tuple(range(hf["num_hidden_layers"])),
        **fields | {"qkv_bias": False, "out_bias": False},
        **windows_everywhere(hf),
    )


def experts(c: DecoderConfig, name: str, block: str, layer: int) -> list[Rule]:
    """Router and experts of one layer."""
    moe, ours = f"{name}.block_sparse_moe", f"{block}/experts"
    parts = {"w1": "gate", "w2": "down", "w3": "up"}
    return [Rule(f"{moe}.gate.weight", (f"{ours}/router",), transposed)] + [
        Rule(f"{moe}.experts.{e}.{theirs}.weight", (f"{ours}/{part}",), transposed, index=e)
        for e in range(c.experts)
        for theirs, part in parts.items()
    ]


def rules(c: DecoderConfig) -> list[Rule]:
    """The tensors of a Mixtral checkpoint."""
    return llama_rules(c, mlp=experts)


FAMILY = Family(config=config, rules=rules, **LLAMA_FILES)
