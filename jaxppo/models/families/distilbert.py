"""DistilBERT as a classifier: BERT without token types, and a ReLU before the scores."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import encoder, linear, norm, scores
from jaxppo.models.tables import Family, Rule
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a DistilBERT `config.json`."""
    return encoder(
        hf,
        neutral={},
        width=hf["dim"],
        layers=hf["n_layers"],
        heads=hf["n_heads"],
        mlp_width=hf["hidden_dim"],
        max_positions=hf["max_position_embeddings"],
        activation=hf.get("activation", "gelu"),
        norm_eps=1e-12,
        pooler="relu",
    )


def rules(c: DecoderConfig) -> list[Rule]:
    """The tensors of a DistilBERT checkpoint."""
    top = "distilbert.embeddings"
    table = [
        Rule(f"{top}.word_embeddings.weight", ("tokens",)),
        Rule(f"{top}.position_embeddings.weight", ("positions",)),
        *norm(f"{top}.LayerNorm", "embedding_norm", True),
    ]
    for i in range(c.layers):
        name, b = f"distilbert.transformer.layer.{i}", f"block_{i}"
        for part in ("query", "key", "value", "out"):
            short = part if part == "out" else part[0]
            table += linear(f"{name}.attention.{short}_lin", f"{b}/attention/{part}", True)
        table += norm(f"{name}.sa_layer_norm", f"{b}/norm_1", True)
        table += linear(f"{name}.ffn.lin1", f"{b}/up", True)
        table += linear(f"{name}.ffn.lin2", f"{b}/down", True)
        table += norm(f"{name}.output_layer_norm", f"{b}/norm_2", True)
    return table + scores("pre_classifier", "classifier")


FAMILY = Family(config=config, rules=rules, prefix="distilbert.", ignored=(".position_ids",))
