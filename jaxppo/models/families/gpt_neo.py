"""GPT-Neo: GPT-2 with unscaled attention, windows on some layers and plain matrices."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import decoder, heads, linear, norm
from jaxppo.models.tables import Family, Rule
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a GPT-Neo `config.json`."""
    types = hf.get("attention_types") or [[["global", "local"], 12]]
    kinds = [kind for pattern, times in types for _ in range(times) for kind in pattern]
    unknown = sorted(set(kinds) - {"global", "local"})
    if unknown or len(kinds) != hf["num_layers"]:
        raise ValueError(f"attention_types={types} do not fit {hf['num_layers']} layers")
    window = hf.get("window_size", 256)
    return decoder(
        hf,
        tied=True,
        width=hf["hidden_size"],
        layers=hf["num_layers"],
        heads=hf["num_heads"],
        mlp_width=hf.get("intermediate_size") or 4 * hf["hidden_size"],
        max_positions=hf["max_position_embeddings"],
        activation=hf.get("activation_function", "gelu_new"),
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        qkv_bias=False,
        attention_scale=1.0,
        windows=tuple(window if kind == "local" else None for kind in kinds),
    )


def rules(c: DecoderConfig) -> list[Rule]:
    """The tensors of a GPT-Neo checkpoint."""
    table = [
        Rule("transformer.wte.weight", ("tokens",)),
        Rule("transformer.wpe.weight", ("positions",)),
    ]
    for i in range(c.layers):
        h, b = f"transformer.h.{i}", f"block_{i}"
        table += norm(f"{h}.ln_1", f"{b}/norm_1", True) + norm(f"{h}.ln_2", f"{b}/norm_2", True)
        for part in ("query", "key", "value"):
            name = f"{h}.attn.attention.{part[0]}_proj"
            table += linear(name, f"{b}/attention/{part}", False)
        table += linear(f"{h}.attn.attention.out_proj", f"{b}/attention/out", True)
        table += linear(f"{h}.mlp.c_fc", f"{b}/up", True)
        table += linear(f"{h}.mlp.c_proj", f"{b}/down", True)
    return table + norm("transformer.ln_f", "norm", True) + heads(c)


FAMILY = Family(
    config=config,
    rules=rules,
    prefix="transformer.",
    ignored=("attention.bias", "attention.masked_bias", "lm_head.weight"),
)
