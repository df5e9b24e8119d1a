"""Every option of a run: defaults, overrides, validation, and the plan that follows from them.

Sections and names are trlx's. A trlx PPO config (a dict, parsed YAML or a `TRLConfig`) is read as
it is, and refused in a sentence where it asks for what is not supported. Nothing is loaded here, so
a mistake is told before a model is. What differs from trlx:

- unknown options, wrong types and contradictions are errors that name the option;
- a section given in part (`optimizer.kwargs`, `scheduler.kwargs`, `gen_kwargs`) keeps the defaults
  below for the rest, not those of torch or transformers (`top_k` 0, not 50);
- `gen_experience_kwargs` changes single options of `gen_kwargs` for rollouts; trlx replaced all;
- rollouts must sample: greedy decoding and beam search cannot be replayed as a policy;
- `num_layers_unfrozen` is -1 by default, all layers train (trlx's PPO configs say 2);
- `minibatch_size` changes the memory a step takes and never its result;
- evaluations and checkpoints, counted in optimizer steps, happen at the end of the cycle they
  fall in, and a cycle is run whole: at least `total_steps` steps are done unless `epochs` ends;
- `tracker` is None by default, and JSON lines are always written;
- gradients are clipped to norm 1 (`optimizer.max_grad_norm`; trlx did not clip).

New beside trlx's: the sections `reward` and `environment`; `train.{resume, keep_checkpoints,
log_samples, cache_trunk, compile_cache, profile, overlap_rewards, critic_warmup_steps}`,
`model.{value_head, critic_path, compute_dtype, lora}` (trlx's `peft_config` is read as `lora`),
`tokenizer.truncate_prompts`, `optimizer.{max_grad_norm, critic_lr}`, `scheduler.warmup_steps`,
`method.{kl_estimator, approx_kl_stop, whiten_advantages}` and what belongs to the methods.
"""

import difflib
import fnmatch
import json
import math
import numbers
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from jaxppo.core import clips
from jaxppo.methods import METHODS, KLPlace, Method, gae_credit


class ConfigError(ValueError):
    """An option that does not exist, has a wrong value, or contradicts another one."""


