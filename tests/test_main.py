"""The command line: every mistake is one sentence, an exit code, and nothing half-written."""

import os
import subprocess
import sys
from pathlib import Path

import helpers_train
import pytest
from helpers_train import save_model

from jaxppo import load_pretrained
from jaxppo.main import main

CONFIG = """
import helpers_train


def get_config(arg=None):
    config = helpers_train.make_tiny_config("unset", train__total_steps=4)
    if arg:
        config.train.log_samples = int(arg)
    return config


def score(outputs, **_):
    {reward}


def make_task(config):
    from jaxppo import Task

    return Task(prompts={prompts}, reward_fn=score, model_path={model!r})
"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "gpt2")


@pytest.fixture
def run(tmp_path, capfd, model_path):
    """Writes a config file, runs it, and returns exit code, standard output and error."""

    def run(
        *arguments, prompts=helpers_train.PROMPTS, reward="return [1.0] * len(outputs)", model=None
    ):
        file = tmp_path / "config.py"
        model = str(model_path if model is None else model)
        file.write_text(CONFIG.format(prompts=list(prompts), reward=reward, model=model))
        command = ["jaxppo", f"--config={file}", f"--workdir={tmp_path / 'run'}", *arguments]
        code = main(command)
        return code, *capfd.readouterr()

    return run


def says(result, code, *parts):
    """Whether it was refused in one sentence that names all of this."""
    found, _, error = result
    error = "".join(x for x in error.splitlines(True) if not x.startswith("[transformers]"))
    assert found == code, error
    assert error.startswith("jaxppo: ")
    assert error.count("\n") == 1
    assert error.endswith("\n")
    assert "Traceback" not in error
    for part in parts:
        assert part in error, error
    return True


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        (
            "--config.method.ppo_epoch=2",
            ["unknown option method.ppo_epoch", "did you mean method.ppo_epochs?"],
        ),
        ("--config.trian.seed=2", ["trian", "train"]),
        ("--config.seed=2", ["unknown option seed", "did you mean train.seed?"]),
        ("--config.method.ppo_epochs=two", ["ppo_epochs", "two"]),
        ("--config.method.ppo_epochs=0", ["method.ppo_epochs must be at least 1, got 0"]),
        ("--config.train.minibatch_size=3", ["train.minibatch_size 3 must divide", "batch_size 8"]),
        ("--config.method.gen_kwargs.do_sample=False", ["rollouts must sample"]),
        ("--workdri=x", ["workdri"]),
        ("extra", ["'extra' is not a flag"]),
    ],
)
def test_options_are_refused_before_anything_is_loaded(run, tmp_path, argument, parts):
    assert says(run(argument, model="/nowhere"), 2, *parts)
    assert not (tmp_path / "run").exists()


def test_config_files_are_refused(tmp_path, capfd):
    call = lambda *arguments: (main(["jaxppo", *arguments]), *capfd.readouterr())  # noqa: E731
    missing = f"--config={tmp_path}/none.py"
    assert says(call(missing), 2, "none.py does not exist")
    assert says(call(missing, "--config.train.seed=3"), 2, "can't be loaded", "none.py")
    assert says(call(), 2, "no config", "--config=")
    file = tmp_path / "half.py"
    file.write_text(CONFIG.partition("def make_task")[0].format(reward="return 1"))
    assert says(call(f"--config={file}"), 2, "half.py has no make_task(config)")


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ("def get_config(arg=None):\n    return nothing", ["NameError", "nothing"]),
        ("import nowhere", ["nowhere"]),
        ("def get_config(:", ["invalid syntax"]),
        ("raise SystemExit(3)", ["SystemExit", "3"]),
    ],
)
def test_a_broken_config_file_is_blamed_and_not_an_override(tmp_path, capfd, body, parts):
    file = tmp_path / "broken.py"
    file.write_text(body)
    code = main(["jaxppo", f"--config={file}", "--config.train.total_steps=4"])
    assert says((code, *capfd.readouterr()), 2, *parts)


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ("raise RuntimeError('no data')", ["make_task of", "RuntimeError: no data"]),
        ("raise SystemExit(0)", ["make_task of", "SystemExit: 0"]),
        ("return {}", ["returned a dict, not a jaxppo.Task"]),
    ],
)
def test_mistakes_in_make_task_are_sentences(tmp_path, capfd, body, parts):
    file = tmp_path / "half.py"
    head = CONFIG.partition("def make_task")[0].format(reward="return 1")
    file.write_text(f"{head}def make_task(config):\n    {body}\n")
    code = main(["jaxppo", f"--config={file}", f"--workdir={tmp_path / 'run'}"])
    assert says((code, *capfd.readouterr()), 2, *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "code", "parts"),
    [
        ({"model": "/nowhere/gpt2"}, 1, ["model folder /nowhere/gpt2 does not exist"]),
        ({"prompts": []}, 1, ["prompts is empty"]),
        ({"prompts": ["ab", "abcdefghijk"]}, 1, ["prompt 1 has 11 tokens", "leave 10"]),
        ({"prompts": ["ab", 7]}, 1, ["prompt 1 is a int"]),
    ],
)
def test_tasks_are_refused_before_the_run_folder_is_made(run, tmp_path, options, code, parts):
    assert says(run(**options), code, *parts)
    assert not (tmp_path / "run").exists()


def test_an_eos_id_that_the_model_lacks_is_refused(run, tmp_path):
    result = run("--config.method.gen_kwargs.eos_token_id=9999")
    assert says(result, 2, "eos_token_id 9999 is not among the model's")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("reward", "parts"),
    [
        ("raise KeyError('label')", ["reward function score raised KeyError: 'label'"]),
        ("return [1.0]", ["returned 1 values for 10 samples"]),
        ("return [1.0, float('nan')] * 5", ["score returned nan for sample 1", "must be finite"]),
        ("return None", ["score returned a NoneType"]),
    ],
)
def test_reward_functions_that_fail_are_named(run, tmp_path, reward, parts):
    assert says(run(reward=reward), 1, *parts)
    assert not (tmp_path / "run/checkpoints").exists()  # nothing was complete
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == b""


def test_an_interrupt_says_how_to_go_on(run):
    assert says(run(reward="raise KeyboardInterrupt"), 130, "the same command continues")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(capfd, flag):
    assert main(["jaxppo", flag]) == 0
    out, error = capfd.readouterr()
    assert "python -m jaxppo.main --config=" in out
    assert error == ""


@pytest.mark.slow
def test_a_whole_run_in_a_process_of_its_own(tmp_path, model_path):
    file = tmp_path / "config.py"
    reward = "return helpers_train.letter_share(outputs)"
    file.write_text(
        CONFIG.format(prompts=helpers_train.PROMPTS, reward=reward, model=str(model_path))
    )
    paths = [str(Path(helpers_train.__file__).parent), str(Path(__file__).parents[1])]
    command = [sys.executable, "-m", "jaxppo.main", f"--config={file}:5"]
    command += [f"--workdir={tmp_path / 'run'}", "--config.train.seed=3"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "cycle 1/1" in done.stdout
    assert "\x1b" not in done.stdout  # no control codes where nobody watches
    _, params, _ = load_pretrained(tmp_path / "run/model")
    assert "value_head" in params
    text = (tmp_path / "run/config.json").read_text()
    assert '"seed": 3' in text
    assert '"log_samples": 5' in text
