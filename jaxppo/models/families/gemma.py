"""Gemma: Llama with scaled embeddings, norms around one, and large heads."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import LLAMA_FILES, decoder, llama_fields, llama_rules
from jaxppo.models.tables import Family
from jaxppo.models.transformer import DecoderConfig


def gemma_fields(hf: Mapping[str, Any]) -> dict:
    """What all generations of Gemma have in common, the rotation apart."""
    return {
        "norm_offset": 1.0,
        "embedding_scale": hf["hidden_size"] ** 0.5,
        # the first checkpoints say gelu and were trained with the approximation
        "activation": "gelu_pytorch_tanh"
        if (name := hf.get("hidden_activation") or hf.get("hidden_act")) in (None, "gelu")
        else name,
    }


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Gemma `config.json`."""
    return decoder(hf, tied=True, **llama_fields(hf, head_dim=256) | gemma_fields(hf))


FAMILY = Family(config=config, rules=llama_rules, **LLAMA_FILES)
