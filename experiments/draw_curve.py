r"""Draws reward and KL of a finished run as an SVG, the picture in the README.

pip install matplotlib
python experiments/draw_curve.py runs/gpt2_sentiment docs/gpt2_sentiment.svg
"""

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

from jaxppo.tracking import read_rows


def main(folder: str, target: str) -> None:
    rows = read_rows(Path(folder) / "metrics.jsonl")
    cycles = [row for row in rows if "rollout_scores/mean" in row]
    evaluations = [row for row in rows if "reward/mean" in row]
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "jaxppo", "font.size": 11})
    figure, left = plt.subplots(figsize=(8, 3.2))
    right = left.twinx()
    steps = [row["step"] for row in cycles]
    left.plot(steps, [row["rollout_scores/mean"] for row in cycles], color="#1a7f5a", lw=1.8)
    left.plot(
        [row["step"] for row in evaluations],
        [row["reward/mean"] for row in evaluations],
        "o",
        color="#0b5138",
        label="P(positive), held-out prompts",
    )
    right.plot(steps, [row["policy/kl"] for row in cycles], color="#b5562b", lw=1.2)
    left.set(xlabel="optimizer steps", ylabel="P(positive)", ylim=(0.4, 1.0))
    left.yaxis.label.set_color("#1a7f5a")
    right.set_ylabel("KL to the start, nats a sample", color="#b5562b")
    right.set_ylim(0, None)
    left.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.spines["top"].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
