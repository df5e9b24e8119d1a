"""The config: overrides, types, rules, trlx's configs, the command line and the plan."""

import ast
import copy
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxppo import config as cfg
from jaxppo.config import ConfigError, default_config, make_config, plan, plan_lines, validate

# What trlx's default_ppo_config().to_dict() holds.
TRLX = {
    "method": {
        "name": "PPOConfig",
        "ppo_epochs": 4,
        "num_rollouts": 128,
        "chunk_size": 128,
        "init_kl_coef": 0.001,
        "target": None,
        "horizon": 10000,
        "gamma": 1,
        "lam": 0.95,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "vf_coef": 1,
        "scale_reward": "ignored",
        "ref_mean": None,
        "ref_std": None,
        "cliprange_reward": 10,
        "gen_kwargs": {"max_new_tokens": 40, "top_k": 0, "top_p": 1.0, "do_sample": True},
        "gen_experience_kwargs": None,
        "num_value_layers_unfrozen": 0,
    },
    "model": {
        "model_path": "lvwerra/gpt2-imdb",
        "model_arch_type": "causal",
        "num_layers_unfrozen": 2,
        "peft_config": None,
        "model_extra_configs": {},
    },
    "optimizer": {
        "name": "adamw",
        "kwargs": {"lr": 3e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 1e-6},
    },
    "scheduler": {"name": "cosine_annealing", "kwargs": {"T_max": 1e12, "eta_min": 3e-5}},
    "tokenizer": {
        "tokenizer_path": "gpt2",
        "padding_side": "left",
        "truncation_side": "right",
        "tokenizer_extra_configs": {},
    },
    "train": {
        "total_steps": 10000,
        "seq_length": 1024,
        "epochs": 100,
        "batch_size": 32,
        "checkpoint_interval": 10000,
        "eval_interval": 100,
        "pipeline": "PromptPipeline",
        "trainer": "AcceleratePPOTrainer",
        "trainer_kwargs": {},
        "project_name": "trlx",
        "run_name": None,
        "entity_name": None,
        "group_name": None,
        "checkpoint_dir": "ckpts",
        "rollout_logging_dir": None,
        "save_best": True,
        "save_optimizer": True,
        "resume_from_checkpoint": None,
        "tracker": "wandb",
        "logging_dir": None,
        "tags": [],
        "seed": 1000,
        "minibatch_size": None,
    },
}


def problems(overrides):
    """Returns the sentences that make_config and validate find, one a problem."""
    with pytest.raises(ConfigError) as error:
        validate(make_config(overrides))
    first, *rest = str(error.value).split("\n- ")
    assert not rest or first == f"{len(rest)} problems in the config:"
    return rest or [first]


def test_defaults_are_valid_fresh_and_trlxs():
    config = default_config()
    validate(config)
    assert make_config().to_dict() == make_config({}).to_dict() == config.to_dict()
    config.method.ppo_epochs = 1
    config.method.target = 6.0
    assert default_config().method.ppo_epochs == 4
    assert default_config().method.target is None
    theirs = {**TRLX, "model": {**TRLX["model"], "num_layers_unfrozen": -1}}
    theirs = make_config(theirs).to_dict()
    for section in ("method", "optimizer", "scheduler"):
        assert theirs[section] == default_config()[section].to_dict()


def test_a_trlx_config_is_read_as_it_is():
    config = make_config(TRLX)
    validate(config)
    assert config.model.num_layers_unfrozen == 2
    assert config.model.model_path == "lvwerra/gpt2-imdb"
    assert config.train.tracker == "wandb"
    assert config.method.scale_reward is None
    assert isinstance(config.method.vf_coef, float)
    assert "pipeline" not in config.train


def test_a_peft_config_is_read_as_lora():
    theirs = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 32}
    theirs |= {"lora_dropout": 0.0, "bias": "none", "target_modules": {"v_proj", "q_proj"}}
    lora = make_config({"model.peft_config": theirs}).model.lora
    assert lora.to_dict() == {"rank": 4, "alpha": 32.0, "targets": ("q_proj", "v_proj")}


def test_objects_with_to_dict_are_read():
    class TRLConfig:
        def to_dict(self):
            return {"method": {"ppo_epochs": 2}, "model": {"peft_config": None}}

    assert make_config(TRLConfig()).method.ppo_epochs == 2


