"""BERT as a classifier: every token sees every other, norms behind the residual, a pooled head."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import encoder, linear, norm, scores
from jaxppo.models.tables import Family, Rule
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a BERT `config.json`."""
    return encoder(
        hf,
        neutral={"position_embedding_type": "absolute", "is_decoder": False},
        width=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        heads=hf["num_attention_heads"],
        mlp_width=hf["intermediate_size"],
        max_positions=hf["max_position_embeddings"],
        activation=hf.get("hidden_act", "gelu"),
        norm_eps=hf.get("layer_norm_eps", 1e-12),
        token_types=hf.get("type_vocab_size", 2),
        pooler="tanh",
    )


def rules(c: DecoderConfig, top: str = "bert") -> list[Rule]:
    """The tensors of a BERT checkpoint."""
    table = [
        Rule(f"{top}.embeddings.{theirs}_embeddings.weight", (ours,))
        for theirs, ours in (
            ("word", "tokens"), ("position", "positions"), ("token_type", "token_types"),
        )
    ]  # fmt: skip
    table += norm(f"{top}.embeddings.LayerNorm", "embedding_norm", True)
    for i in range(c.layers):
        name, b = f"{top}.encoder.layer.{i}", f"block_{i}"
        for part in ("query", "key", "value"):
            table += linear(f"{name}.attention.self.{part}", f"{b}/attention/{part}", True)
        table += linear(f"{name}.attention.output.dense", f"{b}/attention/out", True)
        table += norm(f"{name}.attention.output.LayerNorm", f"{b}/norm_1", True)
        table += linear(f"{name}.intermediate.dense", f"{b}/up", True)
        table += linear(f"{name}.output.dense", f"{b}/down", True)
        table += norm(f"{name}.output.LayerNorm", f"{b}/norm_2", True)
    if top == "bert":
        table += scores("bert.pooler.dense", "classifier")
    return table


FAMILY = Family(config=config, rules=rules, prefix="bert.", ignored=(".position_ids",))
