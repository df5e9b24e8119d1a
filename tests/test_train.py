"""The loop: it learns, it tells, it compiles once, and it resumes bit for bit."""

import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import helpers_train
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_train import (
    EOS,
    LETTERS,
    PROMPTS,
    letter_share,
    make_tiny_config,
    read_lines,
    save_model,
    train_resumably,
)

from jaxppo import ConfigError, RewardError, TrainingError, load_pretrained, train
from jaxppo.checkpoint import latest_step


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "gpt2")


@pytest.fixture(scope="module")
def learned(model_path, tmp_path_factory):
    """A run long enough to learn."""
    folder = tmp_path_factory.mktemp("learned")
    config = make_tiny_config(
        folder, train__total_steps=32, method__num_rollouts=64, method__chunk_size=64,
        train__batch_size=32, train__eval_interval=8, method__target=20.0,
        method__init_kl_coef=0.001,
    )  # fmt: skip
    return train(
        model_path,
        letter_share,
        PROMPTS,
        eval_prompts=PROMPTS * 6,
        metric_fn=lambda outputs, **_: {"length": [len(x) for x in outputs], "constant": 3},
        config=config,
    )


@pytest.fixture(scope="module")
def uninterrupted(model_path, tmp_path_factory):
    return train_resumably(model_path, tmp_path_factory.mktemp("uninterrupted"))


def rows(folder, name="metrics"):
    """Rows of cycles and of evaluations."""
    everything = read_lines(Path(folder) / f"{name}.jsonl")
    is_evaluation = lambda row: "reward/mean" in row or "time/generate" in row  # noqa: E731
    return (
        [row for row in everything if not is_evaluation(row)],
        [row for row in everything if is_evaluation(row)],
    )


def files(folder):
    """The bytes of what a seed determines."""
    names = ("metrics.jsonl", "samples.jsonl", "summary.json")
    names += ("model/model.safetensors", "model/value_head.safetensors")
    names += ("best_model/model.safetensors",)
    return {name: (Path(folder) / name).read_bytes() for name in names}


def same_files(a, b):
    a, b = files(a), files(b)
    return [name for name in a if a[name] != b[name]] == []


# what a run does and tells


def test_training_raises_the_reward(learned):
    before, after = learned.summary["reward/mean"].values()
    assert before < 0.35
    assert after > before + 0.3
    _, evaluations = rows(learned.folder)
    assert evaluations[0]["reward/mean"] == before
    assert evaluations[-1]["reward/mean"] == after
    assert json.loads((learned.folder / "summary.json").read_text()) == learned.summary


def test_rows_come_every_cycle_and_evaluations_at_their_steps(learned):
    cycles, evaluations = rows(learned.folder)
    assert [row["step"] for row in cycles] == [4, 8, 12, 16, 20, 24, 28, 32]
    assert [row["step"] for row in evaluations] == [0, 8, 16, 24, 32]
    samples = read_lines(learned.folder / "samples.jsonl")
    assert [row["step"] for row in samples] == sorted([0, 8, 16, 24, 32] * 60)
    for step, evaluation in zip([0, 8, 16, 24, 32], evaluations):
        rewards = [row["reward"] for row in samples if row["step"] == step]
        np.testing.assert_allclose(np.mean(rewards), evaluation["reward/mean"], rtol=1e-5)
    for row in samples:
        np.testing.assert_allclose(row["reward"], letter_share([row["output"]])[0], rtol=1e-6)
        assert row["length"] == len(row["output"])


# trlx's names first, then what is new
CYCLE_KEYS = """
    losses/total_loss losses/policy_loss losses/value_loss values/mean values/values_error
    values/clipfrac old_values/mean returns/mean policy/approx_kl policy/clipfrac ratio
    rollout_scores/mean rollout_scores/std rollout_scores/running_mean rollout_scores/running_std
    policy/sqrt_kl policy/kl_per_token kl_ctl_value padding_percentage learning_rate_group_0
    policy/kl policy/entropy rollout/response_length rollout/ended rollout/truncated rollout/empty
    rollout/logprob_gap rollout/reward_after_kl optimizer/grad_norm optimizer/steps
    values/explained_variance
"""
TIME_KEYS = """
    time/rollout_generate time/rollout_score time/rollout_time time/update time/cycle
    perf/rollout_tokens_per_s perf/tokens_per_s perf/compiles
"""


