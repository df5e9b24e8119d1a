"""Methods in the loop: each trains, learns or is refused, and resumes bit for bit."""

import jax
import numpy as np
import pytest
from helpers_train import PROMPTS, letter_share, make_tiny_config, read_lines, save_model

from jaxppo import ConfigError, train
from jaxppo.config import make_config, row, validate
from jaxppo.methods import METHODS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "policy")


def run(model, folder, reward=letter_share, **options):
    options = {"method__group_size": 4, "train__total_steps": 8, **options}
    return train(model, reward, PROMPTS, config=make_tiny_config(folder, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"method__name": "grpo"},
        {"method__name": "gspo", "method__clip_high": 0.3, "method__mask_truncated": True},
        {"method__name": "rft", "method__overlong_buffer": 2, "method__missing_eos_penalty": 0.5},
        {"method__name": "dapo", "method__entropy_coef": 0.01, "method__entropy_share": 0.5},
        {"method__name": "ppo", "method__kl_in": "loss", "method__group_size": 1},
    ],
    ids=lambda options: options["method__name"],
)
def test_a_method_trains(options, folder, tmp_path):
    trained = run(folder, tmp_path, **options)
    rows = read_lines(tmp_path / "metrics.jsonl")
    losses = [row["losses/total_loss"] for row in rows if "losses/total_loss" in row]
    assert len(losses) == 2
    assert np.isfinite(losses).all()
    assert ("value_head" in trained.params) == (options["method__name"] == "ppo")
    kl_in_loss = options["method__name"] == "grpo" or "method__kl_in" in options
    assert any("losses/kl_loss" in row for row in rows) == kl_in_loss


def test_samples_of_a_prompt_stand_together_and_are_compared(folder, tmp_path):
    seen = []

    def reward(prompts, outputs, **_):
        seen.append(prompts)
        return letter_share(outputs)

    run(folder, tmp_path, reward, method__name="grpo", train__total_steps=4)
    rollout = np.reshape(seen[1], (4, 4))  # 0 is the evaluation
    assert (rollout == rollout[:, :1]).all()
    assert len(set(rollout[:, 0])) == 4


def test_groups_of_equal_rewards_teach_nothing(folder, tmp_path):
    trained = run(
        folder, tmp_path, lambda outputs, **_: [0.3] * len(outputs), method__name="dapo",
        optimizer__kwargs__weight_decay=0.0,
    )  # fmt: skip
    from jaxppo import load_pretrained

    _, start, _ = load_pretrained(folder)
    jax.tree.map(np.testing.assert_array_equal, trained.params, start)
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert {r["rollout/groups_with_signal"] for r in rows if "losses/total_loss" in r} == {0.0}


def test_grpo_learns(folder, tmp_path):
    trained = run(
        folder, tmp_path, method__name="grpo", train__total_steps=80, method__init_kl_coef=0.0,
        train__eval_interval=80,
    )  # fmt: skip
    figures = trained.summary["reward/mean"]
    assert figures["after"] > figures["before"] + 0.25


def test_a_killed_run_of_a_method_goes_on_bit_for_bit(folder, tmp_path):
    calls = []

    def failing(outputs, **_):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return letter_share(outputs)

    options = {
        "method__name": "grpo", "method__target": 0.5, "method__entropy_target": 2.0,
        "train__checkpoint_interval": 4, "train__total_steps": 16,
    }  # fmt: skip
    whole = run(folder, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "killed", failing, **options)
    resumed = run(folder, tmp_path / "killed", **options)
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)


def test_rows_follow_the_config():
    grpo = row(make_config({"method.name": "grpo", "method.group_size": 4}))
    assert grpo._replace(clip=None) == METHODS["grpo"]._replace(clip=None)
    assert grpo.clip.keywords == {}
    config = {"method.name": "grpo", "method.kl_in": "reward", "method.kl_estimator": "k2"}
    assert tuple(row(make_config(config)).kl) == ("k2", None)
    config = {"method.name": "dapo", "method.kl_in": "loss", "method.kl_loss_estimator": "k2"}
    assert tuple(row(make_config(config)).kl) == (None, "k2")
    assert row(make_config({"method.name": "dapo", "method.clip_high": 0.5})).clip.keywords == {
        "low": 0.2,
        "high": 0.5,
    }


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method.name": "grpo"}, "of which there is one"),
        ({"method.group_size": 3}, "must divide method.num_rollouts"),
        ({"method.dynamic_rounds": 2}, "has no groups; set it to 0"),
        (
            {"method.name": "rloo", "method.group_size": 4, "optimizer.critic_lr": 1e-3},
            "optimizer.critic_lr has no effect with 'rloo'",
        ),
        (
            {"method.name": "cispo", "method.group_size": 4, "method.clip_low": 0.1},
            "no effect with 'cispo'",
        ),
        ({"method.overlong_buffer": 41}, "longer than a response"),
    ],
)
def test_what_contradicts_is_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        validate(make_config(options))
