"""Every family against torch itself, on weights that no golden file has seen."""

import numpy as np
import pytest
from make_models import CASES, compute, padded, tokens
from parity import gap

from jaxppo import load_pretrained

pytest.importorskip("torch")
SEED = 100


@pytest.mark.parametrize("case", CASES)
def test_fresh_models_give_the_same_logits(case, tmp_path):
    _, golden = compute(case, tmp_path, SEED)
    model, params, _ = load_pretrained(tmp_path)
    for side in ("left", "right"):
        grid, mask = padded(tokens(SEED), side)
        logits = np.asarray(model.logits(params, grid, mask))[mask]
        assert gap(logits, golden["logits"]) <= 2e-4
