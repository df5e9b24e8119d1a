"""GGUF files, the format of llama.cpp: config, tensors and tokenizer out of one file.

Quantised tensors are read by the `gguf` package and become ordinary floats, one at a time.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxppo.models.folders import ModelError

ARCHITECTURES = {  # general.architecture: (model_type, class, whether q and k rows are permuted)
    "llama": ("llama", "LlamaForCausalLM", True),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", False),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", False),
}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL = 3  # a token type: never the text that it looks like


def read_gguf(file: Path) -> tuple[dict[str, Any], Iterator[tuple[str, np.ndarray]], Any]:
    """Opens a GGUF file of a Llama, Mistral or Qwen model.

    Returns:
      `(config, tensors, tokenizer)`: what a `config.json` would hold; an iterator of float32
      tensors under their Hugging Face names; a `transformers` tokenizer, or None where the file's
      kind of tokenizer is not supported (byte-level BPE is).

    Raises:
      ModelError: the package is missing, or the file is damaged or of another architecture.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError(
            f"reading {file} needs the package gguf: pip install 'jaxppo[gguf]'"
        ) from None
    if not file.is_file():
        raise ModelError(f"{file} does not exist or is not a file")
    try:
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # a torn file fails in numpy in many ways
        raise ModelError(f"{file} can't be read: {error}") from error
    kind = fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"{file} holds the architecture {kind!r}; of GGUF files "
            f"{', '.join(sorted(ARCHITECTURES))} are supported"
        )
    names = {tensor.name for tensor in reader.tensors}
    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in names:
        raise ModelError(
            f"{file} scales its rotary positions ({scaling}), which is not supported for GGUF: "
            "load the safetensors of this model"
        )
    try:
        config = _config(kind, fields, tied="output.weight" not in names)
    except KeyError as missing:
        raise ModelError(f"{file} lacks the field {missing}") from None
    return config, _tensors(file, reader, config, ARCHITECTURES[kind][2]), _tokenizer(fields)


def _config(kind: str, fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    model_type, architecture, _ = ARCHITECTURES[kind]
    heads = fields[f"{kind}.attention.head_count"]
    config = {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields[f"{kind}.embedding_length"],
        "intermediate_size": fields[f"{kind}.feed_forward_length"],
        "num_hidden_layers": fields[f"{kind}.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get(f"{kind}.attention.head_count_kv", heads),
        "head_dim": fields.get(
            f"{kind}.attention.key_length", fields[f"{kind}.embedding_length"] // heads
        ),
        "max_position_embeddings": fields[f"{kind}.context_length"],
        "rms_norm_eps": float(fields[f"{kind}.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(fields.get(f"{kind}.rope.freq_base", 10000.0)),
        "tie_word_embeddings": tied,
    }
    for name in ("bos", "eos"):
        if (token := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name}_token_id"] = int(token)
    return config


def _tensors(file, reader, config, permuted: bool) -> Iterator[tuple[str, np.ndarray]]:
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        layer, part, kind = re.fullmatch(
            r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", tensor.name
        ).groups()  # fmt: skip
        if part not in _NAMES:
            yield tensor.name, np.zeros(0)  # is named among what is not used
            continue
        try:
            x = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(f"{tensor.name} in {file} can't be dequantised: {error}") from None
        x = x.reshape([int(n) for n in reversed(tensor.shape)])
        if permuted and part in ("attn_q", "attn_k"):
            # llama.cpp pairs neighbours to rotate them; Hugging Face pairs the halves of a head
            count = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            x = x.reshape(count, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        before = "" if layer is None else f"model.layers.{layer}."
        yield f"{before}{_NAMES[part]}.{kind}", x


def _tokenizer(fields: Mapping[str, Any]):
    """A byte-level BPE tokenizer; None for other kinds and unknown ways to cut words."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def bytes_of(regex=True):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)

    def cut(pattern):
        return [pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_of(False)]

    steps = {
        "default": [bytes_of()],
        "gpt-2": [bytes_of()],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), bytes_of()],
        "llama-bpe": cut(_LLAMA3),
        "qwen2": cut(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")),
    }.get(fields.get("tokenizer.ggml.pre", "default"))
    if fields.get("tokenizer.ggml.model") != "gpt2" or steps is None:
        return None
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type", [])
    special = [t for t, kind in zip(tokens, kinds) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    names = {}
    for name in ("bos", "eos", "unknown", "padding"):
        if (i := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            short = {"unknown": "unk", "padding": "pad"}.get(name, name)
            names[f"{short}_token"] = tokens[int(i)]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.chat_template = fields.get("tokenizer.chat_template")
    return wrapped
