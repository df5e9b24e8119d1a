"""GPT-J: attention and MLP read the same norm; neighbouring entries are rotated."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import decoder, heads, linear, norm
from jaxppo.models.rope import make_rope
from jaxppo.models.tables import Family, Rule
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a GPT-J `config.json`."""
    size = hf.get("rotary_dim", 64)
    if not size:
        raise ValueError(f"rotary_dim={size} is not supported for gptj")
    rotation, limit = make_rope(size, 10_000.0, hf["n_positions"])
    classifier = any("SequenceClassification" in name for name in hf.get("architectures") or ())
    return decoder(
        hf,
        tied=False,
        width=hf["n_embd"],
        layers=hf["n_layer"],
        heads=hf["n_head"],
        mlp_width=hf.get("n_inner") or 4 * hf["n_embd"],
        max_positions=limit,
        activation=hf.get("activation_function", "gelu_new"),
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        qkv_bias=False,
        out_bias=False,
        residual="shared",
        learned_positions=False,
        ropes=(rotation._replace(interleaved=True),) * hf["n_layer"],
        head_bias=not classifier,
    )


def rules(c: DecoderConfig) -> list[Rule]:
    """The tensors of a GPT-J checkpoint."""
    table = [Rule("transformer.wte.weight", ("tokens",))]
    for i in range(c.layers):
        h, b = f"transformer.h.{i}", f"block_{i}"
        table += norm(f"{h}.ln_1", f"{b}/norm_1", True)
        for part in ("query", "key", "value"):
            table += linear(f"{h}.attn.{part[0]}_proj", f"{b}/attention/{part}", False)
        table += linear(f"{h}.attn.out_proj", f"{b}/attention/out", False)
        table += linear(f"{h}.mlp.fc_in", f"{b}/up", True)
        table += linear(f"{h}.mlp.fc_out", f"{b}/down", True)
    return table + norm("transformer.ln_f", "norm", True) + heads(c)


FAMILY = Family(
    config=config,
    rules=rules,
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias", "lm_head.weight", "lm_head.bias"),
)
