"""Model families: for each `model_type`, how its config and tensors map to the one decoder."""

from jaxppo.models.families import (
    bert,
    bloom,
    distilbert,
    gemma,
    gemma2,
    gemma3_text,
    gpt2,
    gpt_bigcode,
    gpt_neo,
    gpt_neox,
    gptj,
    llama,
    mistral,
    mixtral,
    olmo2,
    opt,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    roberta,
    smollm3,
)
from jaxppo.models.tables import Family

_MODULES = (
    bert, bloom, distilbert, gemma, gemma2, gemma3_text, gpt2, gpt_bigcode, gpt_neo, gpt_neox, gptj,
    llama, mistral, mixtral, olmo2, opt, phi3, qwen2, qwen3, qwen3_moe, roberta, smollm3,
)  # fmt: skip

# a module is named as the `model_type` that it reads
FAMILIES: dict[str, Family] = {
    module.__name__.rsplit(".", 1)[1]: module.FAMILY for module in _MODULES
}
