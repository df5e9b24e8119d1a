"""GPT-2: learned positions, pre-norm blocks, tied output projection."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import decoder, heads, norm
from jaxppo.models.tables import Family, Rule, split
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a GPT-2 `config.json`."""
    return decoder(
        hf,
        tied=True,
        neutral={"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True},
        width=hf["n_embd"],
        layers=hf["n_layer"],
        heads=hf["n_head"],
        mlp_width=hf.get("n_inner") or 4 * hf["n_embd"],
        max_positions=hf.get("n_positions") or hf["n_ctx"],
        activation=hf.get("activation_function", "gelu_new"),
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
    )


def conv(name: str, path: str) -> list[Rule]:
    """A linear layer that is stored `[in, out]`, as ours are."""
    return [Rule(f"{name}.weight", (f"{path}/kernel",)), Rule(f"{name}.bias", (f"{path}/bias",))]


def rules(c: DecoderConfig) -> list[Rule]:
    """The tensors of a GPT-2 checkpoint."""
    table = [
        Rule("transformer.wte.weight", ("tokens",)),
        Rule("transformer.wpe.weight", ("positions",)),
    ]
    for i in range(c.layers):
        h, b = f"transformer.h.{i}", f"block_{i}"
        parts = [f"{b}/attention/{part}" for part in ("query", "key", "value")]
        table += [
            Rule(f"{h}.attn.c_attn.{hf}", tuple(f"{part}/{ours}" for part in parts), split(3))
            for hf, ours in (("weight", "kernel"), ("bias", "bias"))
        ]
        table += norm(f"{h}.ln_1", f"{b}/norm_1", True) + norm(f"{h}.ln_2", f"{b}/norm_2", True)
        table += conv(f"{h}.attn.c_proj", f"{b}/attention/out")
        table += conv(f"{h}.mlp.c_fc", f"{b}/up") + conv(f"{h}.mlp.c_proj", f"{b}/down")
    return table + norm("transformer.ln_f", "norm", True) + heads(c)


FAMILY = Family(
    config=config,
    rules=rules,
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias", "lm_head.weight"),
)
