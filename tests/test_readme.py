"""The README's Python runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
# what a block prints last, and how to make it short
EXPECTED = {
    "jaxppo.train(": (
        r"figures and models are in runs/",
        ('"total_steps": 96', '"total_steps": 16'),
    ),
    "a contextual bandit": (r"^(0\.9\d+|1\.0)$", ("", "")),
    "jaxppo.load_pretrained(": (r"^\d\.\d+ -?\d+\.\d+$", ("range(10)", "range(2)")),
}


def test_every_block_is_known():
    assert [sum(mark in block for mark in EXPECTED) for block in BLOCKS] == [1, 0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("mark", EXPECTED)
def test_blocks_run(tmp_path, mark):
    last, (long, short) = EXPECTED[mark]
    (block,) = (block for block in BLOCKS if mark in block)
    assert long in block
    (tmp_path / "block.py").write_text(block.replace(long, short) if long else block)
    done = subprocess.run(
        [sys.executable, "block.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(last, done.stdout.strip().splitlines()[-1]), done.stdout


@pytest.mark.slow
def test_the_config_file_runs(tmp_path):
    (block,) = (block for block in BLOCKS if "def make_task" in block)
    (tmp_path / "mine.py").write_text(block)
    options = ["--config=mine.py", "--config.train.epochs=1", "--config.method.num_rollouts=32"]
    options += ["--config.method.chunk_size=32"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxppo.main", *options],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "mine" / "model" / "model.safetensors").exists()
