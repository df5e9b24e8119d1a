"""Models: one decoder behind a bundle of pure functions, heads, Hugging Face in and out."""

from jaxppo.models.bundle import Model, build_model, with_options
from jaxppo.models.heads import apply_value_head, init_value_head
from jaxppo.models.huggingface import (
    ModelError,
    create_model,
    eos_ids,
    load_pretrained,
    load_tokenizer,
    save_pretrained,
)
from jaxppo.models.lora import add_lora, merge_lora
from jaxppo.models.trainable import merge, split
from jaxppo.models.transformer import DecoderConfig, KVCache

__all__ = [
    "DecoderConfig",
    "KVCache",
    "Model",
    "ModelError",
    "add_lora",
    "apply_value_head",
    "build_model",
    "create_model",
    "eos_ids",
    "init_value_head",
    "load_pretrained",
    "load_tokenizer",
    "merge",
    "merge_lora",
    "save_pretrained",
    "split",
    "with_options",
]