def default_config() -> ConfigDict:
    """Returns a new config with every option; those that may be None are typed placeholders."""
    train = {
        "total_steps": 10000,  # optimizer steps
        "seq_length": 1024,  # tokens of prompt and response together
        "epochs": 100,  # cycles of rollouts and updates at most
        "batch_size": 32,  # samples per optimizer step
        "minibatch_size": placeholder(int),  # samples held in memory at once; None: the batch
        "eval_interval": 100,  # optimizer steps
        "checkpoint_interval": 10000,  # optimizer steps
        # The run folder; --workdir sets it. None: runs/ and the config file's name, or the time.
        "checkpoint_dir": placeholder(str),
        "keep_checkpoints": 1,
        "save_best": True,  # keep the checkpoint of the best evaluation reward, too
        "save_optimizer": True,
        "resume": True,  # continue from the checkpoint in the run folder, if there is one
        "tracker": placeholder(str),  # None | "tensorboard" | "wandb"
        "project_name": "jaxppo",
        "run_name": placeholder(str),
        "entity_name": placeholder(str),
        "group_name": placeholder(str),
        "tags": (),
        "seed": 1000,
        "log_samples": 4,  # rows of the sample table at an evaluation
        "overlap_rewards": True,  # in a thread while the next chunk is sampled
        "cache_trunk": True,  # keep the states of layers that are not trained over the epochs
        "compile_cache": "auto",  # folder of compiled programs; auto: the user's cache; "off"
        "profile": False,  # a trace of the second cycle, for TensorBoard and Perfetto
        "critic_warmup_steps": 0,  # first optimizer steps, in which only what gives values learns
    }
    model = {
        "model_path": placeholder(str),  # a folder or a Hugging Face name
        "model_arch_type": "causal",
        "num_layers_unfrozen": -1,  # -1: all train; N: the top N blocks; 0: the final norm
        "value_head": "mlp",  # "linear" | "mlp"
        "critic_path": placeholder(str),  # a separate critic begins with this checkpoint
        "compute_dtype": "auto",  # "float32" | "bfloat16"; auto: the latter on accelerators
        "lora": {
            "rank": placeholder(int),  # None: no adapters
            "alpha": 16.0,  # adapters count alpha / rank
            "targets": ("all-linear",),  # regular expressions on layers' paths, or peft's names
        },
    }
    tokenizer = {
        "tokenizer_path": placeholder(str),  # None: the model's
        "padding_side": "left",
        "truncation_side": "right",  # the side that is cut off
        "truncate_prompts": False,  # False: a prompt that is too long is an error
    }
    optimizer = {
        "name": "adamw",  # "adam" | "adamw" | "sgd"
        "kwargs": {
            "lr": 3e-5,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 1e-6,
            "momentum": 0.0,  # sgd
            "nesterov": False,  # sgd
        },
        "max_grad_norm": FieldReference(1.0),  # None or 0: no clipping
        "critic_lr": placeholder(float),  # of what gives values; None: as the rest
    }
    scheduler = {
        "name": "cosine_annealing",  # "cosine_annealing" | "linear" | "constant"
        "kwargs": {
            "T_max": 1e12,  # cosine_annealing: steps to eta_min; 1e12 is a constant rate in effect
            "eta_min": 3e-5,  # cosine_annealing: a learning rate
            "start_factor": 1 / 3,  # linear, as torch's LinearLR: factors of lr
            "end_factor": 1.0,
            "total_iters": 5,  # linear: optimizer steps between the two
        },
        "warmup_steps": 0,  # optimizer steps, linearly from 0
    }
    method = {
        "name": "PPOConfig",  # PPO, or a row of docs/methods.md, such as "grpo"
        "decode_slots": placeholder(int),  # rows decoded at once and refilled; None: a chunk
        "group_size": 1,  # samples a prompt; methods that compare them want 4 to 16
        "ppo_epochs": 4,  # passes over a cycle's rollouts
        "num_rollouts": 128,  # per cycle, rounded up to whole chunks
        "chunk_size": 128,  # prompts sampled and scored in one go, in evaluations as well
        "init_kl_coef": 0.001,
        "target": placeholder(float),  # nats per sample; None: the coefficient is fixed
        "horizon": 10000,  # samples
        "gamma": 1.0,
        "lam": 0.95,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "vf_coef": 1.0,
        "scale_reward": placeholder(str),  # None | "running" | "ref" | "ref_centred" (to mean 0)
        "ref_mean": placeholder(float),  # with "ref"; None: of the first chunk
        "ref_std": placeholder(float),
        "cliprange_reward": FieldReference(10.0),  # None or 0: no clipping
        "kl_estimator": "k1",  # in the reward, of a token: "k1" | "k2" | "k3" | "abs"
        # The rest changes a method's row in docs/methods.md; None: as it is.
        "kl_in": placeholder(str),  # "reward" | "loss" | "none"
        "kl_loss_estimator": placeholder(str),  # "k1" | "k2" | "k3" | "abs" | "exact"
        "clip_low": placeholder(float),
        "clip_high": placeholder(float),
        "entropy_coef": 0.0,  # units of loss a nat of entropy
        "entropy_target": placeholder(float),  # nats; the coefficient adapts to reach it
        "entropy_share": 1.0,  # the share of tokens, the least certain, that is trained on
        "mask_truncated": False,  # responses that were cut off leave the loss
        "overlong_buffer": placeholder(int),  # tokens; reaching into the last so many costs up to 1
        "missing_eos_penalty": 0.0,  # units of score, for responses that did not end
        "off_policy_threshold": placeholder(float),  # nats a token; samples beyond it are left out
        "dynamic_rounds": 0,  # draws a cycle may take to fill up with groups that differ; 0: one
        "approx_kl_stop": placeholder(float),  # nats; past it, skip the cycle's remaining updates
        "whiten_advantages": True,
        "num_value_layers_unfrozen": 0,  # N: values come from a copy of the top N blocks
        "gen_kwargs": {
            "max_new_tokens": 40,
            "min_new_tokens": 0,
            "do_sample": True,  # False: greedy, for evaluations only
            "temperature": 1.0,
            "top_k": 0,  # 0: off
            "top_p": 1.0,
            "min_p": 0.0,
            "eos_token_id": placeholder(object),  # id or ids; None: the model's; (): never stop
        },
    }
    # For rollouts; None: as in gen_kwargs.
    kinds = {"max_new_tokens": int, "min_new_tokens": int, "do_sample": bool, "temperature": float}
    kinds |= {"top_k": int, "top_p": float, "min_p": float, "eos_token_id": object}
    method["gen_experience_kwargs"] = {name: placeholder(kind) for name, kind in kinds.items()}
    reward = {  # a classifier that scores samples where no reward function is given
        "model_path": placeholder(str),  # a folder or a Hugging Face name
        "label": placeholder(str),  # by name or number; None: the only one
        "output": "probability",  # "logit"
    }
    environment = {  # conversations of a task that has an environment
        "max_turns": 4,  # actions of up to max_new_tokens each
        "observation_tokens": 128,  # of all observations of a conversation
    }
    sections = {"train": train, "model": model, "tokenizer": tokenizer, "optimizer": optimizer}
    return ConfigDict(
        sections
        | {"scheduler": scheduler, "method": method, "reward": reward, "environment": environment}
    )