@pytest.mark.parametrize(
    ("overrides", "path", "expected"),
    [
        ({"method": {"ppo_epochs": 2}}, "method.ppo_epochs", 2),
        ({"method.ppo_epochs": 2}, "method.ppo_epochs", 2),
        ({"method": {"gen_kwargs.top_k": 3}}, "method.gen_kwargs.top_k", 3),
        ({"method": {"ppo_epochs": 2}, "method.ppo_epochs": 3}, "method.ppo_epochs", 3),
        ({"train.total_steps": 1e4}, "train.total_steps", 10000),
        ({"train.total_steps": "1e4"}, "train.total_steps", 10000),
        ({"train.total_steps": np.int64(7)}, "train.total_steps", 7),
        ({"optimizer.kwargs.lr": "1e-5"}, "optimizer.kwargs.lr", 1e-5),
        ({"optimizer.kwargs.lr": np.float32(0.5)}, "optimizer.kwargs.lr", 0.5),
        ({"optimizer.kwargs.betas": [0.9, 0.99]}, "optimizer.kwargs.betas", (0.9, 0.99)),
        ({"method.target": 6}, "method.target", 6.0),
        ({"method.target": None}, "method.target", None),
        ({"optimizer.max_grad_norm": None}, "optimizer.max_grad_norm", None),
        ({"method.cliprange_reward": None}, "method.cliprange_reward", None),
        ({"method.scale_reward": "ignored"}, "method.scale_reward", None),
        ({"method.scale_reward": False}, "method.scale_reward", None),
        ({"train.tracker": "None"}, "train.tracker", None),
        ({"method.name": "ppoconfig"}, "method.name", "PPOConfig"),
        ({"method.name": "ppo"}, "method.name", "PPOConfig"),
        ({"train.tags": ["a", "b"]}, "train.tags", ("a", "b")),
        ({"model.model_path": Path("a/b")}, "model.model_path", "a/b"),
        ({"method.gen_kwargs.eos_token_id": 5}, "method.gen_kwargs.eos_token_id", (5,)),
        ({"method.gen_kwargs.eos_token_id": [5, 6]}, "method.gen_kwargs.eos_token_id", (5, 6)),
        ({"method.gen_kwargs.eos_token_id": -1}, "method.gen_kwargs.eos_token_id", ()),
        ({"tokenizer": None, "train.batch_size": 8}, "train.batch_size", 8),
        ({"method.gen_kwargs": {"use_cache": True, "num_beams": 1}}, "method.ppo_epochs", 4),
        ({"method.gen_kwargs.pad_token_id": 7}, "method.ppo_epochs", 4),
        (ConfigDict({"method": {"ppo_epochs": 2}}), "method.ppo_epochs", 2),
    ],
)
def test_overrides(overrides, path, expected):
    before = copy.deepcopy(overrides)
    config = make_config(overrides)
    validate(config)
    assert config[path] == expected
    assert type(config[path]) is type(expected)
    assert overrides == before


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"method.ppo_epoch": 4},
            "unknown option method.ppo_epoch; did you mean method.ppo_epochs?",
        ),
        (
            {"method": {"gen_kwargs": {"temprature": 1}}},
            "did you mean method.gen_kwargs.temperature?",
        ),
        ({"method": {"gen_experience_kwargs": {"topk": 1}}}, "method.gen_experience_kwargs.top_k?"),
        ({"train.lr": 1e-4}, "unknown option train.lr; did you mean optimizer.kwargs.lr?"),
        ({"ppo_epochs": 4}, "did you mean method.ppo_epochs?"),
        ({"methods": {"ppo_epochs": 4}}, "unknown option methods; did you mean method?"),
        (
            {"model.xyz": 1},
            "unknown option model.xyz; model has: compute_dtype, critic_path, ",
        ),
        ({"xyz": 1}, "the sections are: environment, method, model, "),
        ({3: 1}, "unknown option 3"),
        ({"method.ppo_epochs": "two"}, "method.ppo_epochs must be an integer, got 'two'"),
        ({"method.ppo_epochs": 2.5}, "method.ppo_epochs must be an integer, got 2.5"),
        ({"method.ppo_epochs": True}, "method.ppo_epochs must be an integer, got True"),
        ({"method.ppo_epochs": None}, "method.ppo_epochs must be an integer, got None"),
        ({"method.ppo_epochs.x": 1}, "method.ppo_epochs must be an integer, got {'x': 1}"),
        ({"method.ppo_epochs": float("inf")}, "method.ppo_epochs must be an integer"),
        ({"method.gamma": True}, "method.gamma must be a finite number, got True"),
        ({"method.gamma": "nan"}, "method.gamma must be a finite number, got 'nan'"),
        ({"method.target": "x"}, "method.target must be a finite number or None, got 'x'"),
        ({"train.resume": 1}, "train.resume must be True or False, got 1"),
        ({"train.project_name": 1}, "train.project_name must be a string, got 1"),
        ({"train.tags": "a"}, "train.tags must be a list, got 'a'"),
        ({"train.tags": [1]}, "train.tags must be a list of strings"),
        (
            {"method.gen_kwargs.eos_token_id": "a"},
            "must be a token id or a list of token ids or None",
        ),
        ({"method.gen_kwargs.eos_token_id": [-2]}, "must be a token id or a list of token ids"),
        ({"method": 3}, "method is a section and must be a mapping, got 3"),
        # trlx's options that are not there
        (
            {"method.gen_kwargs.top_k": [1, 2]},
            "method.gen_kwargs.top_k is a list, which trlx reads",
        ),
        ({"model.peft_config": {"peft_type": "PREFIX_TUNING"}}, "only LORA is supported"),
        ({"model.peft_config": {"r": 8, "lora_dropout": 0.1}}, "peft_config.lora_dropout is not"),
        ({"model.lora.rank": 8, "model.num_layers_unfrozen": 2}, "model.lora trains adapters only"),
        (
            {"model.critic_path": "a", "method.num_value_layers_unfrozen": 1},
            "two ways to get values",
        ),
        ({"model.model_extra_configs": {"a": 1}}, "model.model_extra_configs is"),
        ({"train.trainer": "AccelerateRFTTrainer"}, "only PPO is supported so far"),
        ({"train.pipeline": "Mine"}, "prompts are passed to train(...)"),
        ({"train.trainer_kwargs": {"a": 1}}, "train.trainer_kwargs is"),
        ({"train.logging_dir": "x"}, "set train.checkpoint_dir"),
        ({"train.rollout_logging_dir": "x"}, "not supported yet"),
        ({"train.resume_from_checkpoint": "x"}, "set train.checkpoint_dir"),
        ({"tokenizer.tokenizer_extra_configs": {"a": 1}}, "tokenizer_extra_configs is"),
        ({"method.gen_experience_kwargs.num_beams": 4}, "beam search is not supported"),
        ({"method.gen_kwargs.max_length": 4}, "use max_new_tokens"),
        ({"method.gen_kwargs.repetition_penalty": 1.2}, "use 1.0"),
        ({"model.model_arch_type": "seq2seq"}, "encoder-decoder models are not supported yet"),
        ({"model.num_layers_unfrozen": -2}, "must be -1 (all layers) or a number of layers"),
        ({"method.num_value_layers_unfrozen": -1}, "must be at least 0"),
        ({"method.name": "ILQLConfig"}, "method.name must be 'PPOConfig' or 'grpo' or"),
        ({"optimizer.name": "adamw_8bit_bnb"}, "must be 'adam' or 'adamw' or 'sgd', got"),
        # choices
        ({"train.tracker": "mlflow"}, "train.tracker must be 'tensorboard' or 'wandb' or None"),
        ({"model.value_head": "none"}, "model.value_head must be 'linear' or 'mlp'"),
        ({"tokenizer.padding_side": "right"}, "padding_side must be 'left', got 'right', since"),
        ({"tokenizer.truncation_side": "up"}, "tokenizer.truncation_side must be"),
        ({"scheduler.name": "cosine"}, "scheduler.name must be 'cosine_annealing' or"),
        (
            {"method.scale_reward": "whiten"},
            "method.scale_reward must be 'running' or 'ref' or 'ref_centred'",
        ),
        ({"method.kl_estimator": "k4"}, "method.kl_estimator must be"),
        # contradictions
        ({"train.minibatch_size": 5}, "train.minibatch_size 5 must divide train.batch_size 32"),
        ({"train.batch_size": 200}, "train.batch_size 200 exceeds the rollouts of a cycle"),
        ({"method.target": 6, "method.init_kl_coef": 0}, "stays there"),
        (
            {"method.ref_mean": 1, "method.scale_reward": "ref"},
            "ref_mean and method.ref_std belong together",
        ),
        ({"method.ref_mean": 1, "method.ref_std": 1}, "method.ref_std has no effect unless"),
        ({"optimizer.kwargs.momentum": 0.9}, "momentum has no effect with 'adamw'; leave it out"),
        ({"optimizer": {"name": "sgd", "kwargs": {"betas": [0, 0]}}}, "has no effect with 'sgd'"),
        ({"optimizer": {"name": "sgd", "kwargs": {"nesterov": True}}}, "momentum above 0"),
        ({"scheduler.kwargs.total_iters": 10}, "has no effect with 'cosine_annealing'"),
        ({"scheduler.kwargs.T_max": 1000, "optimizer.kwargs.lr": 1e-5}, "lower eta_min"),
        ({"method.gen_kwargs.min_new_tokens": 41}, "must not exceed max_new_tokens, which is 40"),
        (
            {"method.gen_experience_kwargs.min_new_tokens": 41},
            "gen_experience_kwargs.min_new_tokens must not exceed",
        ),
        ({"train.seq_length": 40}, "leaves no room for a prompt in train.seq_length 40"),
        (
            {"method.gen_experience_kwargs.max_new_tokens": 2000},
            "gen_experience_kwargs.max_new_tokens 2000 leaves no room",
        ),
        ({"method.gen_kwargs.temperature": 0}, "method.gen_kwargs.temperature must be above 0"),
        ({"method.gen_kwargs.do_sample": False}, "rollouts must sample; set"),
        ({"method.gen_experience_kwargs.do_sample": False}, "rollouts must sample; set"),
    ],
)
def test_one_sentence_for_one_mistake(overrides, sentence):
    (problem,) = problems(overrides)
    assert sentence in problem


