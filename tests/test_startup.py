"""Starting: compiled programs are kept, the time is told, a trace is written, imports are few."""

import os
import subprocess
import sys

import jax
import pytest
from helpers_train import PROMPTS, letter_share, make_tiny_config, read_lines, save_model

from jaxppo import train
from jaxppo.tracking import use_compile_cache


@pytest.fixture
def cache_settings():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_compiled_programs_are_kept_in_the_users_cache(tmp_path):
    """Two processes, no setting at all: the second finds what the first compiled."""
    code = (
        "import jax, jax.numpy as jnp\n"
        "from jaxppo.tracking import use_compile_cache\n"
        "jax.jit(lambda x: x + 1)(1)\n"  # JAX has looked for its cache by then
        "print(use_compile_cache('auto'))\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "jax.jit(lambda x: jnp.linalg.qr(x @ x.T)[0] * 3)(jnp.ones((7, 7)))\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    written = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith(str(tmp_path / "jaxppo"))
        written.append({p.name for p in tmp_path.rglob("*-cache")})
    assert written[0] == written[1] != set()


def test_the_switch_and_the_users_own_setting(cache_settings, tmp_path):
    assert use_compile_cache("off") is None
    assert jax.config.jax_compilation_cache_dir is None
    (tmp_path / "file").touch()
    assert use_compile_cache(str(tmp_path / "file" / "below")) is None  # can't be written: no harm
    assert use_compile_cache(str(tmp_path / "mine")) == tmp_path / "mine"
    assert use_compile_cache("auto") == tmp_path / "mine"  # what is set stays


def test_the_first_update_is_timed_once_and_a_trace_is_written(tmp_path):
    model = save_model(tmp_path / "policy")
    config = make_tiny_config(tmp_path / "run", train__total_steps=12, train__profile=True)
    train(model, letter_share, PROMPTS, config=config)
    rows = read_lines(tmp_path / "run" / "timing.jsonl")
    assert sum("time/to_first_update" in row for row in rows) == 1
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_importing_loads_nothing_heavy():
    """The import takes about a second because these are not in it; nobody needs them at once."""
    code = "import sys, jaxppo; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    heavy = {"torch", "tensorflow", "datasets", "pandas", "matplotlib", "wandb", "math_verify"}
    heavy |= {"httpx", "sympy", "tensorboardX", "scipy.stats", "transformers.modeling_utils"}
    assert not loaded & heavy
