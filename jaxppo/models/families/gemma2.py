"""Gemma 2: soft-caps, norms on both sides of attention and MLP, a window on every second layer."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import (
    LLAMA_FILES,
    decoder,
    llama_fields,
    llama_rules,
    window_fields,
)
from jaxppo.models.families.gemma import gemma_fields
from jaxppo.models.tables import Family, Rule
from jaxppo.models.transformer import DecoderConfig

NORMS = {
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_1_behind",
    "pre_feedforward_layernorm": "norm_2",
    "post_feedforward_layernorm": "norm_2_behind",
}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Gemma 2 `config.json`."""
    fields = llama_fields({"num_key_value_heads": 4, **hf}, head_dim=256) | gemma_fields(hf)
    sliding = [i % 2 == 0 for i in range(hf["num_hidden_layers"])]
    return decoder(
        hf,
        tied=True,
        norm_place="both",
        attention_scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=hf.get("attn_logit_softcapping", 50.0),
        logit_softcap=hf.get("final_logit_softcapping", 30.0),
        **fields,
        **window_fields(hf, sliding, hf.get("sliding_window", 4096)),
    )


def rules(c: DecoderConfig) -> list[Rule]:
    """The tensors of a Gemma 2 or 3 checkpoint."""
    return llama_rules(c, norms=NORMS)


FAMILY = Family(config=config, rules=rules, **LLAMA_FILES)
