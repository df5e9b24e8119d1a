"""Tiny models and tokenizers for the tests of models and sampling."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxppo import create_model

GOLDEN_MODELS = pathlib.Path(__file__).parent / "golden" / "models"


def tiny_config(vocab=37, width=16, layers=2, heads=2, positions=64, **others) -> dict:
    """The contents of a GPT-2 `config.json`."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": vocab,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        **others,
    }


def random_params(model, seed=0, dtype=jnp.float32):
    """Weights so large that every part of the model shows in the result, biases and norms too."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0))

    def leaf(path, shape):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(centre + 0.4 * rng.normal(size=shape.shape), dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def tiny_model(seed=0, dtype=jnp.float32, **sizes):
    """A random GPT-2 and its parameters; `sizes` and further options as in `tiny_config`."""
    model = create_model(tiny_config(**sizes))
    return model, random_params(model, seed, dtype)


def hidden_byte_characters() -> dict[int, str]:
    """The character that byte-level BPE writes for each byte (as GPT-2's code makes them)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters, extra = {}, 0
    for byte in range(256):
        if byte in kept:
            characters[byte] = chr(byte)
        else:
            characters[byte] = chr(256 + extra)
            extra += 1
    return characters


def byte_level_tokenizer(pieces: list[bytes], added: tuple[str, ...] = ()):
    """A byte-level BPE tokenizer whose token `i` writes `pieces[i]`; `<eos>` comes after them.

    `added` are ordinary added tokens, after `<eos>`. It only decodes: there are no merges.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = hidden_byte_characters()
    vocabulary = {"".join(characters[b] for b in piece): i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in added])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def byte_fallback_tokenizer(words: list[str]):
    """A Llama-like tokenizer: 256 byte tokens, the words (`\\u2581` is a space), then `<eos>`."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<0x{b:02X}>": b for b in range(256)}
    vocabulary |= {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
