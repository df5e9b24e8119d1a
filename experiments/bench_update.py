"""Scoring and updating, beside torch doing the same and the machine's own matrix product.

    python experiments/bench_update.py [--rows=32] [--prompt=16] [--new=48] [--rounds=3]

GPT-2 small's shapes, random weights, float32: the log-probs of the responses (scoring), and the
PPO loss with its gradients (an update without the optimizer). Medians over rounds in turns.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from bench_common import ceilings, gpt2, rates, take_turns, torch_gpt2

from jaxppo import Rollout, init_value_head, make_evaluate, ppo_loss


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"rows": 32, "prompt": 16, "new": 48, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    B, P, N = args.rows, args.prompt, args.new
    model, params = gpt2()
    params["value_head"] = init_value_head(jax.random.key(1), 768)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50000, (B, P + N)).astype(np.int32)
    ones = np.ones((B, P + N), bool)
    rollout = Rollout(tokens[:, :P], ones[:, :P], tokens[:, P:], ones[:, P:])
    evaluate = make_evaluate(model)
    score = jax.jit(evaluate)
    old = jax.block_until_ready(score(params, rollout))
    advantages = jnp.asarray(rng.normal(size=(B, N)), jnp.float32)

    @jax.jit
    def gradients(params, old):
        def loss(params):
            seen = evaluate(params, rollout)
            return ppo_loss(
                seen.logprobs, seen.values, old.logprobs, old.values, advantages, advantages,
                rollout.mask, cliprange=0.2, cliprange_value=0.2, vf_coef=1.0,
            )[0]  # fmt: skip

        return jax.grad(loss)(params)

    contestants = {
        "score": lambda: jax.block_until_ready(score(params, rollout)),
        "update": lambda: jax.block_until_ready(gradients(params, old)),
    }
    if (net := torch_gpt2()) is not None:
        contestants |= torch_contestants(net, tokens, P, np.asarray(advantages))
    times = take_turns(contestants | ceilings(), args.rounds)
    flops, _ = rates(times)
    T = P + N - 1
    trunk = sum(x.size for name, x in jax.tree_util.tree_leaves_with_path(params) if x.ndim == 2)
    trunk -= (50257 + 1024) * 768 + params["value_head"]["up"]["kernel"].size
    attention = 12 * 2 * T * 768  # per token: scores and mixture
    forward = 2 * B * T * (trunk + attention) + 2 * B * N * 50257 * 768
    print(f"{B} rows of {P} + {N} tokens, machine {flops / 1e9:.0f} GFLOP/s")
    for name, factor in (("score", 1), ("update", 3)):
        share = factor * forward / flops / times[name]
        line = f"  {name:7} {times[name]:6.2f} s, {100 * share:.0f} % of the matrix product's rate"
        if (theirs := times.get(f"torch {name}")) is not None:
            line += f"; torch {theirs:.2f} s, {theirs / times[name]:.2f} x"
        print(line)


def torch_contestants(net, tokens, P, advantages):
    import torch

    ids = torch.tensor(tokens, dtype=torch.long)
    advantages = torch.tensor(advantages)
    head = torch.nn.Sequential(
        torch.nn.Linear(768, 1536), torch.nn.ReLU(), torch.nn.Linear(1536, 1)
    )

    def evaluate():
        out = net(ids[:, :-1], output_hidden_states=True)
        logits, states = out.logits[:, P - 1 :], out.hidden_states[-1][:, P - 1 :]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, P:, None])[..., 0]
        return logprobs, head(states)[..., 0]

    with torch.no_grad():
        old_logprobs, old_values = evaluate()

    def score():
        with torch.no_grad():
            evaluate()

    def update():
        net.zero_grad(), head.zero_grad()
        logprobs, values = evaluate()
        ratio = (logprobs - old_logprobs).exp()
        policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
        clipped = old_values + (values - old_values).clamp(-0.2, 0.2)
        value = torch.maximum((values - advantages) ** 2, (clipped - advantages) ** 2).mean()
        (policy + 0.5 * value).backward()

    return {"torch score": score, "torch update": update}


if __name__ == "__main__":
    main()
