"""What family tables share: reading configs of both generations, refusing, common tensor names.

`transformers` 5 writes some options under other names than 4 did; tables read both.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from jaxppo.models.layers import ACTIVATIONS
from jaxppo.models.rope import Rope, make_rope
from jaxppo.models.tables import Rule, transposed
from jaxppo.models.transformer import DecoderConfig

# options of every family that would change the numbers, and the values with which they don't
NEUTRAL = {
    "quantization_config": None,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "use_bidirectional_attention": False,
    "pruned_heads": {},
}

_ACTIVATION_KEYS = ("activation_function", "hidden_act", "hidden_activation")
_ORIGINAL = "original_max_position_embeddings"


def decoder(
    hf: Mapping[str, Any],
    *,
    tied: bool,
    neutral: Mapping[str, Any] | None = None,
    activation: str,
    width: int,
    heads: int,
    **fields,
) -> DecoderConfig:
    """Builds a config out of a family's `fields` and what all families have in common.

    Args:
      hf: the contents of `config.json`.
      tied: whether the family ties its output projection where the config says nothing.
      neutral: options that are not supported, with the value that changes nothing. Absent and
        null count as that value.
      activation, width, heads, fields: of `DecoderConfig`.

    Raises:
      ValueError: options that are not supported; all of them are named.
    """
    kind = hf["model_type"]
    refused = [
        f"{key}={hf[key]}"
        for key, value in {**NEUTRAL, **(neutral or {})}.items()
        if hf.get(key) is not None and hf[key] != value
    ]
    if activation not in ACTIVATIONS:
        name = next((key for key in _ACTIVATION_KEYS if hf.get(key) == activation), "activation")
        refused.append(f"{name}={activation}")
    if refused:
        raise ValueError(f"this {kind} checkpoint asks for {', '.join(refused)}: not supported")
    if not fields.get("head_dim") and width % heads:
        raise ValueError(f"a width of {width} is not a multiple of {heads} heads")
    kv_heads = fields.get("kv_heads") or heads
    if heads % kv_heads:
        raise ValueError(f"{heads} heads of queries are not a multiple of {kv_heads} of keys")
    classifier = any("SequenceClassification" in name for name in hf.get("architectures") or ())
    tie = hf.get("tie_word_embeddings")
    return DecoderConfig(
        **{
            "vocab_size": hf["vocab_size"],
            "width": width,
            "heads": heads,
            "activation": activation,
            "initializer_range": hf.get("initializer_range", 0.02),
            "num_labels": num_labels(hf) if classifier else 0,
            "pad_id": hf.get("pad_token_id"),
            "tied": tied if tie is None else tie,
            **fields,
        }
    )


def encoder(hf: Mapping[str, Any], **fields) -> DecoderConfig:
    """The same for a classifier in which every token sees every other; arguments of `decoder`.

    Raises:
      ValueError: options that are not supported, and models without a classifier's head.
    """
    c = decoder(
        hf,
        tied=False,
        causal=False,
        norm_place="last",
        final_norm=False,
        embedding_norm=True,
        **fields,
    )
    if not c.num_labels:
        raise ValueError(
            f"of {hf['model_type']} only ForSequenceClassification is supported, not "
            f"{', '.join(hf.get('architectures') or ['a bare encoder'])}"
        )
    # the checkpoint ties what only its language modelling head would use
    return replace(c, tied=False)


def num_labels(hf: Mapping[str, Any]) -> int:
    """The outputs of a classifier: 2 where the config says nothing, as in `transformers`."""
    return hf.get("num_labels") or len(hf.get("id2label") or {0: "", 1: ""})


def rope(
    hf: Mapping[str, Any], size: int, *, theta: float = 10_000.0, partial: float | None = None
) -> tuple[Rope, int]:
    """Reads the rotation of a config in the spelling of `transformers` 4 or 5.

    Args:
      hf: the contents of `config.json`.
      size: entries of a head.
      theta: the base where the config says nothing.
      partial: the part of a head that is rotated where the config says nothing; None: families
        whose heads can only be rotated as a whole.

    Returns:
      The rotation and the number of positions it holds for.

    Raises:
      ValueError: a kind of scaling that is not supported, by name.
    """
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    given = {key: value for key, value in scaling.items() if value is not None}
    named = hf.get("partial_rotary_factor")
    part = given.get("partial_rotary_factor", partial if named is None else named) or 1.0
    if partial is None and part != 1.0:
        raise ValueError(f"partial_rotary_factor={part} is not supported for {hf['model_type']}")
    original = hf.get(_ORIGINAL)
    if original is not None and given.get("rope_type", given.get("type")) in _SCALED_FROM_ORIGINAL:
        given[_ORIGINAL] = original
    theta = given.get("rope_theta", hf.get("rope_theta") or theta)
    return make_rope(int(size * part), theta, hf["max_position_embeddings"], given)


_SCALED_FROM_ORIGINAL = ("llama3", "yarn", "longrope")


def llama_fields(hf: Mapping[str, Any], *, head_dim: int | None = None, eps=1e-6, **rotary) -> dict:
    """Fields of `decoder` under the names that Llama and its many descendants give them."""
    layers, heads, width = hf["num_hidden_layers"], hf["num_attention_heads"], hf["hidden_size"]
    head_dim = hf.get("head_dim") or head_dim or width // heads
    rotation, limit = rope(hf, head_dim, **rotary)
    bias = bool(hf.get("attention_bias", False))
    return {
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "mlp_width": hf["intermediate_size"],
        "max_positions": limit,
        "activation": hf.get("hidden_act") or "silu",
        "norm_eps": hf.get("rms_norm_eps", eps),
        "norm": "rms",
        "gated": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": False,
        "learned_positions": False,
        "ropes": (rotation,) * layers,
    }


def window_fields(hf: Mapping[str, Any], sliding: Iterable[bool], window: int | None) -> dict:
    """The `windows` of `decoder`: of the layers that are `sliding`, or that `layer_types` says are.

    Raises `ValueError` for types of layers other than full and sliding attention.
    """
    kinds = hf.get("layer_types")
    if kinds:
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ValueError(f"layer_types of {', '.join(unknown)} are not supported")
        sliding = [kind == "sliding_attention" for kind in kinds]
    windows = tuple(window if slides else None for slides in sliding)
    return {"windows": windows if any(windows) else ()}


def linear(name: str, path: str, bias: bool) -> list[Rule]:
    """A linear layer that is stored `[out, in]`."""
    rules = [Rule(f"{name}.weight", (f"{path}/kernel",), transposed)]
    return rules + ([Rule(f"{name}.bias", (f"{path}/bias",))] if bias else [])


def norm(name: str, path: str, bias: bool) -> list[Rule]:
    """A norm, with or without a bias."""
    rules = [Rule(f"{name}.weight", (f"{path}/scale",))]
    return rules + ([Rule(f"{name}.bias", (f"{path}/bias",))] if bias else [])


def scores(dense: str, out: str) -> list[Rule]:
    """The head of an encoder: a layer on the first token's state, then the scores."""
    return [
        *linear(dense, "pooler", True),
        Rule(f"{out}.weight", ("score",), transposed),
        Rule(f"{out}.bias", ("score_bias",)),
    ]