@pytest.mark.parametrize(
    ("requirement", "values"),
    [
        (
            "at least 1",
            {
                **dict.fromkeys(["train.total_steps", "train.seq_length", "train.epochs"], 0),
                **dict.fromkeys(["train.batch_size", "train.minibatch_size"], 0),
                **dict.fromkeys(["train.eval_interval", "train.checkpoint_interval"], 0),
                **dict.fromkeys(["train.keep_checkpoints", "method.ppo_epochs"], 0),
                **dict.fromkeys(["method.num_rollouts", "method.chunk_size", "method.horizon"], 0),
                **dict.fromkeys(["scheduler.kwargs.T_max", "scheduler.kwargs.total_iters"], 0),
                "method.gen_kwargs.max_new_tokens": 0,
                "method.gen_experience_kwargs.max_new_tokens": 0,
            },
        ),
        (
            "at least 0",
            {
                **dict.fromkeys(["train.log_samples", "scheduler.warmup_steps"], -1),
                **dict.fromkeys(["method.init_kl_coef", "method.vf_coef"], -0.1),
                **dict.fromkeys(["method.cliprange_reward", "optimizer.max_grad_norm"], -0.1),
                **dict.fromkeys(["optimizer.kwargs.weight_decay"], -0.1),
                **dict.fromkeys(["scheduler.kwargs.eta_min"], -0.1),
                "method.gen_kwargs.min_new_tokens": -1,
                "method.gen_kwargs.temperature": -1,
                "method.gen_experience_kwargs.top_k": -1,
            },
        ),
        (
            "above 0",
            {
                **dict.fromkeys(["method.target", "method.cliprange", "method.cliprange_value"], 0),
                **dict.fromkeys(["method.approx_kl_stop", "method.ref_std"], 0),
                **dict.fromkeys(["optimizer.kwargs.lr", "optimizer.kwargs.eps"], 0),
            },
        ),
        (
            "from 0 to 1",
            {"method.gamma": 1.01, "method.lam": -0.1, "scheduler.kwargs.end_factor": 2},
        ),
        (
            "above 0, at most 1",
            {
                "method.gen_kwargs.top_p": 0,
                "method.gen_experience_kwargs.top_p": 1.5,
                "scheduler.kwargs.start_factor": 0,
            },
        ),
        ("at least 0, below 1", {"method.gen_kwargs.min_p": 1, "optimizer.kwargs.momentum": 1}),
        ("two numbers at least 0, below 1", {"optimizer.kwargs.betas": (0.9,)}),
        ("two numbers at least 0, below 1", {"optimizer.kwargs.betas": (0.9, 1.0)}),
        ("two numbers at least 0, below 1", {"optimizer.kwargs.betas": ("a", "b")}),
        ("from 0 to 4294967295", {"train.seed": -1}),
        ("the path of a folder", {"train.checkpoint_dir": ""}),
    ],
)
def test_ranges(requirement, values):
    for path, value in values.items():
        assert any(
            p.startswith(f"{path} must be {requirement}, got") for p in problems({path: value})
        )


