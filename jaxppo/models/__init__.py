"""Models: one decoder behind a bundle of pure functions, heads, Hugging Face in and out."""

from jaxppo.models.bundle import Model, build_model, with_options
from jaxppo.models.export import save_pretrained
from jaxppo.models.folders import ModelError
from jaxppo.models.heads import apply_value_head, init_value_head
from jaxppo.models.loading import create_model, eos_ids, load_pretrained, load_tokenizer
from jaxppo.models.lora import add_lora, merge_lora
from jaxppo.models.partition import init_sharded, param_shardings
from jaxppo.models.peft import load_adapter, save_adapter
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
    "init_sharded",
    "init_value_head",
    "load_adapter",
    "load_pretrained",
    "load_tokenizer",
    "merge",
    "merge_lora",
    "param_shardings",
    "save_adapter",
    "save_pretrained",
    "split",
    "with_options",
]