# The keyword arguments that each optimizer and scheduler reads.
OPTIMIZERS = {
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "sgd": ("lr", "momentum", "nesterov", "weight_decay"),
}
SCHEDULERS = {
    "cosine_annealing": ("T_max", "eta_min"),
    "linear": ("start_factor", "end_factor", "total_iters"),
    "constant": (),
}

# Other spellings of a value, in lower case.
_ALIASES = {
    "method.name": {"ppo": "PPOConfig", "ppoconfig": "PPOConfig", "rftconfig": "rft"},
    "method.kl_in": {},
    "method.scale_reward": {"ignored": None, "none": None, False: None},
    "train.tracker": {"none": None},
}

# Options of trlx and `generate` without a counterpart here: what to do about them, and the values
# (besides empty ones) that ask for nothing special, so that they are passed over.
_ANY = object()
_FOREIGN = {
    "train.pipeline": ("prompts are passed to train(...), leave it out", "promptpipeline"),
    "train.trainer": ("only PPO is supported so far, leave it out", "accelerateppotrainer"),
    "train.trainer_kwargs": ("it is not supported, leave it out", None),
    "train.logging_dir": ("logs go to the run folder, set train.checkpoint_dir", None),
    "train.rollout_logging_dir": ("it is not supported yet, leave it out", None),
    "train.resume_from_checkpoint": ("set train.checkpoint_dir to the folder of that run", None),
    "model.model_extra_configs": ("it is not supported, leave it out", None),
    "tokenizer.tokenizer_extra_configs": ("it is not supported, leave it out", None),
    "method.gen_kwargs.max_length": ("use max_new_tokens, which excludes the prompt", None),
    "method.gen_kwargs.min_length": ("use min_new_tokens, which excludes the prompt", None),
    "method.gen_kwargs.num_beams": ("beam search is not supported, use 1", 1),
    "method.gen_kwargs.num_return_sequences": ("it is not supported yet, use 1", 1),
    "method.gen_kwargs.repetition_penalty": ("it is not supported, use 1.0", 1),
    "method.gen_kwargs.no_repeat_ngram_size": ("it is not supported, use 0", None),
    "method.gen_kwargs.use_cache": ("", _ANY),
    "method.gen_kwargs.pad_token_id": ("", _ANY),
}


def make_config(overrides: Mapping[str, Any] | ConfigDict | None = None) -> ConfigDict:
    """Returns the defaults with `overrides` applied, types made right and spellings unified.

    overrides: nested ({"method": {"ppo_epochs": 2}}) or dotted ({"method.ppo_epochs": 2}), a
      ConfigDict (of a config file), or anything with `to_dict()`, such as trlx's `TRLConfig`. Of
      an option given twice the later one counts. Not changed.

    Numbers may come as text (YAML reads 1e-5 so), whole floats as integers, lists as tuples.

    Raises:
      ConfigError: names each option that is unknown, of a wrong type, or not supported. Ranges
        and contradictions are left to `validate`.
    """
    config, problems = default_config(), []
    _merge(config, _as_mapping(overrides if overrides is not None else {}), "", problems)
    _raise(problems)
    return config


def validate(config: ConfigDict) -> None:
    """Checks a whole config, best one out of `make_config`. Loads nothing.

    Raises:
      ConfigError: one sentence per problem, all of them together: options that are unknown,
        missing or of a wrong type, values out of range, contradictions, what is not supported.
    """
    checked, problems = default_config(), []
    _merge(checked, config.to_dict(), "", problems, complete=True)
    # An option of a wrong type was named above and has its default here, so it is named once.
    problems += [*_value_problems(checked), *_contradictions(checked)]
    _raise(problems)


GROUP_METHODS = tuple(
    name for name, row in METHODS.items() if name not in ("ppo", "reinforce_pp", "remax")
)


def is_clipped(method: Method) -> bool | None:
    """True where the clip of a method takes `low` and `high`, else None."""
    clip = method.clip.func if isinstance(method.clip, partial) else method.clip
    return True if clip is clips.clip_ratio else None


def row(config: ConfigDict) -> Method:
    """The method of a config: its row of `METHODS` with what the config changes."""
    m = config.method
    name = "ppo" if m.name == "PPOConfig" else m.name
    method = METHODS.get(name, METHODS["ppo"])  # an unknown name is another sentence's matter
    if name == "ppo":
        method = method._replace(
            advantage=partial(gae_credit, gamma=m.gamma, lam=m.lam, whitened=m.whiten_advantages),
            clip=partial(method.clip, low=m.cliprange, high=m.cliprange),
        )
    if is_clipped(method):
        given = {"low": m.clip_low, "high": m.clip_high}
        method = method._replace(
            clip=partial(method.clip, **{k: v for k, v in given.items() if v is not None})
        )
    place = {
        None: method.kl,
        "reward": KLPlace(reward=m.kl_estimator),
        "loss": KLPlace(loss="k3"),
        "none": KLPlace(),
    }.get(m.kl_in, method.kl)
    if place.loss and m.kl_loss_estimator:
        place = KLPlace(loss=m.kl_loss_estimator)
    return method._replace(kl=place)


