"""The policy of a run: which of its leaves are trained, and what its reference and critic are.

Whatever the mode, there is one tree that the update changes, and one that nothing does. The
reference is the frozen tree with the trained leaves as they began (with adapters: without them), so
it costs no second copy of what is frozen.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxppo.config import ConfigError, row
from jaxppo.models import (
    Model,
    ModelError,
    add_lora,
    init_value_head,
    load_pretrained,
    merge,
    merge_lora,
    split,
    with_options,
)
from jaxppo.models.trainable import adapters, first_trained_block, top_layers, without_heads


class Policy(NamedTuple):
    """Trees and architectures of a run; the parameters in use are `merge(trained, frozen)`.

    model: the architecture, with adapters' scale and compute dtype.
    critic: that of a separate critic, None without one.
    trained: what the update changes, as it is at the start. Buffers of its own.
    frozen: what nothing changes.
    initial: the language model's trained leaves at the start; `merge(initial, frozen)` is the
      reference.
    trunk_layers: blocks that policy and reference share and no gradient reaches.
    description: of the mode, for the plan.
    """

    model: Model
    critic: Model | None
    trained: dict[str, Any]
    frozen: dict[str, Any]
    initial: dict[str, Any]
    trunk_layers: int
    description: str

    def merged(self, trained) -> dict[str, Any]:
        """All parameters, as the model's functions take them."""
        return merge(trained, self.frozen)

    def reference(self) -> dict[str, Any]:
        """All parameters of the reference."""
        return merge(self.initial, self.frozen)

    def exported(self, trained) -> dict[str, Any]:
        """The parameters of an ordinary model: adapters merged; a value head where it fits one."""
        params = merge_lora(self.merged(trained), self.model.config.lora_scale)
        heads = {} if {"value_branch", "critic"} & params.keys() else params
        return without_heads(params) | {k: v for k, v in heads.items() if k == "value_head"}


def make_policy(config: ConfigDict, model: Model, params: dict[str, Any], key) -> Policy:
    """Splits a loaded model as the config says.

    Args:
      config: a valid config.
      model, params: from `load_pretrained`; buffers are not shared with what is trained.
      key: for value heads and adapters; consumed.

    Raises:
      ConfigError: options that do not fit this model.
      ModelError: the critic can't be loaded.
    """
    layers, m = model.config.layers, config.model
    branch = config.method.num_value_layers_unfrozen
    for name, count in (
        ("model.num_layers_unfrozen", m.num_layers_unfrozen),
        ("method.num_value_layers_unfrozen", branch + 1 if branch else 0),
    ):
        if count > layers:
            raise ConfigError(f"{name} is too large for a model of {layers} layers; lower it")
    dtype = compute_dtype(m.compute_dtype)
    scale = m.lora.alpha / m.lora.rank if m.lora.rank else 1.0
    model = with_options(model, compute_dtype=dtype, lora_scale=scale)
    # copies: the update donates what it trains, and the reference keeps what it began with
    initial, params = params, jax.tree.map(jnp.copy, params)
    critic = None
    if m.critic_path:
        critic, params["critic"] = _critic(m.critic_path, model, dtype)
    head = (critic or model).config.width
    stored = None if m.critic_path or branch else params.get("value_head")
    params.pop("value_head", None)
    if row(config).critic:
        params["value_head"] = stored or init_value_head(key, head, m.value_head)
    if branch:
        top = {"norm", *(f"block_{i}" for i in range(layers - branch, layers))}
        copies = {name: part for name, part in initial.items() if name in top}
        params["value_branch"] = jax.tree.map(jnp.copy, copies)
    if m.lora.rank:
        try:
            params = add_lora(
                jax.random.fold_in(key, 1), params, rank=m.lora.rank, targets=m.lora.targets
            )
        except ValueError as error:
            raise ConfigError(f"model.lora.targets: {error}") from None
    trains = adapters if m.lora.rank else top_layers(layers, m.num_layers_unfrozen)
    trained, frozen = split(params, trains)
    if m.lora.rank:
        initial = {}
    else:
        initial, _ = split(without_heads(initial), trains)
    trunk = first_trained_block(trained, layers)
    return Policy(
        model=model,
        critic=critic,
        trained=trained,
        frozen=frozen,
        initial=initial,
        trunk_layers=min(trunk, layers - branch) if branch else trunk,
        description=_describe(config, trained, frozen),
    )


def compute_dtype(name: str) -> str | None:
    """The dtype that a model computes in, None for that of its parameters, float32."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return None if name == "float32" else name


def _critic(path: str, model: Model, dtype: str | None):
    critic, params, _ = load_pretrained(path)
    if critic.config.vocab_size != model.config.vocab_size:
        raise ModelError(
            f"the critic {path} knows {critic.config.vocab_size} tokens and the policy "
            f"{model.config.vocab_size}: they must share a tokenizer"
        )
    return with_options(critic, compute_dtype=dtype), without_heads(params)


def _describe(config: ConfigDict, trained, frozen) -> str:
    count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
    m, all_of = config.model, count(trained) + count(frozen)
    if m.lora.rank:
        mode = f"adapters of rank {m.lora.rank}"
    elif m.num_layers_unfrozen >= 0:
        mode = f"the top {m.num_layers_unfrozen} layers"
    else:
        mode = "all layers"
    if m.critic_path:
        mode += ", a critic of its own"
    elif config.method.num_value_layers_unfrozen:
        mode += f", a value branch of {config.method.num_value_layers_unfrozen}"
    return f"{mode}: {count(trained) / 1e6:,.2f} of {all_of / 1e6:,.2f} million parameters"
