"""Memory and time of loading and exporting a big checkpoint.

    python experiments/bench_load_export.py [--layers=22] [--dtype=bfloat16]

A Llama of TinyLlama's shapes (1.1 billion parameters) with random weights is written to a temporary
folder (2.2 GB in bfloat16), then loaded in one process, and loaded and exported in another. Shown
is the most memory each held beyond what an idle process holds, over the parameters' bytes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_common import peak_bytes

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000,
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,
    "num_key_value_heads": 4, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        return step(args)
    with tempfile.TemporaryDirectory() as folder:
        results = {}
        for name in ("make", "idle", "load", "export"):
            command = [sys.executable, __file__, f"--layers={args.layers}", f"--dtype={args.dtype}"]
            done = subprocess.run(
                [*command, f"--step={name}", f"--folder={folder}"], capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(done.stderr)
            results[name] = json.loads(done.stdout.splitlines()[-1])
    size = results["make"]["bytes"]
    print(f"{size / 2**30:.2f} GiB of parameters in {args.dtype}")
    for name in ("load", "export"):
        peak = results[name]["peak"] - results["idle"]["peak"]
        seconds = results[name]["seconds"]
        print(f"  {name:7} peak {peak / size:.2f} x the parameters, {seconds:.1f} s, "
              f"{size / seconds / 1e9:.2f} GB/s")  # fmt: skip


def step(args):
    import jax
    import numpy as np

    from jaxppo import create_model, load_pretrained, save_pretrained
    from jaxppo.models.folders import write_json, write_tensors

    folder = Path(args.folder)
    hf = CONFIG | {"num_hidden_layers": args.layers}
    began, size = time.perf_counter(), 0
    if args.step == "make":
        from jaxppo.models.export import _tensors

        model = create_model(hf)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        dtype = jax.numpy.dtype(args.dtype)
        rng = np.random.default_rng(0)
        random = lambda shape: lambda: rng.standard_normal(shape, np.float32).astype(dtype)  # noqa: E731
        write_tensors(
            folder / "model.safetensors",
            [(name, dtype, shape, random(shape)) for name, _, shape, _ in _tensors(model, shapes)],
        )
        write_json(folder / "config.json", hf)
        size = sum(x.size for x in jax.tree.leaves(shapes)) * dtype.itemsize
    elif args.step == "idle":
        jax.numpy.zeros(1).block_until_ready()
    else:
        model, params, _ = load_pretrained(folder, dtype="auto")
        jax.block_until_ready(params)
        if args.step == "export":
            began = time.perf_counter()
            save_pretrained(folder / "out", model, params)
    print(json.dumps({"peak": peak_bytes(), "seconds": time.perf_counter() - began, "bytes": size}))


if __name__ == "__main__":
    main()
