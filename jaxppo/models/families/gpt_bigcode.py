"""GPTBigCode (SantaCoder, StarCoder): GPT-2 whose queries share one head of keys and values."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import decoder, heads, linear, norm
from jaxppo.models.tables import Family, Rule, split_heads, split_rows
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a GPTBigCode `config.json`."""
    return decoder(
        hf,
        tied=True,
        neutral={"scale_attn_weights": True},
        width=hf["n_embd"],
        layers=hf["n_layer"],
        heads=hf["n_head"],
        kv_heads=1 if hf.get("multi_query", True) else None,
        mlp_width=hf.get("n_inner") or 4 * hf["n_embd"],
        max_positions=hf["n_positions"],
        activation=hf.get("activation_function", "gelu_pytorch_tanh"),
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
    )


def rules(c: DecoderConfig) -> list[Rule]:
    """The tensors of a GPTBigCode checkpoint."""
    table = [
        Rule("transformer.wte.weight", ("tokens",)),
        Rule("transformer.wpe.weight", ("positions",)),
    ]
    sizes = [n * c.head_size for n in (c.heads, c.cache_heads, c.cache_heads)]
    cut = split_heads(c.heads) if c.kv_heads is None else split_rows(sizes)
    for i in range(c.layers):
        h, b = f"transformer.h.{i}", f"block_{i}"
        table += norm(f"{h}.ln_1", f"{b}/norm_1", True) + norm(f"{h}.ln_2", f"{b}/norm_2", True)
        for theirs, ours in {"weight": "kernel", "bias": "bias"}.items():
            paths = tuple(f"{b}/attention/{part}/{ours}" for part in ("query", "key", "value"))
            table.append(Rule(f"{h}.attn.c_attn.{theirs}", paths, cut))
        table += linear(f"{h}.attn.c_proj", f"{b}/attention/out", True)
        table += linear(f"{h}.mlp.c_fc", f"{b}/up", True)
        table += linear(f"{h}.mlp.c_proj", f"{b}/down", True)
    return table + norm("transformer.ln_f", "norm", True) + heads(c)


FAMILY = Family(
    config=config,
    rules=rules,
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias", "lm_head.weight"),
)
