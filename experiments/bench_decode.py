"""How fast responses are sampled, beside torch `transformers` and the machine's own ceilings.

    python experiments/bench_decode.py [--rows=32] [--prompt=16] [--new=48] [--rounds=5]

GPT-2 small's shapes, random weights, float32. Every figure is the median over rounds in which the
contestants take turns, so that a busy machine slows all of them. The ceiling of a decode step is
the larger of its arithmetic over the matrix product's measured rate and its bytes over the
measured bandwidth. Needs torch for the comparison; without it that line is left out.
"""

import argparse
import functools

import jax
import numpy as np
from bench_common import ceilings, gpt2, rates, take_turns, torch_gpt2

from jaxppo import sample
from jaxppo.sampling import Options, make_stream, sample_stream


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"rows": 32, "prompt": 16, "new": 48, "rounds": 5, "ragged": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    model, params = gpt2()
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 50000, (args.rows, args.prompt)).astype(np.int32)
    mask = np.ones(prompts.shape, bool)
    key = jax.random.key(1)

    ours = jax.jit(functools.partial(sample, model=model, max_new_tokens=args.new))
    contestants = {"jaxppo": lambda: jax.block_until_ready(ours(params, key, prompts, mask))}
    if (theirs := torch_generate(prompts, args.new)) is not None:
        contestants["transformers"] = theirs
    times = take_turns(contestants | ceilings(), args.rounds)
    tokens = args.rows * args.new
    print(f"decode, {args.rows} rows, {args.prompt} + {args.new} tokens")
    for name in ("jaxppo", "transformers"):
        if name in times:
            print(f"  {name:14} {times[name]:6.2f} s  {tokens / times[name]:7.0f} tokens/s")
    if "transformers" in times:
        print(f"  ratio          {times['transformers'] / times['jaxppo']:6.2f} x")
    flops, bytes_s = rates(times)
    weights = sum(x.size for x in jax.tree.leaves(params)) - 1024 * 768
    length = args.prompt + args.new / 2
    cache = 2 * 12 * args.rows * 768 * length
    step = max(
        2 * args.rows * (weights + cache / args.rows) / flops, 4 * (weights + cache) / bytes_s
    )
    prefill = 2 * (weights - 50257 * 768) * args.rows * args.prompt / flops
    least = prefill + step * args.new
    print(f"  machine        {flops / 1e9:6.0f} GFLOP/s, {bytes_s / 1e9:.1f} GB/s")
    print(f"  ceiling        {least:6.2f} s, reached {100 * least / times['jaxppo']:.0f} %")

    ends = tuple(range(50257 // 24))  # a response ends with probability 1/24 a token
    options = Options(128, eos_ids=ends)
    R = args.ragged
    several = [rng.integers(0, 50000, args.prompt).astype(np.int32) for _ in range(R)]
    stream = make_stream(model, options)
    whole = jax.jit(functools.partial(sample, model=model, max_new_tokens=128, eos_ids=ends))
    steps, useful = [], []

    def chunks():
        for at in range(0, R, args.rows):
            rows = np.arange(at, at + args.rows)
            whole(
                params, key, np.stack(several[at : at + args.rows]), mask, row_ids=rows
            ).tokens.block_until_ready()

    def streamed():
        result = sample_stream(params, key, several, stream=stream, slots=args.rows)
        steps.append(result.slot_steps)
        useful.append(int(result.samples.mask.sum()) - R)

    times = take_turns({"chunks": chunks, "stream": streamed}, max(1, args.rounds // 2))
    print(f"ragged, {R} rows, geometric lengths (mean 24, at most 128), {args.rows} slots")
    print(f"  in chunks      {times['chunks']:6.2f} s")
    print(f"  as a stream    {times['stream']:6.2f} s, {times['chunks'] / times['stream']:.2f} x")
    print(f"  useless steps  {100 * (1 - useful[-1] / steps[-1]):6.1f} %")


def torch_generate(prompts, new):
    if (net := torch_gpt2()) is None:
        return None
    import torch

    ids = torch.tensor(prompts, dtype=torch.long)
    kwargs = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0}
    kwargs |= {"pad_token_id": 0, "attention_mask": torch.ones_like(ids)}

    @torch.no_grad()
    def run():
        net.generate(ids, **kwargs)

    return run


if __name__ == "__main__":
    main()
