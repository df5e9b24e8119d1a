"""Each config in configs/ is valid, makes its task, and the new ones run."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from jaxppo import config as configs
from jaxppo.main import main

FOLDER = Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_config_is_valid_and_says_what_to_expect(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    configs.validate(module.get_config())
    assert f"--config=configs/{path.name}" in module.__doc__
    measured = re.search(r"[\d.:]+\s(minutes|seconds)", module.__doc__)
    assert measured or path.stem == "judge_sentiment"  # there the judge's time is all there is
    assert "RESULT" not in module.__doc__


SHORT = ["train.epochs=2", "train.log_samples=1"]
TINY = ["method.num_rollouts=64", "method.chunk_size=64", "train.batch_size=64", *SHORT]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("guessing_game", ["train.epochs=40"]),
        ("calculator_tool", [*TINY]),
        ("dapo_arithmetic", [*TINY]),
        ("rloo_sentiment", [*TINY, "method.ppo_epochs=1"]),
        ("gspo_sentiment", [*TINY, "method.ppo_epochs=1"]),
        ("dense_sentiment", [*TINY, "method.ppo_epochs=1"]),
    ],
)
def test_a_config_runs(name, options, tmp_path):
    argv = ["main", f"--config={FOLDER / name}.py", f"--workdir={tmp_path / 'run'}"]
    assert main([*argv, *[f"--config.{option}" for option in options]]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    losses = [row["losses/total_loss"] for row in rows if "losses/total_loss" in row]
    assert np.isfinite(losses).all()
    assert max(row.get("rollout/logprob_gap", 0) for row in rows) < 1e-4
    if name == "guessing_game":  # it has begun to listen
        figures = [row["reward/mean"] for row in rows if "reward/mean" in row]
        assert figures[-1] > figures[0] + 0.4


def test_words_are_paid_for_what_they_add():
    spec = importlib.util.spec_from_file_location("dense", FOLDER / "dense_sentiment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reward = module.gains(lambda texts: [float(len(text)) for text in texts])
    spans = reward(["ab", ""], [" cd e", "  "])
    assert spans == [[(0, 3, 3.0), (3, 5, 2.0)], []]


def test_the_judges_config(tmp_path):
    """A local server plays the judge; without its address the config is refused in a sentence."""
    sys.path.insert(0, str(Path(__file__).parent / "rewards"))
    from test_judges import Server, says

    server = Server(
        lambda body, headers: says(str(body["messages"][-1]["content"].count("e") % 11))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = f"--config={FOLDER / 'judge_sentiment.py'}"
    options = [f"--config.{x}" for x in (*TINY, "method.ppo_epochs=1", "train.epochs=1")]
    command = [sys.executable, "-m", "jaxppo.main", config, f"--workdir={tmp_path}/run", *options]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JUDGE_")}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "'JUDGE_URL' is not set" in done.stdout + done.stderr
        environment |= {"JUDGE_URL": server.url, "JUDGE_MODEL": "m"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    finally:
        server.shutdown()
        server.server_close()
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("rewards/judge/mean" in row for row in rows)
