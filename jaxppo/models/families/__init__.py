"""Model families: for each `model_type`, how its config and tensors map to the one decoder."""

from jaxppo.models.families import gpt2, llama, qwen2
from jaxppo.models.tables import Family

FAMILIES: dict[str, Family] = {
    module.__name__.rsplit(".", 1)[1]: module.FAMILY for module in (gpt2, llama, qwen2)
}
