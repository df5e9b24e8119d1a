r"""Draws reward and KL of several methods over the rollouts they were given, as an SVG.

pip install matplotlib
python -m jaxppo.main --config=configs/gpt2_sentiment.py --workdir=runs/PPO
python -m jaxppo.main --config=configs/rloo_sentiment.py --workdir=runs/RLOO
python -m jaxppo.main --config=configs/rloo_sentiment.py --workdir=runs/GRPO \
  --config.method.name=grpo
python -m jaxppo.main --config=configs/gspo_sentiment.py --workdir=runs/GSPO
python experiments/draw_methods.py docs/methods.svg runs/PPO runs/GRPO runs/RLOO runs/GSPO
"""

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from draw_curve import read_rows

ROLLOUTS = 128  # a cycle, in all four


def main(target: str, *folders: str) -> None:
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "jaxppo", "font.size": 11})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for folder, color in zip(folders, ("#1a7f5a", "#b5562b", "#3b5fa5", "#8a6d1f")):
        rows = read_rows(Path(folder) / "metrics.jsonl")
        cycles = [row for row in rows if "rollout_scores/mean" in row]
        rollouts = [ROLLOUTS * (i + 1) for i in range(len(cycles))]
        for axes, name in ((left, "rollout_scores/mean"), (right, "policy/kl")):
            line = [row[name] for row in cycles]
            axes.plot(rollouts, line, color=color, lw=1.5, label=Path(folder).name)
    left.set(xlabel="rollouts", ylabel="P(positive)", ylim=(0.4, 1.0))
    right.set(xlabel="rollouts", ylabel="KL to the start, nats a sample", ylim=(0, None))
    left.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
