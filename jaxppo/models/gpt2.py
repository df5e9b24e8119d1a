"""GPT-2: learned positions, pre-norm blocks, tied output projection."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.tables import Family, Rule, split, transposed
from jaxppo.models.transformer import ACTIVATIONS, DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a GPT-2 `config.json`; refuses options that would change the numbers."""
    unsupported = [
        f"{key}={hf[key]}"
        for key, neutral in {
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
            "scale_attn_weights": True,
            "tie_word_embeddings": True,
        }.items()
        if hf.get(key, neutral) is not neutral
    ]
    activation = hf.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        unsupported.append(f"activation_function={activation}")
    if hf["n_embd"] % hf["n_head"]:
        raise ValueError(f"n_embd={hf['n_embd']} is not a multiple of n_head={hf['n_head']}")
    if unsupported:
        raise ValueError(f"this GPT-2 checkpoint asks for {', '.join(unsupported)}: not supported")
    classifier = any("SequenceClassification" in name for name in hf.get("architectures") or ())
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        width=hf["n_embd"],
        layers=hf["n_layer"],
        heads=hf["n_head"],
        mlp_width=hf.get("n_inner") or 4 * hf["n_embd"],
        max_positions=hf.get("n_positions") or hf["n_ctx"],
        activation=activation,
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        initializer_range=hf.get("initializer_range", 0.02),
        num_labels=_num_labels(hf) if classifier else 0,
        pad_id=hf.get("pad_token_id"),
    )


def _num_labels(hf: Mapping[str, Any]) -> int:
    return hf.get("num_labels") or len(hf.get("id2label") or {0: "", 1: ""})


def rules(c: DecoderConfig) -> list[Rule]:
    """The tensors of a GPT-2 checkpoint. Its linear layers are stored `[in, out]`, as ours."""
    table = [
        Rule("transformer.wte.weight", ("tokens",)),
        Rule("transformer.wpe.weight", ("positions",)),
    ]

    def pair(name, path):
        return [
            Rule(f"{name}.weight", (f"{path}/kernel",)),
            Rule(f"{name}.bias", (f"{path}/bias",)),
        ]

    def norm(name, path):
        return [
            Rule(f"{name}.weight", (f"{path}/scale",)),
            Rule(f"{name}.bias", (f"{path}/bias",)),
        ]

    for i in range(c.layers):
        h, b = f"transformer.h.{i}", f"block_{i}"
        heads = [f"{b}/attention/{part}" for part in ("query", "key", "value")]
        table += norm(f"{h}.ln_1", f"{b}/norm_1")
        table += [
            Rule(f"{h}.attn.c_attn.{hf}", tuple(f"{head}/{ours}" for head in heads), split(3))
            for hf, ours in (("weight", "kernel"), ("bias", "bias"))
        ]
        table += pair(f"{h}.attn.c_proj", f"{b}/attention/out")
        table += norm(f"{h}.ln_2", f"{b}/norm_2")
        table += pair(f"{h}.mlp.c_fc", f"{b}/up") + pair(f"{h}.mlp.c_proj", f"{b}/down")
    table += norm("transformer.ln_f", "norm")
    if c.num_labels:
        table.append(Rule("score.weight", ("score",), transposed))
    return table


FAMILY = Family(
    config=config,
    rules=rules,
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias", "lm_head.weight"),
)