def plain_ppo(config: ConfigDict) -> bool:
    """Whether the loss is PPO's own, with nothing added to it or left out."""
    m, d = config.method, default_config().method
    same = all(m[name] == d[name] for name in _OF_METHODS)
    return m.name == "PPOConfig" and same


_OF_METHODS = (
    "kl_in", "kl_loss_estimator", "clip_low", "clip_high", "entropy_coef", "entropy_target",
    "entropy_share", "mask_truncated", "off_policy_threshold",
)  # fmt: skip


class Plan(NamedTuple):
    """What a run will do if no update is skipped. All are counts."""

    rollouts_per_cycle: int  # samples: num_rollouts rounded up to whole chunks
    chunks_per_cycle: int  # calls of the sampler and of the reward function
    optimizer_steps_per_cycle: int  # ppo_epochs times the batches, the last of which may be smaller
    cycles: int  # of rollouts and updates, until total_steps are done or epochs are over
    optimizer_steps: int  # in all; cycles are whole, so it may pass total_steps by part of one
    rollouts: int  # samples in all
    evaluations: int  # before training, after each cycle in which one falls due, and at the end
    prompts: int  # how many there are
    prompt_epochs: float  # how often each prompt comes, on average


def due(interval: int, before: int, after: int) -> bool:
    """Whether a multiple of `interval` lies in (before, after], all in optimizer steps."""
    return after // interval > before // interval


