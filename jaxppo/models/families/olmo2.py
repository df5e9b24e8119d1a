"""OLMo 2: Llama with norms behind attention and MLP, and on whole queries and keys."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import LLAMA_FILES, decoder, llama_fields, llama_rules
from jaxppo.models.tables import Family, Rule
from jaxppo.models.transformer import DecoderConfig

NORMS = {
    "post_attention_layernorm": "norm_1_behind",
    "post_feedforward_layernorm": "norm_2_behind",
}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads an OLMo 2 `config.json`."""
    fields = llama_fields(hf, eps=1e-5)
    return decoder(hf, tied=False, norm_place="behind", qk_norm="whole", **fields)


def rules(c: DecoderConfig) -> list[Rule]:
    """The tensors of an OLMo 2 checkpoint."""
    return llama_rules(c, norms=NORMS)


FAMILY = Family(config=config, rules=rules, **LLAMA_FILES)
