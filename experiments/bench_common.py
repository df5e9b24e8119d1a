"""What the benchmarks share: fair turns, the machine's ceilings, GPT-2 small's shapes."""

import resource
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

GPT2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
PRODUCT = 2048  # side of the matrices
BYTES = 2**29


def gpt2(**options):
    """GPT-2 small with random weights: `(model, params)`."""
    from jaxppo import create_model

    hf = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **GPT2, **options}
    model = create_model(hf)
    return model, jax.jit(model.init)(jax.random.key(0))


def torch_gpt2():
    """The same architecture in torch, or None where torch is not installed."""
    try:
        import transformers
        from transformers import GPT2LMHeadModel
    except ImportError:
        return None
    return GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).eval()


def take_turns(contestants: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Median seconds of each after a first call of all; every round calls each once, in turn."""
    for run in contestants.values():
        run()
    times = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(x) for name, x in times.items()}


def ceilings() -> dict[str, Callable]:
    """Contestants that measure the machine: see `rates`."""
    x, y = jnp.ones((PRODUCT, PRODUCT)), jnp.ones(BYTES // 8)
    product, copy = jax.jit(lambda x: x @ x), jax.jit(lambda x: x + 1)
    return {
        "product": lambda: product(x).block_until_ready(),
        "bandwidth": lambda: copy(y).block_until_ready(),  # reads half of the bytes, writes half
    }


def rates(times: dict[str, float]) -> tuple[float, float]:
    """FLOP/s of a large float32 matrix product, and bytes/s of memory read and written."""
    return 2 * PRODUCT**3 / times["product"], BYTES / times["bandwidth"]


def peak_bytes() -> int:
    """The most memory that this process has held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