@pytest.mark.parametrize("path", ["train.epochs", "method.horizon", "scheduler.warmup_steps"])
def test_counters_have_32_bits(path):
    assert problems({path: 2**31}) == [f"{path} must be below {2**31}, got {2**31}"]
    validate(make_config({path: 2**31 - 1}))


@pytest.mark.parametrize(
    "overrides",
    [
        {"method.gamma": 0, "method.lam": 0, "method.vf_coef": 0, "method.init_kl_coef": 0},
        {"method.cliprange_reward": 0, "optimizer.max_grad_norm": 0},
        {"method.scale_reward": "ref"},
        {"method.scale_reward": "ref", "method.ref_mean": 0, "method.ref_std": 2},
        {"method": {"gen_kwargs.do_sample": False, "gen_experience_kwargs.do_sample": True}},
        {"optimizer": {"name": "sgd", "kwargs": {"momentum": 0.9, "nesterov": True}}},
        {"scheduler": {"name": "linear", "kwargs": {"total_iters": 9, "end_factor": 0}}},
        {"scheduler": {"name": "constant"}},
        {"optimizer.kwargs.lr": 1e-6},  # below eta_min, which T_max 1e12 keeps out of play
        {"train.batch_size": 140, "method.chunk_size": 20},
        {"train.minibatch_size": 32},
        {"method.gen_kwargs.max_new_tokens": 9, "train.seq_length": 10},
    ],
)
def test_the_edges_are_valid(overrides):
    validate(make_config(overrides))


