"""Gemma 3, text only: norms on query and key heads; local layers have a rotation of their own."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import (
    LLAMA_FILES,
    decoder,
    llama_fields,
    rope,
    window_fields,
)
from jaxppo.models.families.gemma import gemma_fields
from jaxppo.models.families.gemma2 import rules
from jaxppo.models.tables import Family
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Gemma 3 text `config.json`."""
    layers = range(hf["num_hidden_layers"])
    pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    sliding = [bool((i + 1) % pattern) for i in layers]
    windows = window_fields(hf, sliding, hf.get("sliding_window", 4096))
    if hf.get("layer_types"):
        sliding = [kind == "sliding_attention" for kind in hf["layer_types"]]
    # one rotation a kind of layer: nested in transformers 5, under names of their own in 4
    nested, scaling = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    far = {"rope_theta": hf.get("rope_theta") or 1e6, **(nested.get("full_attention") or {})}
    near = {"rope_theta": hf.get("rope_local_base_freq") or 1e4}
    near |= nested.get("sliding_attention") or {}
    far, near = ({**hf, "rope_scaling": p} for p in ({**far, **scaling}, near))
    fields = llama_fields({"num_key_value_heads": 4, **far}, head_dim=256) | gemma_fields(hf)
    local, limit = rope(near, fields["head_dim"])
    fields["ropes"] = tuple(local if s else r for r, s in zip(fields["ropes"], sliding))
    fields["max_positions"] = min(limit, fields["max_positions"])
    return decoder(
        hf,
        tied=True,
        norm_place="both",
        qk_norm="head",
        attention_scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
        logit_softcap=hf.get("final_logit_softcapping"),
        neutral={"attn_logit_softcapping": None},
        **fields,
        **windows,
    )


FAMILY = Family(config=config, rules=rules, **LLAMA_FILES)
