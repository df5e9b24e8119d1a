"""Fixtures of the whole suite. This file being here also puts `tests/` on the import path."""

import numpy as np
import pytest
from helpers import GOLDEN_MODELS

from jaxppo import load_pretrained
from jaxppo.tracking import use_compile_cache

use_compile_cache("auto")  # half of the suite's time is compiling


@pytest.fixture(scope="session")
def golden_gpt2():
    """A small GPT-2 that torch computed: `(model, params, io)`, see tests/golden/models."""
    folder = GOLDEN_MODELS / "gpt2"
    model, params, _ = load_pretrained(folder)
    return model, params, dict(np.load(folder / "io.npz"))