def test_metrics_have_their_names(learned):
    cycles, evaluations = rows(learned.folder)
    timings, evaluation_timings = rows(learned.folder, "timing")
    for row in cycles:
        assert set(CYCLE_KEYS.split()) <= row.keys()
    for row in timings:
        assert set(TIME_KEYS.split()) <= row.keys()
    for row in evaluations:
        assert {"reward/mean", "reward/std", "metrics/length", "metrics/constant"} <= row.keys()
        assert {"eval/kl", "eval/entropy", "eval/response_length"} <= row.keys()
        assert row["metrics/constant"] == 3
    assert {"time/generate", "time/metric"} <= evaluation_timings[0].keys()
    assert not any(key.startswith(("time/", "perf/")) for row in cycles for key in row)


def test_metrics_have_their_meaning(learned):
    cycles, evaluations = rows(learned.folder)
    first, last = cycles[0], cycles[-1]
    assert first["policy/kl"] == 0
    assert evaluations[0]["eval/kl"] == 0
    assert last["policy/kl"] > 0.5
    assert first["kl_ctl_value"] == pytest.approx(0.001)
    # far below its target of 20 nats, the coefficient falls by 0.2 * 64 / 10000 a cycle
    assert cycles[1]["kl_ctl_value"] == pytest.approx(0.001 * (1 - 0.2 * 64 / 10000), rel=1e-5)
    for row in cycles:
        assert row["optimizer/steps"] == 4
        assert row["learning_rate_group_0"] == pytest.approx(1e-2)
        assert row["rollout/ended"] + row["rollout/truncated"] == pytest.approx(1)
        shown = 100 * (1 - row["rollout/response_length"] / 6)
        assert row["padding_percentage"] == pytest.approx(shown, rel=1e-4, abs=1e-4)
        assert row["rollout/logprob_gap"] < 1e-5
    assert first["rollout_scores/mean"] < last["rollout_scores/mean"]
    assert last["policy/entropy"] < first["policy/entropy"]


def test_nothing_is_compiled_after_the_second_cycle(learned):
    cycles, _ = rows(learned.folder, "timing")
    compiles = [row["perf/compiles"] for row in cycles]
    assert compiles[0] > 0
    assert len(set(compiles[1:])) == 1


def test_the_export_gives_the_same_logits(learned, tmp_path):
    tokens = jnp.arange(12).reshape(2, 6)
    logits = jax.jit(learned.model.logits)(learned.params, tokens)
    learned.save_pretrained(tmp_path)
    for folder in (learned.folder / "model", tmp_path):
        model, params, tokenizer = load_pretrained(folder)
        np.testing.assert_array_equal(jax.jit(model.logits)(params, tokens), logits)
        assert tokenizer.eos_token_id == EOS
        for name, leaf in learned.params["value_head"]["out"].items():
            np.testing.assert_array_equal(params["value_head"]["out"][name], leaf)


def test_the_best_policy_is_kept(model_path, tmp_path):
    """Evaluation rewards fall from 1, so the best is the untrained policy. No state is saved."""
    calls = []

    def reward(outputs, **_):
        calls.append(1)
        return [1.0] * len(outputs) if len(calls) == 1 else letter_share(outputs)

    config = make_tiny_config(tmp_path / "run", train__total_steps=4, train__save_optimizer=False)
    trained = train(model_path, reward, PROMPTS, config=config)
    weights = lambda folder: (folder / "model.safetensors").read_bytes()  # noqa: E731
    assert weights(trained.folder / "best_model") == weights(model_path)
    assert weights(trained.folder / "model") != weights(model_path)
    assert latest_step(trained.folder / "best") == 0
    found = [json.loads(x.read_text()) for x in (trained.folder / "best").rglob("metadata")]
    assert {"reward": 1.0, "step": 0} in found
    assert not (trained.folder / "checkpoints").exists()


# what users pass


