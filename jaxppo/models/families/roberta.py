"""RoBERTa as a classifier: BERT with positions from 2 on and a head of its own."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families import bert
from jaxppo.models.families.common import encoder, scores
from jaxppo.models.tables import Family, Rule
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a RoBERTa `config.json`. Positions begin behind the padding id."""
    offset = hf.get("pad_token_id", 1) + 1
    return encoder(
        hf,
        neutral={"position_embedding_type": "absolute", "is_decoder": False},
        width=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        heads=hf["num_attention_heads"],
        mlp_width=hf["intermediate_size"],
        max_positions=hf["max_position_embeddings"] - offset,
        position_offset=offset,
        activation=hf.get("hidden_act", "gelu"),
        norm_eps=hf.get("layer_norm_eps", 1e-12),
        token_types=hf.get("type_vocab_size", 2),
        pooler="tanh",
    )


def rules(c: DecoderConfig) -> list[Rule]:
    """The tensors of a RoBERTa checkpoint."""
    return bert.rules(c, "roberta") + scores("classifier.dense", "classifier.out_proj")


FAMILY = Family(
    config=config,
    rules=rules,
    prefix="roberta.",
    ignored=(".position_ids", "roberta.pooler.dense.weight", "roberta.pooler.dense.bias"),
)
