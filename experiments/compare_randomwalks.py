r"""Learning curves on randomwalks from given weights, for comparison with other trainers.

    python experiments/compare_randomwalks.py --start=FOLDER --seeds 1 2 3

`--start` is a Hugging Face folder with a model of random walks (such as the one that another
trainer began with); without it the config's own pretraining is used. Hyperparameters are those of
configs/randomwalks.py, which are trlx's; after each of 20 cycles of 140 rollouts, 500 samples are
scored (standard error about .01).
"""

import argparse
import importlib.util
import tempfile
from pathlib import Path

from rich.console import Console

from jaxppo.tracking import read_rows
from jaxppo.train import run_task

CONFIG = Path(__file__).parent.parent / "configs" / "randomwalks.py"


def load_config_module():
    spec = importlib.util.spec_from_file_location("randomwalks", CONFIG)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def curve(seed: int, start: Path | None, folder: Path) -> tuple[dict[int, float], list[float]]:
    """Trains once; returns optimality by rollouts, and the seconds of each cycle."""
    module = load_config_module()
    config = module.get_config()
    config.train.update(seed=seed, eval_interval=8, checkpoint_dir=str(folder))
    config.train.checkpoint_interval = 10_000
    task = module.make_task(config, start)
    run_task(config, task, console=Console(quiet=True))
    rows = read_rows(folder / "metrics.jsonl")
    found = {row["step"] // 8 * 140: row["reward/mean"] for row in rows if "reward/mean" in row}
    timing = read_rows(folder / "timing.jsonl")
    return found, [row["time/cycle"] for row in timing if "time/cycle" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    ends = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found, seconds = curve(seed, args.start, Path(folder))
        reached = next((rollouts for rollouts, x in found.items() if x >= 0.9), None)
        ends.append(found[max(found)])
        shown = "  ".join(f"{rollouts}:{x:.3f}" for rollouts, x in found.items())
        seconds.sort()
        print(f"seed {seed}: {shown}")
        print(
            f"  .9 at {reached} rollouts, end {ends[-1]:.3f}, best {max(found.values()):.3f}, "
            f"median cycle {seconds[len(seconds) // 2]:.3f} s",
            flush=True,
        )
    print(f"mean end {sum(ends) / len(ends):.3f}")


if __name__ == "__main__":
    main()
