"""Every option of a run: defaults, overrides, validation, and the plan that follows from them.

Sections and names are trlx's, and a trlx PPO config (dict, YAML or `TRLConfig`) is read as it is.
Nothing heavy is imported, so a mistake is told before a model is loaded. What differs from trlx:

- unknown options, wrong types and contradictions are errors that name the option;
- a section given in part (`optimizer.kwargs`, `scheduler.kwargs`, `gen_kwargs`) keeps the defaults
  below for the rest, not those of torch or transformers (`top_k` 0, not 50);
- `gen_experience_kwargs` changes single options of `gen_kwargs` for rollouts; trlx replaced all;
- rollouts must sample: greedy decoding and beam search cannot be replayed as a policy;
- `num_layers_unfrozen` is -1, all layers train (trlx's PPO default 2 is not supported yet);
- `minibatch_size` changes the memory a step takes and never its result;
- evaluations and checkpoints, counted in optimizer steps, happen at the end of the cycle they
  fall in, and a cycle is run whole: at least `total_steps` steps are done unless `epochs` ends;
- `tracker` is None by default, and JSON lines are always written;
- gradients are clipped to norm 1 (`optimizer.max_grad_norm`; trlx did not clip).

New beside trlx's: `train.{resume, keep_checkpoints, log_samples}`, `model.value_head`,
`tokenizer.truncate_prompts`, `optimizer.max_grad_norm`, `scheduler.warmup_steps`,
`method.{kl_estimator, approx_kl_stop, whiten_advantages}`.
"""

import difflib
import fnmatch
import json
import math
import numbers
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder


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
        "checkpoint_dir": "runs/jaxppo",  # the run folder; --workdir sets it
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
    }
    model = {
        "model_path": placeholder(str),  # a folder or a Hugging Face name
        "model_arch_type": "causal",
        "num_layers_unfrozen": -1,
        "value_head": "mlp",  # "linear" | "mlp"
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
        "name": "PPOConfig",
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
        "scale_reward": placeholder(str),  # None | "running" | "ref"
        "ref_mean": placeholder(float),  # with "ref"; None: of the first chunk
        "ref_std": placeholder(float),
        "cliprange_reward": FieldReference(10.0),  # None or 0: no clipping
        "kl_estimator": "k1",  # the penalty of a token: "k1" | "k2" | "k3" | "abs"
        "approx_kl_stop": placeholder(float),  # nats; past it, skip the cycle's remaining updates
        "whiten_advantages": True,
        "num_value_layers_unfrozen": 0,
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
        "gen_experience_kwargs": {  # for rollouts; None: as in gen_kwargs
            "max_new_tokens": placeholder(int),
            "min_new_tokens": placeholder(int),
            "do_sample": placeholder(bool),
            "temperature": placeholder(float),
            "top_k": placeholder(int),
            "top_p": placeholder(float),
            "min_p": placeholder(float),
            "eos_token_id": placeholder(object),
        },
    }
    sections = {
        "train": train,
        "model": model,
        "tokenizer": tokenizer,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "method": method,
    }
    return ConfigDict(sections)


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
    "method.name": {"ppo": "PPOConfig", "ppoconfig": "PPOConfig"},
    "method.scale_reward": {"ignored": None, "none": None, False: None},
    "train.tracker": {"none": None},
}

_ANY = object()  # any value is accepted: the option has no effect on results
_LENGTH = "use max_new_tokens and min_new_tokens, which do not count the prompt"