def test_all_problems_come_together():
    found = problems({"method.ppo_epochs": 0, "method.gamma": 2, "train.minibatch_size": 5})
    assert len(found) == 3
    with pytest.raises(ConfigError, match=r"^2 problems in the config:\n- unknown .*\n- .*integer"):
        make_config({"method.x": 1, "train.seed": "x"})


def test_a_config_file_that_bypasses_make_config_is_checked():
    config = default_config()
    config.method.ppo_epoch = 4
    config.method.lam = None
    config.train.batch_size = True
    del config.method.gamma
    del config.tokenizer
    with pytest.raises(ConfigError) as error:
        validate(config)
    for sentence in (
        "unknown option method.ppo_epoch; did you mean method.ppo_epochs?",
        "method.lam must be a finite number, got None",
        "train.batch_size must be an integer, got True",
        "method.gamma is missing; make_config fills in its default",
        "tokenizer is missing",
    ):
        assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("flag", "path", "expected"),
    [
        ("method.ppo_epochs=2", "method.ppo_epochs", 2),
        ("method.target=6", "method.target", 6.0),
        ("train.minibatch_size=8", "train.minibatch_size", 8),
        ("train.tracker=wandb", "train.tracker", "wandb"),
        ("train.tags=('a', 'b')", "train.tags", ("a", "b")),
        ("train.save_best=false", "train.save_best", False),
        ("optimizer.kwargs.betas=(0.9, 0.99)", "optimizer.kwargs.betas", (0.9, 0.99)),
        ("optimizer.max_grad_norm=0.5", "optimizer.max_grad_norm", 0.5),
        ("method.gen_kwargs.eos_token_id=7", "method.gen_kwargs.eos_token_id", (7,)),
        ("method.gen_kwargs.eos_token_id=(7, 8)", "method.gen_kwargs.eos_token_id", (7, 8)),
        ("method.gen_experience_kwargs.top_p=0.9", "method.gen_experience_kwargs.top_p", 0.9),
        (
            "method.gen_experience_kwargs.do_sample=true",
            "method.gen_experience_kwargs.do_sample",
            True,
        ),
    ],
)
def test_command_line(flag, path, expected, tmp_path, monkeypatch):
    file = tmp_path / "experiment.py"
    file.write_text(
        "from jaxppo.config import default_config\n"
        "def get_config():\n"
        "    config = default_config()\n"
        "    config.method.num_rollouts = 64\n"
        "    return config\n"
    )
    argv = ["prog", f"--config={file}", f"--config.{flag}"]
    monkeypatch.setattr(sys, "argv", argv)  # config_flags reads the overrides from there
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values)
    values(argv)
    config = make_config(values.config)
    validate(config)
    assert config[path] == expected
    assert type(config[path]) is type(expected)
    assert config.method.num_rollouts == 64


RANDOMWALKS = {
    "train": {"seq_length": 10, "epochs": 20, "batch_size": 100, "eval_interval": 20},
    "method": {"num_rollouts": 128, "chunk_size": 20, "gen_kwargs": {"max_new_tokens": 9}},
}


