"""The optax chain of a run: clipping, optimizer, learning-rate schedule."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxppo.models.trainable import HEADS


def make_schedule(
    name: str, kwargs: dict[str, Any], lr: float, warmup_steps: int
) -> optax.Schedule:
    """Makes the learning rate as a function of optimizer steps.

    "cosine_annealing" and "linear" follow torch's CosineAnnealingLR and LinearLR, except that
    they stay at their end. With `warmup_steps` the rate first rises linearly from 0 to where the
    schedule begins.
    """
    if name == "cosine_annealing":
        schedule = optax.cosine_decay_schedule(lr, kwargs["T_max"], kwargs["eta_min"] / lr)
    elif name == "linear":
        schedule = optax.linear_schedule(
            lr * kwargs["start_factor"], lr * kwargs["end_factor"], kwargs["total_iters"]
        )
    elif name == "constant":
        schedule = optax.constant_schedule(lr)
    else:
        raise ValueError(f"scheduler {name!r} is unknown")
    if not warmup_steps:
        return schedule
    # the first step already has a rate above 0
    warmup = lambda step: schedule(0) * (step + 1) / (warmup_steps + 1)  # noqa: E731
    return optax.join_schedules([warmup, schedule], [warmup_steps])


def delayed(schedule: optax.Schedule, steps: int) -> optax.Schedule:
    """The same rates, `steps` later; before that, 0."""
    return lambda step: jnp.where(step < steps, 0.0, schedule(jnp.maximum(step - steps, 0)))


def by_part(
    policy: optax.GradientTransformation, critic: optax.GradientTransformation
) -> optax.GradientTransformation:
    """One optimizer for what only values come from (`HEADS`), and one for the rest of the tree."""
    label = lambda name, part: jax.tree.map(lambda _: name, part)  # noqa: E731
    labels = lambda params: {  # noqa: E731
        key: label("critic" if key in HEADS else "policy", part) for key, part in params.items()
    }
    return optax.multi_transform({"policy": policy, "critic": critic}, labels)


def make_optimizer(
    name: str, kwargs: dict[str, Any], schedule: optax.Schedule, max_grad_norm: float | None
) -> optax.GradientTransformation:
    """Makes the chain. Weight decay leaves biases and norms (leaves of rank below 2) alone.

    Args:
      name: "adam" (decay is added to the gradient), "adamw" (decoupled), or "sgd".
      kwargs: torch's names: lr is the schedule's; betas, eps, weight_decay, momentum, nesterov.
      schedule: the learning rate.
      max_grad_norm: gradients with a larger global norm are scaled down to it; None or 0: never.
    """
    matrices = lambda params: jax.tree.map(lambda x: jnp.ndim(x) >= 2, params)  # noqa: E731
    decay = kwargs["weight_decay"]
    if name == "adamw":
        b1, b2 = kwargs["betas"]
        steps = [optax.adamw(schedule, b1, b2, kwargs["eps"], weight_decay=decay, mask=matrices)]
    elif name == "adam":
        b1, b2 = kwargs["betas"]
        steps = [
            optax.add_decayed_weights(decay, matrices),
            optax.adam(schedule, b1, b2, kwargs["eps"]),
        ]
    elif name == "sgd":
        steps = [
            optax.add_decayed_weights(decay, matrices),
            optax.sgd(schedule, kwargs["momentum"] or None, kwargs["nesterov"]),
        ]
    else:
        raise ValueError(f"optimizer {name!r} is unknown")
    if max_grad_norm:
        steps.insert(0, optax.clip_by_global_norm(max_grad_norm))
    return optax.chain(*steps)