def heads(c: DecoderConfig, head: str = "lm_head") -> list[Rule]:
    """The score head of a classifier, or the output projection where it is a matrix of its own."""
    if c.num_labels:
        return [Rule("score.weight", ("score",), transposed)]
    rules = [] if c.tied else [Rule(f"{head}.weight", ("head",))]
    return rules + ([Rule(f"{head}.bias", ("head_bias",))] if c.head_bias else [])


NORMS = {"input_layernorm": "norm_1", "post_attention_layernorm": "norm_2"}


def llama_mlp(c: DecoderConfig, name: str, block: str, layer: int) -> list[Rule]:
    """The gated MLP of one layer."""
    return [
        rule
        for part in ("gate", "up", "down")
        for rule in linear(f"{name}.mlp.{part}_proj", f"{block}/{part}", c.mlp_bias)
    ]


def llama_attention(c: DecoderConfig, name: str, block: str) -> list[Rule]:
    """Query, key, value and output projections of one layer, and their norms."""
    name, ours = f"{name}.self_attn", f"{block}/attention"
    rules = linear(f"{name}.o_proj", f"{ours}/out", c.out_bias)
    for part in ("query", "key", "value"):
        rules += linear(f"{name}.{part[0]}_proj", f"{ours}/{part}", c.qkv_bias)
    if c.qk_norm:
        for part in ("query", "key"):
            rules += norm(f"{name}.{part[0]}_norm", f"{ours}/{part}_norm", False)
    return rules


def llama_rules(
    c: DecoderConfig,
    *,
    norms: Mapping[str, str] = NORMS,
    attention: Callable[..., list[Rule]] = llama_attention,
    mlp: Callable[..., list[Rule]] = llama_mlp,
) -> list[Rule]:
    """The tensors of a checkpoint that is laid out as Llama's.

    norms: of a layer, their names there and here; attention, mlp: the rules of those parts.
    """
    table = [Rule("model.embed_tokens.weight", ("tokens",))]
    for i in range(c.layers):
        name, block = f"model.layers.{i}", f"block_{i}"
        table += attention(c, name, block) + mlp(c, name, block, i)
        for theirs, ours in norms.items():
            table += norm(f"{name}.{theirs}", f"{block}/{ours}", False)
    return table + norm("model.norm", "norm", False) + heads(c)


# what base models leave out of tensor names, and tensors that hold nothing of their own
LLAMA_FILES = {"prefix": "model.", "ignored": ("rotary_emb.inv_freq", "lm_head.weight")}