def test_columns_dense_rewards_stops_and_greedy_evaluation(model_path, tmp_path):
    pytest.importorskip("tensorboardX")
    prompts = [{"prompt": text, "answer": text.upper()} for text in PROMPTS]
    before = [dict(prompt) for prompt in prompts]
    given = []

    def reward(samples, prompts, outputs, tokenizer, answer):
        assert [text.upper() for text in prompts] == answer
        assert samples == [a + b for a, b in zip(prompts, outputs)]
        assert tokenizer.eos_token_id == EOS
        given.extend(outputs)
        return [[0.5] * len(output) for output in outputs]

    def metric(prompts, answer, **_):
        assert [text.upper() for text in prompts] == answer
        return {"known": [len(text) for text in answer]}

    config = make_tiny_config(
        tmp_path,
        train__total_steps=4,
        train__tracker="tensorboard",
        method__gen_kwargs__do_sample=False,
        method__gen_experience_kwargs__do_sample=True,
    )
    trained = train(
        model_path,
        reward,
        prompts,
        eval_prompts=prompts + prompts[:1],
        metric_fn=metric,
        config=config,
        stop_sequences=["e", "st"],
    )
    assert prompts == before
    assert given
    assert not any("e" in output or "st" in output for output in given)
    (cycle,), evaluations = rows(trained.folder)
    assert cycle["rollout/ended"] > 0.2
    assert cycle["rollout/response_length"] < 6
    assert "eval/kl" not in evaluations[0]  # greedy samples have no log-probs to compare
    samples = read_lines(tmp_path / "samples.jsonl")
    for row in samples:
        assert row["reward"] == pytest.approx(0.5 * len(row["output"]))
        assert row["known"] == len(row["prompt"])
    assert len(samples) == 22
    for at in (0, 11):  # the same prompt twice: other random numbers, the same output
        assert samples[at]["output"] == samples[at + 10]["output"]
    # the most probable letters, one by one
    model, params, _ = load_pretrained(model_path)
    logits = jax.jit(model.logits)
    for row in samples[:3]:
        ids = [LETTERS.index(c) for c in row["prompt"]]
        written = ""
        while len(written) < 6 and "e" not in written and "st" not in written:
            padded = jnp.asarray([ids + [0] * (16 - len(ids))])
            token = int(jnp.argmax(logits(params, padded)[0, len(ids) - 1]))
            if token == EOS:
                break
            ids.append(token)
            written += LETTERS[token] if token < 20 else ""
        assert row["output"] == written.split("e")[0].split("st")[0]
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_samples_do_not_depend_on_chunks(model_path, tmp_path):
    """16 rollouts and 10 evaluation prompts, in chunks of 16 and of 4."""
    seen = {}

    def reward(outputs, prompts, *, into):
        into.extend(zip(prompts, outputs))
        return letter_share(outputs)

    for chunk in (16, 4):
        seen[chunk] = []
        options = {"train__total_steps": 4, "method__chunk_size": chunk}
        config = make_tiny_config(tmp_path / str(chunk), **options)
        keep = functools.partial(reward, into=seen[chunk])
        train(model_path, keep, PROMPTS, eval_prompts=PROMPTS, config=config)
    assert seen[16] == seen[4]
    assert len(seen[16]) == 10 + 16 + 10
    (one,), _ = rows(tmp_path / "16")
    (other,), _ = rows(tmp_path / "4")
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


# stopping and going on


def test_an_interrupted_run_ends_as_an_uninterrupted_one(model_path, uninterrupted, tmp_path):
    calls = []

    def stopping_at(number, error):
        calls.clear()

        def reward(outputs, **_):
            calls.append(1)
            if len(calls) == number:
                raise error
            return letter_share(outputs)

        return reward

    # in cycle 2, in the evaluation after it, in cycle 4, in the last evaluation; counted anew
    # each time, and what was complete is not computed again
    for number, error, raised in [
        (3, ValueError("no score"), RewardError),
        (2, KeyboardInterrupt(), KeyboardInterrupt),
        (3, KeyboardInterrupt(), KeyboardInterrupt),
        (2, OSError("gone"), RewardError),
    ]:
        with pytest.raises(raised):
            train_resumably(model_path, tmp_path, stopping_at(number, error))
        assert len(calls) == number
    # a checkpoint that lacks the evaluation after it: it is made anew, and nothing is there twice
    for _ in range(2):
        train_resumably(model_path, tmp_path, stopping_at(0, None))
        assert len(calls) == 1
        assert same_files(tmp_path, uninterrupted.folder)