def test_plan_by_hand():
    config = make_config(RANDOMWALKS)
    found = plan(config, 20)
    assert found == (140, 7, 8, 20, 160, 2800, 9, 20, 140.0)
    assert found._fields[2] == "optimizer_steps_per_cycle"
    # 10 steps need two cycles of 8; evaluated at 0 and at the end.
    config.train.total_steps = 10
    found = plan(config, 1000)
    assert (found.cycles, found.optimizer_steps, found.evaluations) == (2, 16, 2)
    assert found.prompt_epochs == 0.28
    with pytest.raises(ConfigError, match="no prompts"):
        plan(config, 0)


@pytest.mark.parametrize("interval", [1, 3, 8, 11, 16, 20, 1000])
@pytest.mark.parametrize("epochs", [1, 2, 7])
def test_plan_counts_the_evaluations_of_a_loop(interval, epochs):
    config = make_config(RANDOMWALKS)
    config.train.eval_interval, config.train.epochs = interval, epochs
    found, done, evaluations = plan(config, 20), 0, 1
    for cycle in range(found.cycles):
        before, done = done, done + found.optimizer_steps_per_cycle
        evaluations += cfg.due(interval, before, done) or cycle == found.cycles - 1
    assert (found.evaluations, found.optimizer_steps) == (evaluations, done)


def test_plan_lines():
    config = make_config(RANDOMWALKS)
    lines = dict(plan_lines(plan(config, 20), config))
    assert lines["cycles"] == "20, then train.epochs ends the run"
    assert lines["rollouts"] == "140 a cycle (7 x 20, up from 128), 2800 in all"
    assert lines["optimizer steps"] == "8 a cycle (4 epochs x 2), 160 in all"
    assert lines["batch"] == "100 samples a step, 40 in the last step of an epoch"
    assert lines["prompts"] == "20, each sampled 140 times on average"
    assert lines["tokens"] == "at most 1 a prompt, 9 a response"
    assert lines["scores"] == "clipped at +-10"
    assert lines["KL coefficient"] == "fixed at 0.001"
    config.train.total_steps, config.method.target, config.train.minibatch_size = 8, 6, 50
    lines = dict(plan_lines(plan(config, 20), config))
    assert lines["cycles"] == "1, then train.total_steps ends the run"
    assert lines["batch"].endswith(", 50 at once in memory")
    assert lines["KL coefficient"] == "0.001 at first, adapted to reach 6 nats a sample"


def test_generation_options():
    config = make_config(
        {
            "method.gen_kwargs": {"do_sample": False, "top_k": 5, "eos_token_id": 7},
            "method.gen_experience_kwargs": {"do_sample": True, "temperature": 0.7},
        }
    )
    same = {"max_new_tokens": 40, "min_new_tokens": 0, "top_k": 5, "top_p": 1.0, "min_p": 0.0}
    assert cfg.eval_kwargs(config) == same | {"temperature": 0.0}
    assert cfg.rollout_kwargs(config) == same | {"temperature": 0.7}
    assert cfg.stop_ids(config, rollouts=True) == cfg.stop_ids(config, rollouts=False) == (7,)
    config.method.gen_experience_kwargs.eos_token_id = ()
    assert cfg.stop_ids(config, rollouts=True) == ()
    assert cfg.stop_ids(default_config(), rollouts=True) is None


def test_kwargs_are_those_that_are_read():
    config = make_config({"optimizer.name": "sgd", "scheduler.name": "linear"})
    assert cfg.optimizer_kwargs(config) == {
        "lr": 3e-5,
        "momentum": 0.0,
        "nesterov": False,
        "weight_decay": 1e-6,
    }
    assert cfg.scheduler_kwargs(config) == {
        "start_factor": 1 / 3,
        "end_factor": 1.0,
        "total_iters": 5,
    }


def test_json_is_stable_and_reads_back():
    overrides = {"train.tags": ["a"], "method.target": 6, "method.gen_kwargs.eos_token_id": [1, 2]}
    config = make_config(overrides)
    text = cfg.to_json(config)
    back = make_config(json.loads(text))
    assert back.to_dict() == config.to_dict()
    assert cfg.to_json(back) == text
    assert text.endswith("}\n")


def test_nothing_heavy_is_imported():
    nodes = list(ast.walk(ast.parse(Path(cfg.__file__).read_text())))
    found = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    found = {name.partition(".")[0] for name in found}
    assert found - sys.stdlib_module_names == {"jaxppo", "ml_collections"}
