"""SmolLM3: Llama with some layers that know no positions."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import (
    LLAMA_FILES,
    decoder,
    llama_fields,
    llama_rules,
    window_fields,
)
from jaxppo.models.tables import Family
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a SmolLM3 `config.json`."""
    layers, every = range(hf["num_hidden_layers"]), hf.get("no_rope_layer_interval", 4)
    # despite its name, the list holds true for the layers that are rotated
    rotated = hf.get("no_rope_layers") or [(i + 1) % every != 0 for i in layers]
    fields = llama_fields({"num_key_value_heads": 4, **hf}, theta=2e6)
    fields |= {
        "ropes": tuple(r if on else None for r, on in zip(fields["ropes"], rotated)),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
    }
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    windows = window_fields(hf, [not on for on in rotated][: len(layers)], window)
    return decoder(hf, tied=True, **fields, **windows)


FAMILY = Family(config=config, rules=llama_rules, **LLAMA_FILES)