def test_a_finished_run_returns_at_once(model_path, uninterrupted):
    def never(outputs, **_):
        raise AssertionError

    before = files(uninterrupted.folder)
    again = train_resumably(model_path, uninterrupted.folder, never)
    assert again.summary == uninterrupted.summary
    jax.tree.map(np.testing.assert_array_equal, again.params, uninterrupted.params)
    assert files(uninterrupted.folder) == before


def test_an_interrupt_while_the_updates_run_loses_nothing(
    model_path, uninterrupted, tmp_path, monkeypatch
):
    module, waits = importlib.import_module("jaxppo.train"), []
    log = module._log

    def interrupted(*args, **options):
        waits.append(1)
        if len(waits) == 2:
            raise KeyboardInterrupt
        log(*args, **options)

    monkeypatch.setattr(module, "_log", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_resumably(model_path, tmp_path)
    assert latest_step(tmp_path / "checkpoints") == 8
    assert [row["step"] for row in rows(tmp_path)[0]] == [4, 8]
    train_resumably(model_path, tmp_path)
    assert same_files(tmp_path, uninterrupted.folder)


KILLED = """
import importlib, os, signal, sys
import helpers_train

model, folder, where, number = sys.argv[1:]
calls = 0

def tick(place):
    global calls
    calls += place == where
    if calls == int(number):
        os.kill(os.getpid(), signal.SIGKILL)

def reward(outputs, **_):
    tick("reward")
    return helpers_train.letter_share(outputs)

checkpoint = importlib.import_module("jaxppo.checkpoint")
save = checkpoint.save

def save_and_tick(*args, **kwargs):
    save(*args, **kwargs)
    tick("save")

checkpoint.save = save_and_tick
helpers_train.train_resumably(model, folder, reward)
"""


@pytest.mark.slow
def test_a_killed_run_ends_as_an_uninterrupted_one(model_path, uninterrupted, tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    paths = [str(Path(helpers_train.__file__).parent), str(Path(__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def start(where, number):
        command = [sys.executable, script, model_path, tmp_path / "run", where, str(number)]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    # within the evaluation after cycle 2; right after the checkpoint that follows it; in cycle 4
    best = latest_step(uninterrupted.folder / "best")
    _, evaluations = rows(uninterrupted.folder)
    rising = evaluations[1]["reward/mean"] > evaluations[0]["reward/mean"]
    assert best is not None
    for where, number, left in [
        ("reward", 4, None),
        ("save", 2 + rising, 8),
        ("reward", 2, 8),
    ]:
        done = start(where, number)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert latest_step(tmp_path / "run/checkpoints") == left
    done = start("never", -1)
    assert done.returncode == 0, done.stderr
    assert same_files(tmp_path / "run", uninterrupted.folder)


def test_a_run_is_not_overwritten_without_resume(model_path, uninterrupted):
    before = files(uninterrupted.folder)
    with pytest.raises(ConfigError, match=r"already holds a run.*train\.resume"):
        train_resumably(model_path, uninterrupted.folder, train__resume=False)
    assert files(uninterrupted.folder) == before


def copy_run(uninterrupted, folder):
    return Path(shutil.copytree(uninterrupted.folder, folder))


def test_a_run_is_not_continued_from_another_model(model_path, uninterrupted, tmp_path):
    folder = copy_run(uninterrupted, tmp_path / "run")
    other = save_model(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match="began with other weights"):
        train_resumably(other, folder)
    moved = shutil.copytree(model_path, tmp_path / "moved")  # the same weights elsewhere will do
    train_resumably(moved, folder)
    assert same_files(folder, uninterrupted.folder)


def test_a_finished_run_without_checkpoints_is_not_erased(model_path, uninterrupted, tmp_path):
    folder = copy_run(uninterrupted, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    for resume, said in ((True, "finished run without a checkpoint"), (False, "already holds")):
        with pytest.raises(ConfigError, match=said):
            train_resumably(model_path, folder, train__resume=resume)
    assert rows(folder) == rows(uninterrupted.folder)


def test_a_shorter_plan_ends_at_once(model_path, uninterrupted, tmp_path):
    folder = copy_run(uninterrupted, tmp_path / "run")
    train_resumably(model_path, folder, train__total_steps=4)
    assert same_files(folder, uninterrupted.folder)


@pytest.mark.parametrize("text", ["{torn", "", "[1]"])
def test_a_damaged_record_of_the_config_is_replaced(model_path, uninterrupted, tmp_path, text):
    folder = copy_run(uninterrupted, tmp_path / "run")
    (folder / "config.json").write_text(text)
    train_resumably(model_path, folder)
    assert json.loads((folder / "config.json").read_text())["train"]["seq_length"] == 16


@pytest.mark.parametrize("stops", ["STOP", [""], [3], None, ["\ud800"]])
def test_odd_stop_sequences_are_refused(model_path, tmp_path, stops):
    config = make_tiny_config(tmp_path / "run")
    with pytest.raises(ConfigError, match="stop_sequences"):
        train(model_path, letter_share, PROMPTS, config=config, stop_sequences=stops)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["step", "reward"])
def test_metrics_do_not_take_the_names_of_columns(model_path, tmp_path, name):
    config = make_tiny_config(tmp_path / "run")
    metric = lambda outputs, **_: {name: [1.0] * len(outputs)}  # noqa: E731
    with pytest.raises(RewardError, match=f"can't be named '{name}'"):
        train(model_path, letter_share, PROMPTS, metric_fn=metric, config=config)


def test_training_stops_at_figures_that_are_not_finite(model_path, tmp_path, capsys):
    options = {"train__checkpoint_interval": 4, "train__eval_interval": 100}
    options["method__cliprange_reward"] = None
    config = make_tiny_config(tmp_path, train__total_steps=4, **options)
    train(model_path, letter_share, PROMPTS, config=config)
    # goes on after the end, with rewards whose squares are infinite
    config = make_tiny_config(tmp_path, train__total_steps=8, **options)
    named = r"losses/total_loss.*losses/value_loss.* became nan or infinite at step 8"
    with pytest.raises(TrainingError, match=named):
        train(model_path, lambda outputs: [3e38 for _ in outputs], PROMPTS, config=config)
    assert latest_step(tmp_path / "checkpoints") == 4
    assert "options changed since then: train.total_steps" in capsys.readouterr().out
    assert [row["step"] for row in rows(tmp_path)[0]] == [4]


def test_calls_without_what_is_needed_are_refused(model_path, tmp_path):
    config = make_tiny_config(tmp_path / "run")
    with pytest.raises(ConfigError, match="no reward function"):
        train(model_path, prompts=PROMPTS, config=config)
    with pytest.raises(ConfigError, match=r"model\.model_path is not set"):
        train(None, letter_share, PROMPTS, config=config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("slots", [None, 3])
def test_rewards_beside_sampling_and_few_slots_change_no_number(model_path, tmp_path, slots):
    """Chunks in turn, rewards in a thread, continuous batching: the same run."""
    ends = []
    for name, options in {
        "serial": {"train__overlap_rewards": False},
        "other": {"method__decode_slots": slots},
    }.items():
        trained = train_resumably(
            model_path, tmp_path / name, method__chunk_size=8, train__total_steps=8, **options
        )
        ends.append(trained.params)
    check = (
        np.testing.assert_array_equal
        if slots is None
        else functools.partial(np.testing.assert_allclose, atol=1e-4)
    )
    jax.tree.map(check, *ends)


def test_an_error_in_a_reward_beside_sampling_is_the_runs(model_path, tmp_path):
    calls = []

    def failing(outputs, **_):
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("no")
        return letter_share(outputs)

    with pytest.raises(RewardError, match="no"):
        train_resumably(model_path, tmp_path, failing, method__chunk_size=8)
