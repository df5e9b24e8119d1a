"""Measures how far a family's numbers are from torch's, and from its own in another shape.

`python tests/models/parity.py` writes the table in docs/models.md from these measurements.
Functions run without jit: the primitives of all families have the same few shapes, so little is
compiled. For the same reason all grids but one are `[3, 20]`.
"""

import dataclasses
import pathlib
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from make_models import CASES, STEPS, VOCAB, padded, tokens, write_golden

from jaxppo import load_pretrained
from jaxppo.models import build_model
from jaxppo.models.families import FAMILIES
from jaxppo.models.tables import get_path

DOCS = pathlib.Path(__file__).parent.parent.parent / "docs" / "models.md"


class Differences(NamedTuple):
    """The largest absolute differences of logits, unless said otherwise.

    unpadded, right, left: from torch, without padding and with it on either side.
    greedy: tokens that torch chooses otherwise, of all rows.
    gradients: from torch's gradient norms, relative, the worst tensor of the checkpoint.
    loss: from torch's.
    packed: of rows packed into one from rows apart.
    cached: of a prefill and steps with a cache from the whole at once.
    bfloat16: of bfloat16 compute from float32, on average, relative to their standard deviation.
    scores: of the classifier from torch's.
    """

    unpadded: float
    right: float
    left: float
    greedy: int
    gradients: float
    loss: float
    packed: float
    cached: float
    bfloat16: float
    scores: float


def gap(a, b) -> float:
    """The largest absolute difference; NaN counts as infinite."""
    difference = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()
    return float(np.where(np.isnan(difference), np.inf, difference))


def grad_norms(model, grads) -> dict[str, float]:
    """The norm of every tensor of the checkpoint, by the export's own rules."""
    norms = {}
    for rule in FAMILIES[model.hf_config["model_type"]].rules(model.config):
        leaves = [np.asarray(get_path(grads, path), np.float64) for path in rule.paths]
        if rule.index is not None:
            leaves = [leaf[rule.index] for leaf in leaves]
        norms[rule.name] = float(np.linalg.norm(rule.transform.save(*leaves)))
    return norms


def greedy(model, params, grid, mask):
    """The most probable next tokens, `[B, STEPS]`, and the logits they were chosen from.

    Those are `[B, T + STEPS, V]`: of the prompt, and of the chosen tokens but the last.
    """
    B, T = grid.shape
    hidden, cache = model.apply(params, grid, mask=mask, cache=model.init_cache(B, T))
    cache = cache.grown(T + STEPS)
    chosen, logits = [], [model.unembed(params, hidden)]
    for _ in range(STEPS):
        chosen.append(jnp.argmax(logits[-1][:, -1], axis=-1)[:, None])
        hidden, cache = model.apply(params, chosen[-1], cache=cache)
        logits.append(model.unembed(params, hidden))
    return np.concatenate(chosen, axis=1), np.concatenate(logits, axis=1)


def measure(case: str) -> Differences:
    """All differences of one case."""
    with tempfile.TemporaryDirectory() as folder:
        golden = write_golden(folder, case)
        model, params, _ = load_pretrained(folder)
    with tempfile.TemporaryDirectory() as folder:
        write_golden(folder, case, classifier=True)
        scorer, scorer_params, _ = load_pretrained(folder)
    rows, expected = tokens(golden["seed"]), golden["logits"]
    first, (grid, mask) = rows[0][None], padded(rows)
    left_grid, left_mask = padded(rows, "left")

    def loss(params):
        logits = model.logits(params, first)[0]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), first[0, 1:, None], axis=1)
        return -chosen.mean(), logits

    (value, unpadded), grads = jax.value_and_grad(loss, has_aux=True)(params)
    norms, wanted = grad_norms(model, grads), golden["grad_norms"]
    assert set(norms) == set(wanted)
    small = 1e-3 * max(wanted.values())  # those of key biases are nothing but rounding errors
    right = np.asarray(model.logits(params, grid, mask))[mask]

    chosen, stepwise = greedy(model, params, left_grid, left_mask)
    longer = np.concatenate([left_grid, chosen], axis=1)[:, STEPS:]
    longer_mask = np.concatenate([left_mask, np.ones_like(chosen, bool)], axis=1)[:, STEPS:]
    whole = np.asarray(model.logits(params, longer, longer_mask))

    # every row twice, in other company: of 12 and 7 tokens, 3 and 12, 7 and 3
    pairs = [(0, 1), (2, 0), (1, 2)]
    together, real = padded([np.concatenate([rows[i], rows[j]]) for i, j in pairs])
    positions = [
        np.concatenate([np.arange(len(rows[i])), np.arange(len(rows[j]))]) for i, j in pairs
    ]
    segments = [np.repeat([1, 2], [len(rows[i]), len(rows[j])]) for i, j in pairs]
    packed, _ = model.apply(
        params,
        together,
        mask=real,
        positions=padded(positions)[0],
        segment_ids=padded(segments)[0],
    )
    packed = np.asarray(model.unembed(params, packed))[real]
    apart = np.split(expected, np.cumsum([len(row) for row in rows])[:-1])

    half = build_model(
        dataclasses.replace(model.config, compute_dtype="bfloat16"), model.hf_config, {}
    )
    rough = np.asarray(half.logits(params, grid, mask))[mask]
    scores = [
        gap(scorer.score(scorer_params, *inputs), golden["scores"][: len(inputs[0])])
        for inputs in ((grid, mask), (left_grid, left_mask), (first, None))
    ]
    return Differences(
        unpadded=gap(unpadded, expected[: len(first[0])]),
        right=gap(right, expected),
        left=gap(np.asarray(model.logits(params, left_grid, left_mask))[left_mask], expected),
        greedy=int((chosen != golden["greedy"]).sum()),
        gradients=max(abs(norms[k] - wanted[k]) / max(wanted[k], small) for k in wanted),
        loss=abs(float(value - golden["loss"])),
        packed=gap(packed, np.concatenate([apart[i] for pair in pairs for i in pair])),
        cached=gap(stepwise[:, STEPS:][longer_mask], whole[longer_mask]),
        bfloat16=float(np.abs(rough - right).mean() / right.std()),
        scores=max(scores),
    )


def table() -> str:
    """The measurements as a table in Markdown."""
    lines = [
        "| case | logits | padded | greedy | gradients | packed | cached | scores | bfloat16 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        d = measure(case)
        numbers = d.unpadded, max(d.right, d.left), d.gradients, d.packed, d.cached, d.scores
        a, b, c, e, f, g = (f"{x:.0e}" for x in numbers)
        equal = f"{3 * STEPS - d.greedy} of {3 * STEPS}"
        lines.append(f"| {case} | {a} | {b} | {equal} | {c} | {e} | {f} | {g} | {d.bfloat16:.0e} |")
    return "\n".join(lines)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    start, end = "<!-- parity table -->\n", "<!-- end of parity table -->\n"
    text = DOCS.read_text()
    head, rest = text.split(start)
    DOCS.write_text(f"{head}{start}\n{table()}\n\n{end}{rest.split(end)[1]}")
    print(f"{len(CASES)} cases, vocabulary {VOCAB}: {DOCS}")