# Options of trlx and `generate` that have no counterpart here: the values (besides empty ones)
# that ask for nothing special and are passed over, and what to do about any other.
_FOREIGN = {
    "train.pipeline": ("promptpipeline", "prompts are passed to train(...); leave it out"),
    "train.trainer": ("accelerateppotrainer", "only PPO is supported so far; leave it out"),
    "train.trainer_kwargs": (None, "not supported; leave it out"),
    "train.logging_dir": (None, "logs go to the run folder; set train.checkpoint_dir"),
    "train.rollout_logging_dir": (None, "not supported yet; leave it out"),
    "train.resume_from_checkpoint": (
        None,
        "set train.checkpoint_dir to the run folder and train.resume to True",
    ),
    "model.peft_config": (None, "adapters are not supported yet; leave it out to train all layers"),
    "model.model_extra_configs": (None, "not supported; leave it out"),
    "tokenizer.tokenizer_extra_configs": (None, "not supported; leave it out"),
    "method.gen_kwargs.max_length": (None, _LENGTH),
    "method.gen_kwargs.min_length": (None, _LENGTH),
    "method.gen_kwargs.num_beams": (1, "beam search is not supported; use 1"),
    "method.gen_kwargs.num_return_sequences": (1, "not supported yet; use 1"),
    "method.gen_kwargs.repetition_penalty": (1, "not supported; use 1.0"),
    "method.gen_kwargs.no_repeat_ngram_size": (None, "not supported; use 0"),
    "method.gen_kwargs.typical_p": (1, "not supported; use 1.0"),
    "method.gen_kwargs.use_cache": (_ANY, ""),
    "method.gen_kwargs.pad_token_id": (_ANY, ""),
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


class Plan(NamedTuple):
    """What a run will do, if no update is skipped. All are counts.

    rollouts_per_cycle: samples, num_rollouts rounded up to whole chunks.
    chunks_per_cycle: calls of the sampler and of the reward function.
    optimizer_steps_per_cycle: ppo_epochs times the batches, of which the last may be smaller.
    cycles: rollouts and updates, each run whole, until total_steps are done or epochs are over.
    optimizer_steps: in all; may pass total_steps by less than one cycle.
    rollouts: samples in all.
    evaluations: before training, after each cycle in which one fell due, and at the end.
    prompts: how many there are.
    prompt_epochs: how often each prompt is sampled, on average.
    """

    rollouts_per_cycle: int
    chunks_per_cycle: int
    optimizer_steps_per_cycle: int
    cycles: int
    optimizer_steps: int
    rollouts: int
    evaluations: int
    prompts: int
    prompt_epochs: float


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
    per_cycle = method.ppo_epochs * math.ceil(rollouts / train.batch_size)
    cycles = min(train.epochs, math.ceil(train.total_steps / per_cycle))
    steps = cycles * per_cycle
    # A cycle holds at most one evaluation, and each multiple of the interval belongs to one cycle.
    evaluations = 1 + min(cycles, steps // train.eval_interval)
    evaluations += not due(train.eval_interval, steps - per_cycle, steps)
    return Plan(
        rollouts_per_cycle=rollouts,
        chunks_per_cycle=chunks,
        optimizer_steps_per_cycle=per_cycle,
        cycles=cycles,
        optimizer_steps=steps,
        rollouts=cycles * rollouts,
        evaluations=evaluations,
        prompts=num_prompts,
        prompt_epochs=cycles * rollouts / num_prompts,
    )


def plan_lines(plan: Plan, config: ConfigDict) -> list[tuple[str, str]]:
    """Returns the plan as (label, value) pairs in plain words, for a table in the console."""
    t, m = config.train, config.method
    steps = plan.optimizer_steps_per_cycle
    end = "train.total_steps is" if plan.optimizer_steps >= t.total_steps else "train.epochs are"
    up = "" if plan.rollouts_per_cycle == m.num_rollouts else f", up from {m.num_rollouts}"
    batch = f"{t.batch_size} samples a step"
    if rest := plan.rollouts_per_cycle % t.batch_size:
        batch += f", {rest} in the last step of an epoch"
    if t.minibatch_size:
        batch += f", {t.minibatch_size} at once in memory"
    kl = f"fixed at {m.init_kl_coef:g}"
    if m.target is not None:
        kl = f"{m.init_kl_coef:g} at first, adapted to reach {m.target:g} nats a sample"
    response = rollout_kwargs(config)["max_new_tokens"]
    best = " and the best" if t.save_best else ""
    chunks = f"{plan.chunks_per_cycle} x {m.chunk_size}{up}"
    updates = f"{m.ppo_epochs} epochs x {steps // m.ppo_epochs}"
    return [
        ("cycles", f"{plan.cycles}, until {end} reached"),
        ("rollouts", f"{plan.rollouts_per_cycle} a cycle ({chunks}), {plan.rollouts} in all"),
        ("optimizer steps", f"{steps} a cycle ({updates}), {plan.optimizer_steps} in all"),
        ("batch", batch),
        ("prompts", f"{plan.prompts}, each sampled {plan.prompt_epochs:.3g} times on average"),
        ("tokens", f"at most {t.seq_length - response} a prompt, {response} a response"),
        ("evaluations", f"{plan.evaluations}: first, every {t.eval_interval} steps, and last"),
        (
            "checkpoints",
            f"every {t.checkpoint_interval} steps and last, in {t.checkpoint_dir}; "
            f"kept: the newest {t.keep_checkpoints}{best}",
        ),
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
    return None if ids is None else _ids(ids)


def optimizer_kwargs(config: ConfigDict) -> dict[str, Any]:
    """Returns those of optimizer.kwargs that the optimizer of this name reads."""
    return {key: config.optimizer.kwargs[key] for key in OPTIMIZERS[config.optimizer.name]}


def scheduler_kwargs(config: ConfigDict) -> dict[str, Any]:
    """Returns those of scheduler.kwargs that the scheduler of this name reads."""
    return {key: config.scheduler.kwargs[key] for key in SCHEDULERS[config.scheduler.name]}


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
        scheduler.kwargs.total_iters method.gen*.max_new_tokens""",
    ),
    (
        "at least 0",
        lambda v: v >= 0,
        """train.log_samples method.init_kl_coef method.vf_coef method.cliprange_reward
        optimizer.max_grad_norm optimizer.kwargs.weight_decay scheduler.kwargs.eta_min
        scheduler.warmup_steps method.gen*.min_new_tokens method.gen*.temperature
        method.gen*.top_k""",
    ),
    (
        "above 0",
        lambda v: v > 0,
        """method.target method.cliprange method.cliprange_value method.approx_kl_stop
        method.ref_std optimizer.kwargs.lr optimizer.kwargs.eps""",
    ),
    ("from 0 to 1", lambda v: 0 <= v <= 1, "method.gamma method.lam scheduler.kwargs.end_factor"),
    (
        "above 0 and at most 1",
        lambda v: 0 < v <= 1,
        "scheduler.kwargs.start_factor method.gen*.top_p",
    ),
    (
        "at least 0 and below 1",
        lambda v: 0 <= v < 1,
        "optimizer.kwargs.momentum method.gen*.min_p",
    ),
    (
        "two numbers, each at least 0 and below 1",
        lambda v: len(v) == 2 and all(isinstance(b, (int, float)) and 0 <= b < 1 for b in v),
        "optimizer.kwargs.betas",
    ),
    ("a list of strings", lambda v: all(isinstance(tag, str) for tag in v), "train.tags"),
    ("from 0 to 4294967295", lambda v: 0 <= v < 2**32, "train.seed"),
    ("the path of a folder", bool, "train.checkpoint_dir"),
    (
        "-1 (train all layers), since other values are not supported yet",
        lambda v: v == -1,
        "model.num_layers_unfrozen",
    ),
    (
        "0 (a head on the last layer), since other values are not supported yet",
        lambda v: v == 0,
        "method.num_value_layers_unfrozen",
    ),
)

_CHOICES = {
    "train.tracker": (("tensorboard", "wandb"), "; JSON lines are written in any case"),
    "model.model_arch_type": (("causal",), "; encoder-decoder models are not supported yet"),
    "model.value_head": (("linear", "mlp"), ""),
    "tokenizer.padding_side": (("left",), ", since a response starts where its prompt ends"),
    "tokenizer.truncation_side": (("left", "right"), ""),
    "optimizer.name": (tuple(OPTIMIZERS), "; others are not supported yet"),
    "scheduler.name": (tuple(SCHEDULERS), "; others are not supported yet"),
    "method.name": (("PPOConfig",), "; other methods are not supported yet"),
    "method.scale_reward": (("running", "ref"), ""),
    "method.kl_estimator": (("k1", "k2", "k3", "abs"), ""),
}


def _value_problems(config: ConfigDict) -> Iterator[str]:
    """Yields a sentence for each option whose value alone is wrong."""
    for requirement, holds, paths in _RANGES:
        for pattern in paths.split():
            for path in fnmatch.filter(_paths(config), pattern) if "*" in pattern else [pattern]:
                value = config[path]
                if value is not None and not holds(value):
                    yield f"{path} must be {requirement}, got {value!r}"
    optional = {path for path, options in _ALIASES.items() if None in options.values()}
    for path, (choices, hint) in _CHOICES.items():
        choices = choices + (None,) * (path in optional)
        if config[path] not in choices:
            yield f"{path} must be {' or '.join(map(repr, choices))}, got {config[path]!r}{hint}"


def _contradictions(config: ConfigDict) -> Iterator[str]:
    """Yields a sentence for each pair of options that exclude each other."""
    t, m, o, s = (config[name] for name in ("train", "method", "optimizer", "scheduler"))
    if t.minibatch_size and t.batch_size % t.minibatch_size:
        yield (
            f"train.minibatch_size {t.minibatch_size} does not divide train.batch_size "
            f"{t.batch_size}; choose a divisor"
        )
    if m.chunk_size > 0 and t.batch_size > math.ceil(m.num_rollouts / m.chunk_size) * m.chunk_size:
        yield (
            f"train.batch_size {t.batch_size} exceeds the rollouts of a cycle, method.num_rollouts "
            f"{m.num_rollouts} in chunks of {m.chunk_size}; lower the one or raise the other"
        )
    if m.target is not None and m.init_kl_coef == 0:
        yield (
            f"method.target {m.target} asks for an adaptive KL coefficient, but one that starts at "
            "method.init_kl_coef 0 stays there; set it above 0, or target to None"
        )
    if (m.ref_mean is None) != (m.ref_std is None):
        yield (
            f"method.ref_mean and method.ref_std belong together, got {m.ref_mean} and "
            f"{m.ref_std}; give both, or neither to take them from the first chunk"
        )
    if m.ref_std is not None and m.scale_reward != "ref":
        yield (
            f"method.ref_std has no effect with method.scale_reward {m.scale_reward!r}; "
            "set scale_reward to 'ref', or ref_mean and ref_std to None"
        )
    if o.name == "sgd" and o.kwargs.nesterov and o.kwargs.momentum == 0:
        yield "optimizer.kwargs.nesterov needs optimizer.kwargs.momentum; set it above 0"
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
                yield (
                    f"{section}.kwargs.{key} has no effect with {section}.name {name!r}, "
                    f"which reads {', '.join(table[name]) or 'none'}; leave it out"
                )
    evaluation, rollout = m.gen_kwargs.to_dict(), _rollout_options(config)
    yield from _generation_problems("method.gen_kwargs", evaluation, t.seq_length)
    if rollout != evaluation:
        yield from _generation_problems("method.gen_experience_kwargs", rollout, t.seq_length)
    if not rollout["do_sample"]:
        yield (
            "rollouts must sample, but do_sample is False for them; "
            "set method.gen_experience_kwargs.do_sample to True"
        )


def _generation_problems(where: str, options: Mapping[str, Any], seq_length: int) -> Iterator[str]:
    longest, shortest = options["max_new_tokens"], options["min_new_tokens"]
    if shortest > longest:
        yield f"{where}.min_new_tokens {shortest} exceeds max_new_tokens {longest}; lower it"
    if longest >= seq_length:
        yield (
            f"{where}.max_new_tokens {longest} leaves no room for a prompt in train.seq_length "
            f"{seq_length}; lower the one or raise the other"
        )
    if options["do_sample"] and options["temperature"] == 0:
        yield (
            f"{where}.temperature must be above 0 to sample; set it so, or for greedy evaluations "
            "method.gen_kwargs.do_sample to False"
        )


# Reading overrides.


def _as_mapping(value: Any) -> Mapping[str, Any] | None:
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
        if foreign in _FOREIGN:
            harmless, advice = _FOREIGN[foreign]
            given = value.lower() if isinstance(value, str) else value
            if given and harmless is not _ANY and given != harmless:
                problems.append(f"{path} {value!r}: {advice}")
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


def _assign(config: ConfigDict, name: str, path: str, value: Any, optional: bool) -> str | None:
    """Writes one value in its right type, or returns the sentence that says why it cannot."""
    kind = config.get_type(name)
    what, convert = _KINDS[kind]
    if isinstance(value, (str, bool)):
        spelling = value.lower() if isinstance(value, str) else value
        value = _ALIASES.get(path, {}).get(spelling, value)
    if isinstance(value, (list, tuple)) and ".gen_" in path and kind is not object:
        return (
            f"{path} is a list, which trlx reads as a sweep of evaluations; "
            "this is not supported yet, give one value"
        )
    try:
        config[name] = None if value is None and optional else convert(value)
    except (TypeError, ValueError, OverflowError):
        return f"{path} must be {what}{' or None' if optional else ''}, got {value!r}"
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


def _integer(value: Any) -> int:
    if isinstance(value, str):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or value != int(value):
        raise TypeError
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, str)):
        raise TypeError
    if not math.isfinite(float(value)):
        raise ValueError
    return float(value)


def _string(value: Any) -> str:
    return os.fspath(value) + ""  # a bytes path fails here


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _sequence(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError
    return tuple(value)


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, numbers.Integral) and value == -1:  # trlx's way to say "never stop"
        return ()
    ids = tuple(_integer(i) for i in (value if isinstance(value, (list, tuple)) else (value,)))
    if any(i < 0 for i in ids):
        raise ValueError
    return ids


_KINDS = {
    int: ("an integer", _integer),
    float: ("a finite number", _number),
    str: ("a string", _string),
    bool: ("True or False", _boolean),
    tuple: ("a list", _sequence),
    object: ("a token id or a list of token ids", _ids),
}


# Small helpers.


def _raise(problems: list[str]) -> None:
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError("\n- ".join([f"{len(problems)} problems in the config:", *problems]))


def _paths(config: ConfigDict, prefix: str = ""):
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