def plan(config: ConfigDict, num_prompts: int) -> Plan:
    """Computes the plan of a valid config. Raises ConfigError if there are no prompts."""
    if num_prompts < 1:
        raise ConfigError("there are no prompts to train on; give at least one")
    train, method = config.train, config.method
    chunks = math.ceil(method.num_rollouts / method.chunk_size)
    rollouts = chunks * method.chunk_size
    prompts = rollouts // method.group_size
    per_cycle = method.ppo_epochs * math.ceil(rollouts / train.batch_size)
    cycles = min(train.epochs, math.ceil(train.total_steps / per_cycle))
    steps = cycles * per_cycle
    # A cycle holds at most one evaluation, and each multiple of the interval belongs to one cycle.
    evaluations = 1 + min(cycles, steps // train.eval_interval)
    evaluations += not due(train.eval_interval, steps - per_cycle, steps)
    samples = cycles * rollouts
    epochs = cycles * prompts / num_prompts
    run = (cycles, steps, samples, evaluations, num_prompts, epochs)
    return Plan(rollouts, chunks, per_cycle, *run)


def plan_lines(plan: Plan, config: ConfigDict) -> list[tuple[str, str]]:
    """Returns the plan as (label, value) pairs in plain words, for a table in the console."""
    t, m = config.train, config.method
    steps = plan.optimizer_steps_per_cycle
    limit = "train.total_steps" if plan.optimizer_steps >= t.total_steps else "train.epochs"
    up = "" if plan.rollouts_per_cycle == m.num_rollouts else f", up from {m.num_rollouts}"
    batch = f"{t.batch_size} samples a step"
    if rest := plan.rollouts_per_cycle % t.batch_size:
        batch += f", {rest} in the last step of an epoch"
    if t.minibatch_size:
        batch += f", {t.minibatch_size} at once in memory"
    kl = f"fixed at {m.init_kl_coef:g}"
    if m.target is not None:
        kl = f"{m.init_kl_coef:g} at first, adapted to reach {m.target:g} nats a sample"
    times = f"{plan.prompt_epochs:.{0 if plan.prompt_epochs >= 100 else 2}f}"
    response = rollout_kwargs(config)["max_new_tokens"]
    best = " and the best" if t.save_best else ""
    clip = f"clipped at +-{m.cliprange_reward:g}" if m.cliprange_reward else "not clipped"
    scale = {"running": ", divided by their running std", "ref": ", divided by the reference std"}
    scale["ref_centred"] = ", to mean 0 and std 1 on the reference's samples"
    chunks = f"{plan.chunks_per_cycle} x {m.chunk_size}{up}"
    groups = f", {m.group_size} samples a prompt" if m.group_size > 1 else ""
    updates = f"{m.ppo_epochs} epochs x {steps // m.ppo_epochs}"
    return [
        ("cycles", f"{plan.cycles}, then {limit} ends the run"),
        ("method", m.name + groups),
        ("rollouts", f"{plan.rollouts_per_cycle} a cycle ({chunks}), {plan.rollouts} in all"),
        ("optimizer steps", f"{steps} a cycle ({updates}), {plan.optimizer_steps} in all"),
        ("batch", batch),
        ("prompts", f"{plan.prompts}, each sampled {times} times on average"),
        ("tokens", f"at most {t.seq_length - response} a prompt, {response} a response"),
        ("evaluations", f"{plan.evaluations}: first, every {t.eval_interval} steps, and last"),
        (
            "checkpoints",
            f"every {t.checkpoint_interval} steps and last, in {t.checkpoint_dir}; "
            f"kept: the newest {t.keep_checkpoints}{best}",
        ),
        ("scores", clip + scale.get(m.scale_reward, "")),
        ("KL coefficient", kl),
    ]


def rollout_kwargs(config: ConfigDict) -> dict[str, Any]:
    """Returns the sampler's options for rollouts: gen_kwargs under gen_experience_kwargs."""
    return _sampler_kwargs(_rollout_options(config))


def eval_kwargs(config: ConfigDict) -> dict[str, Any]:
    """Returns the sampler's options for evaluations; `do_sample` False is temperature 0."""
    return _sampler_kwargs(config.method.gen_kwargs.to_dict())


def stop_ids(config: ConfigDict, *, rollouts: bool) -> tuple[int, ...] | None:
    """Returns the EOS ids the config sets for rollouts or evaluations; None: the model's own."""
    options = _rollout_options(config) if rollouts else config.method.gen_kwargs
    ids = options["eos_token_id"]
    return None if ids is None else _convert(ids, object)


def optimizer_kwargs(config: ConfigDict) -> dict[str, Any]:
    """Returns those of optimizer.kwargs that the optimizer of this name reads."""
    return {key: config.optimizer.kwargs[key] for key in OPTIMIZERS[config.optimizer.name]}


def scheduler_kwargs(config: ConfigDict) -> dict[str, Any]:
    """Returns those of scheduler.kwargs that the scheduler of this name reads."""
    return {key: config.scheduler.kwargs[key] for key in SCHEDULERS[config.scheduler.name]}


def response_room(config: ConfigDict, conversing: bool) -> int:
    """The most tokens that follow a prompt, in rollouts and evaluations."""
    e, longest = config.environment, longest_action(config)
    return e.max_turns * longest + e.observation_tokens if conversing else longest


def longest_action(config: ConfigDict) -> int:
    """The most tokens sampled at once, in rollouts and evaluations."""
    several = (rollout_kwargs(config), eval_kwargs(config))
    return max(kwargs["max_new_tokens"] for kwargs in several)


def option_names() -> set[str]:
    """Returns the dotted name of every option."""
    return set(_paths(default_config()))


def to_json(config: ConfigDict) -> str:
    """Returns the config as JSON with sorted keys; `make_config(json.loads(...))` reads it back."""
    return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"


# The rules of `validate`. An option that is None is off and passes its range.

_RANGES = (
    (
        "at least 1",
        lambda v: v >= 1,
        """train.total_steps train.seq_length train.epochs train.batch_size train.minibatch_size
        train.eval_interval train.checkpoint_interval train.keep_checkpoints method.ppo_epochs
        method.num_rollouts method.chunk_size method.horizon scheduler.kwargs.T_max
        scheduler.kwargs.total_iters method.gen*.max_new_tokens model.lora.rank method.group_size
        method.overlong_buffer method.decode_slots environment.max_turns""",
    ),
    (
        "at least 0",
        lambda v: v >= 0,
        """train.log_samples method.init_kl_coef method.vf_coef method.cliprange_reward
        optimizer.max_grad_norm optimizer.kwargs.weight_decay scheduler.kwargs.eta_min
        scheduler.warmup_steps method.gen*.min_new_tokens method.gen*.temperature
        method.gen*.top_k train.critic_warmup_steps method.num_value_layers_unfrozen
        method.missing_eos_penalty method.entropy_target method.dynamic_rounds
        environment.observation_tokens""",
    ),
    (
        "above 0",
        lambda v: v > 0,
        """method.target method.cliprange method.cliprange_value method.approx_kl_stop
        method.ref_std optimizer.kwargs.lr optimizer.kwargs.eps optimizer.critic_lr
        model.lora.alpha method.clip_low method.clip_high method.off_policy_threshold""",
    ),
    ("from 0 to 1", lambda v: 0 <= v <= 1, "method.gamma method.lam scheduler.kwargs.end_factor"),
    (
        "above 0, at most 1",
        lambda v: 0 < v <= 1,
        "method.gen*.top_p scheduler.kwargs.start_factor method.entropy_share",
    ),
    ("at least 0, below 1", lambda v: 0 <= v < 1, "method.gen*.min_p optimizer.kwargs.momentum"),
    (
        "two numbers at least 0, below 1",
        lambda v: len(v) == 2 and all(isinstance(b, (int, float)) and 0 <= b < 1 for b in v),
        "optimizer.kwargs.betas",
    ),
    ("a list of strings", lambda v: all(isinstance(tag, str) for tag in v), "train.tags"),
    ("from 0 to 4294967295", lambda v: 0 <= v < 2**32, "train.seed"),
    ("the path of a folder", bool, "train.checkpoint_dir train.compile_cache"),
    ("-1 (all layers) or a number of layers", lambda v: v >= -1, "model.num_layers_unfrozen"),
    (
        "a list of names or regular expressions",
        lambda v: bool(v) and all(isinstance(target, str) for target in v),
        "model.lora.targets",
    ),
)

_CHOICES = {
    "train.tracker": (("tensorboard", "wandb"), "; JSON lines are written in any case"),
    "model.model_arch_type": (("causal",), "; encoder-decoder models are not supported yet"),
    "model.value_head": (("linear", "mlp"), ""),
    "reward.output": (("probability", "logit"), ""),
    "model.compute_dtype": (("auto", "float32", "bfloat16"), ""),
    "tokenizer.padding_side": (("left",), ", since a response starts where its prompt ends"),
    "tokenizer.truncation_side": (("left", "right"), ""),
    "optimizer.name": (tuple(OPTIMIZERS), "; others are not supported yet"),
    "scheduler.name": (tuple(SCHEDULERS), "; others are not supported yet"),
    "method.name": (("PPOConfig", *(name for name in METHODS if name != "ppo")), ""),
    "method.scale_reward": (("running", "ref", "ref_centred"), ""),
    "method.kl_estimator": (("k1", "k2", "k3", "abs"), ""),
    "method.kl_in": ((None, "reward", "loss", "none"), ""),
    "method.kl_loss_estimator": ((None, "k1", "k2", "k3", "abs", "exact"), ""),
}


def _value_problems(config: ConfigDict) -> Iterator[str]:
    """Yields a sentence for each option whose value alone is wrong."""
    for requirement, holds, paths in _RANGES:
        for pattern in paths.split():
            for path in fnmatch.filter(_paths(config), pattern) if "*" in pattern else [pattern]:
                value = config[path]
                if value is not None and not holds(value):
                    yield f"{path} must be {requirement}, got {value!r}"
    for path in _paths(config):  # counters are 32 bits wide; the seed has its own range
        value = config[path]
        if type(value) is int and value >= 2**31 and path != "train.seed":
            yield f"{path} must be below {2**31}, got {value}"
    optional = {path for path, options in _ALIASES.items() if None in options.values()}
    for path, (choices, hint) in _CHOICES.items():
        choices = choices + (None,) * (path in optional)
        if config[path] not in choices:
            yield f"{path} must be {' or '.join(map(repr, choices))}, got {config[path]!r}{hint}"


def _contradictions(config: ConfigDict) -> Iterator[str]:
    """Yields a sentence for each set of options that exclude each other."""
    t, m, o, s = config.train, config.method, config.optimizer, config.scheduler
    if (t.minibatch_size or 0) > 0 and t.batch_size % t.minibatch_size:
        yield f"train.minibatch_size {t.minibatch_size} must divide train.batch_size {t.batch_size}"
    if m.chunk_size > 0 and t.batch_size > math.ceil(m.num_rollouts / m.chunk_size) * m.chunk_size:
        yield (
            f"train.batch_size {t.batch_size} exceeds the rollouts of a cycle, method.num_rollouts "
            f"{m.num_rollouts} in chunks of {m.chunk_size}; lower the one or raise the other"
        )
    method = row(config)
    if m.group_size > 1 and (m.chunk_size % m.group_size or m.num_rollouts % m.group_size):
        yield (
            f"method.group_size {m.group_size} must divide method.num_rollouts {m.num_rollouts} "
            f"and method.chunk_size {m.chunk_size}"
        )
    if m.group_size == 1 and m.name in GROUP_METHODS:
        yield (
            f"method.name {m.name!r} compares the samples of one prompt, of which there is one; "
            "set method.group_size to 4 or more"
        )
    if m.dynamic_rounds and m.name not in GROUP_METHODS:
        yield (
            f"method.dynamic_rounds replaces groups whose samples score alike, but {m.name!r} has "
            "no groups; set it to 0"
        )
    if not method.critic:
        for name, given in {
            "model.critic_path": config.model.critic_path,
            "method.num_value_layers_unfrozen": m.num_value_layers_unfrozen,
            "train.critic_warmup_steps": t.critic_warmup_steps,
            "optimizer.critic_lr": o.critic_lr,
        }.items():
            if given:
                yield f"{name} has no effect with {m.name!r}, which has no critic; leave it out"
    if is_clipped(method) is None and not (m.clip_low is None and m.clip_high is None):
        yield f"method.clip_low and clip_high have no effect with {m.name!r}; leave them out"
    if (m.overlong_buffer or 0) > rollout_kwargs(config)["max_new_tokens"]:
        yield "method.overlong_buffer is longer than a response, max_new_tokens; lower it"
    if m.target is not None and m.init_kl_coef == 0:
        yield (
            "method.target asks for an adaptive KL coefficient, but one that starts at "
            "method.init_kl_coef 0 stays there; set it above 0, or target to None"
        )
    if (m.ref_mean is None) != (m.ref_std is None):
        yield "method.ref_mean and method.ref_std belong together; give both or neither"
    if m.ref_std is not None and m.scale_reward not in ("ref", "ref_centred"):
        yield "method.ref_std has no effect unless method.scale_reward is 'ref'; set or drop it"
    if config.model.lora.rank and config.model.num_layers_unfrozen != -1:
        yield (
            "model.lora trains adapters only, but model.num_layers_unfrozen "
            f"{config.model.num_layers_unfrozen} asks for layers; set -1, or drop the adapters"
        )
    if config.model.critic_path and m.num_value_layers_unfrozen:
        yield (
            "model.critic_path and method.num_value_layers_unfrozen are two ways to get values; "
            "set one of them"
        )
    if o.name == "sgd" and o.kwargs.nesterov and o.kwargs.momentum == 0:
        yield "optimizer.kwargs.nesterov needs optimizer.kwargs.momentum above 0; set it so"
    # With a period far beyond the run, as trlx's 1e12, eta_min plays no part.
    rising = s.kwargs.eta_min > o.kwargs.lr and s.kwargs.T_max < 100 * t.total_steps
    if s.name == "cosine_annealing" and rising:
        yield (
            f"scheduler.kwargs.eta_min {s.kwargs.eta_min:g} is above optimizer.kwargs.lr "
            f"{o.kwargs.lr:g}, so the learning rate would rise; lower eta_min"
        )
    defaults = default_config()
    for section, table in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        name, default = config[section].name, defaults[section].kwargs
        for key, value in config[section].kwargs.items():
            # A default that the chosen one does not read is only unused.
            if key not in table.get(name, default) and value != default[key]:
                yield f"{section}.kwargs.{key} has no effect with {name!r}; leave it out"
    evaluation, rollout = m.gen_kwargs.to_dict(), _rollout_options(config)
    stages = {"gen_kwargs": evaluation, "gen_experience_kwargs": rollout}
    for stage, g in stages.items() if rollout != evaluation else [("gen_kwargs", evaluation)]:
        where, longest = f"method.{stage}", g["max_new_tokens"]
        if g["min_new_tokens"] > longest:
            yield f"{where}.min_new_tokens must not exceed max_new_tokens, which is {longest}"
        if longest >= t.seq_length:
            yield (
                f"{where}.max_new_tokens {longest} leaves no room for a prompt in train.seq_length "
                f"{t.seq_length}; lower the one or raise the other"
            )
        if g["do_sample"] and g["temperature"] == 0:
            yield (
                f"{where}.temperature must be above 0 to sample; set it so, or for greedy "
                "evaluations method.gen_kwargs.do_sample to False"
            )
    if not rollout["do_sample"]:
        yield "rollouts must sample; set method.gen_experience_kwargs.do_sample to True"


# Reading overrides.


def _as_mapping(value: Any) -> Mapping[str, Any]:
    value = value.to_dict() if hasattr(value, "to_dict") else value
    if not isinstance(value, Mapping):
        raise ConfigError(f"a config must be a mapping of options, got {value!r}")
    return value


def _merge(
    config: ConfigDict,
    overrides: Mapping[str, Any],
    prefix: str,
    problems: list[str],
    complete: bool = False,
) -> None:
    """Writes `overrides` into the section `config`, and what is wrong with them to `problems`."""
    fields = dict(config.items(preserve_field_references=True))
    for name in fields if complete else ():
        if name not in overrides:
            problems.append(f"{prefix}{name} is missing; make_config fills in its default")
    for key, value in overrides.items():
        name, _, rest = str(key).partition(".")
        value = {rest: value} if rest else value
        path = prefix + name
        foreign = path.replace(".gen_experience_kwargs.", ".gen_kwargs.")
        if path == "model.peft_config":
            lora, sentences = _read_peft(value)
            problems += sentences
            _merge(config.lora, lora, "model.lora.", problems)
        elif foreign in _FOREIGN:
            advice, harmless = _FOREIGN[foreign]
            given = value.lower() if isinstance(value, str) else value
            if given and harmless is not _ANY and given != harmless:
                problems.append(f"{path} is {value!r}, but {advice}")
        elif name not in fields:
            problems.append(_unknown(path, prefix, fields))
        elif isinstance(fields[name], ConfigDict):
            if hasattr(value, "to_dict") or isinstance(value, Mapping):
                _merge(config[name], _as_mapping(value), f"{path}.", problems, complete)
            elif value is not None:  # an empty section of a YAML file is None
                problems.append(f"{path} is a section and must be a mapping, got {value!r}")
        else:
            optional = isinstance(fields[name], FieldReference)
            sentence = _assign(config, name, path, value, optional)
            problems += [sentence] if sentence else []


def _read_peft(value: Any) -> tuple[dict[str, Any], list[str]]:
    """Reads a peft config as `model.lora`; returns it and what can't be honoured."""
    if not value:
        return {}, []
    given = {key: x for key, x in _as_mapping(value).items() if x not in (None, False, [], {}, "")}
    kind = given.pop("peft_type", "LORA")
    if getattr(kind, "value", kind) != "LORA":
        return {}, [f"model.peft_config asks for {kind}; only LORA is supported"]
    names = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
    lora = {"rank": 8, "alpha": 8.0}  # peft's defaults
    lora |= {names[key]: given.pop(key) for key in list(given) if key in names}
    if "targets" in lora:
        targets = lora["targets"]
        lora["targets"] = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
    harmless = {
        "task_type",
        "inference_mode",
        "base_model_name_or_path",
        "revision",
        "peft_version",
    }
    harmless |= {"init_lora_weights", "fan_in_fan_out", "auto_mapping", "runtime_config"}
    neutral = {"bias": "none", "lora_dropout": 0, "arrow_config": None}
    odd = [k for k, x in given.items() if k not in harmless and x != neutral.get(k, _ANY)]
    return lora, [f"model.peft_config.{name} is not supported; leave it out" for name in odd]


def _assign(config: ConfigDict, name: str, path: str, value: Any, optional: bool) -> str | None:
    """Writes one value in its right type, or returns the sentence that says why it cannot."""
    kind = config.get_type(name)
    if isinstance(value, (str, bool)):
        spelling = value.lower() if isinstance(value, str) else value
        value = _ALIASES.get(path, {}).get(spelling, value)
    if isinstance(value, (list, tuple)) and ".gen_" in path and kind is not object:
        return (
            f"{path} is a list, which trlx reads as a sweep of evaluations; "
            "this is not supported yet, give one value"
        )
    try:
        config[name] = None if value is None and optional else _convert(value, kind)
    except (TypeError, ValueError, OverflowError):
        return f"{path} must be {_KINDS[kind]}{' or None' if optional else ''}, got {value!r}"
    return None


def _unknown(path: str, prefix: str, fields: Mapping[str, Any]) -> str:
    """Says which option might have been meant, or which there are."""
    name = path[len(prefix) :]
    everything = list(_paths(default_config()))
    elsewhere = [p for p in everything if p.rpartition(".")[2] == name]
    near = [prefix + key for key in difflib.get_close_matches(name, fields, 1)]
    leaves = {p.rpartition(".")[2]: p for p in reversed(everything)}
    far = [leaves[key] for key in difflib.get_close_matches(name, leaves, 1, 0.8)]
    for meant in elsewhere + near + far:
        return f"unknown option {path}; did you mean {meant}?"
    where = f"{prefix[:-1]} has" if prefix else "the sections are"
    return f"unknown option {path}; {where}: {', '.join(fields)}"


_KINDS = {
    int: "an integer",
    float: "a finite number",
    str: "a string",
    bool: "True or False",
    tuple: "a list",
    object: "a token id or a list of token ids",
}


def _convert(value: Any, kind: type) -> Any:
    """Returns `value` as the `kind` of an option, or raises one of the errors of casting."""
    if kind in (int, float):
        number = float(value) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, numbers.Real):
            raise TypeError
        if not math.isfinite(number) or (kind is int and number != int(number)):
            raise ValueError
        return kind(number)
    if kind is str:
        return os.fspath(value) + ""  # paths are welcome; bytes fail here
    if kind is object:
        if isinstance(value, int) and value == -1:  # trlx's way to say "never stop"
            return ()
        values = value if isinstance(value, (list, tuple)) else (value,)
        ids = tuple(_convert(token, int) for token in values)
        if any(token < 0 for token in ids):
            raise ValueError
        return ids
    if not isinstance(value, (list, tuple) if kind is tuple else kind):
        raise TypeError
    return kind(value)


# Small helpers.


def _raise(problems: list[str]) -> None:
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError("\n- ".join([f"{len(problems)} problems in the config:", *problems]))


def _paths(config: ConfigDict, prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from _paths(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _rollout_options(config: ConfigDict) -> dict[str, Any]:
    changed = config.method.gen_experience_kwargs.items()
    return config.method.gen_kwargs.to_dict() | {k: v for k, v in changed if v is not None}


def _sampler_kwargs(options: Mapping[str, Any]) -> dict[str, Any]:
    names = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p")
    kwargs = {name: options[name] for name in names}
    return kwargs if options["do_sample"] else kwargs | {"temperature": 0.0}
