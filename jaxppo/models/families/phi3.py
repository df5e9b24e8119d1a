"""Phi-3 and Phi-4-mini: Llama with fused projections, and longrope."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import LLAMA_FILES, decoder, linear, llama_fields, llama_rules
from jaxppo.models.families.mistral import windows_everywhere
from jaxppo.models.tables import Family, Rule, split_rows
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Phi-3 `config.json`."""
    scaling = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    if scaling.get("rope_type", scaling.get("type")) in ("su", "yarn"):  # names of longrope once
        scaling["rope_type"] = "longrope"
    renamed = {"original_max_position_embeddings": 4096, **hf, "rope_scaling": scaling}
    fields = llama_fields(renamed, eps=1e-5, partial=1.0)
    fields |= {"qkv_bias": False, "out_bias": False}
    return decoder(hf, tied=False, **fields, **windows_everywhere(hf))


def attention(c: DecoderConfig, name: str, block: str) -> list[Rule]:
    """Queries, keys and values lie behind each other in one matrix."""
    ours = f"{block}/attention"
    sizes = [n * c.head_size for n in (c.heads, c.cache_heads, c.cache_heads)]
    paths = tuple(f"{ours}/{part}/kernel" for part in ("query", "key", "value"))
    return [
        Rule(f"{name}.self_attn.qkv_proj.weight", paths, split_rows(sizes)),
        *linear(f"{name}.self_attn.o_proj", f"{ours}/out", False),
    ]


def mlp(c: DecoderConfig, name: str, block: str, layer: int) -> list[Rule]:
    """So do gate and up."""
    paths = (f"{block}/gate/kernel", f"{block}/up/kernel")
    fused = Rule(f"{name}.mlp.gate_up_proj.weight", paths, split_rows([c.mlp_width] * 2))
    return [fused, *linear(f"{name}.mlp.down_proj", f"{block}/down", False)]


def rules(c: DecoderConfig) -> list[Rule]:
    """The tensors of a Phi-3 checkpoint."""
    return llama_rules(c, attention=attention, mlp=mlp)


FAMILY = Family(config=config, rules=rules, **LLAMA_FILES)
