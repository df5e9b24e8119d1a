"""Rewards in the loop: dropped samples count nowhere, failures leave their samples behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_train import PROMPTS, letter_share, make_tiny_config, read_lines, save_model

from jaxppo import Reward, RewardError, load_pretrained, train
from jaxppo.policy import make_policy
from jaxppo.programs import make_programs
from jaxppo.rewards import init_scaling

B, P, N = 16, 3, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "policy")


def run(folder, path, reward, **options):
    return train(folder, reward, PROMPTS, config=make_tiny_config(path, **options))


def cycles(path):
    return [row for row in read_lines(path / "metrics.jsonl") if "losses/total_loss" in row]


METHODS = {
    "ppo": {"method.scale_reward": "running"},
    "ppo, KL in the loss": {"method.kl_in": "loss", "method.scale_reward": "ref_centred"},
    "grpo": {"method.name": "grpo", "method.group_size": 4},
    "rloo": {"method.name": "rloo", "method.group_size": 4, "method.overlong_buffer": 3},
    "reinforce_pp": {"method.name": "reinforce_pp", "method.missing_eos_penalty": 1.0},
}


@pytest.mark.parametrize("name", METHODS)
def test_what_dropped_samples_hold_has_no_influence(name, folder, tmp_path):
    """Other tokens and other scores in their rows: the same update, bit for bit."""
    config = make_tiny_config(tmp_path)
    config.update_from_flattened_dict(METHODS[name])
    model, params, _ = load_pretrained(folder)
    policy = make_policy(config, model, params, jax.random.key(0))
    programs = make_programs(config, policy, eos_ids=(21,), pad_id=22, stops=None)
    from jaxppo.experience import Rollout
    from jaxppo.ppo import ppo_init

    rng = np.random.default_rng(0)
    present = np.arange(B) % 3 != 1
    prompts, ones = rng.integers(0, 20, (B, P)).astype(np.int32), np.ones((B, P), bool)
    tokens = rng.integers(0, 20, (B, N)).astype(np.int32)
    mask = np.arange(N) < rng.integers(1, N + 1, B)[:, None]
    scores = rng.normal(size=B).astype(np.float32)
    start = jax.tree.map(np.asarray, policy.trained)

    def update(tokens, scores):
        trained = jax.tree.map(jnp.asarray, start)
        rollout = Rollout(*map(jnp.asarray, (prompts, ones, tokens, mask)))
        scored = programs.score(
            trained, policy.frozen, policy.initial, rollout, jnp.zeros((B, N), jnp.float32)
        )
        grid = np.where(np.arange(N) == mask.sum(1, keepdims=True) - 1, scores[:, None], 0)
        batch, scaling, metrics = programs.experience(
            rollout, jnp.asarray(grid, jnp.float32), jnp.asarray(scores), jnp.asarray(present),
            jnp.ones(B, bool), jnp.arange(B) // 4, init_scaling(), scored, jnp.float32(0.1), 0,
        )  # fmt: skip
        state = ppo_init(
            trained, optimizer=programs.optimizer, kl=programs.kl, objective=programs.objective
        )
        key = jax.random.key(3)
        state, _ = programs.update(state, policy.frozen, policy.initial, batch, key)
        metrics.pop("rollout/logprob_gap")  # the sampler's zeros
        return jax.tree.map(np.asarray, (state.params, state.kl, scaling, metrics))

    other = np.where(present[:, None], tokens, (tokens + 7) % 20).astype(np.int32)
    first = update(tokens, scores)
    second = update(other, np.where(present, scores, 1e6).astype(np.float32))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), start, first[0])
    assert any(jax.tree.leaves(moved))


def test_a_run_with_dropped_samples(folder, tmp_path):
    def unsure(outputs):
        return [
            RewardError("no opinion") if len(text) % 2 else score
            for text, score in zip(outputs, letter_share(outputs))
        ]

    run(
        folder,
        tmp_path,
        [Reward(unsure, on_error="drop", retries=0), lambda outputs: [0.1] * len(outputs)],
    )
    for row in cycles(tmp_path):
        assert 0 < row["rollout/scored"] <= 1
        assert row["rewards/unsure/dropped"] == pytest.approx(16 * (1 - row["rollout/scored"]))
        assert row["rollout_scores/mean"] == pytest.approx(
            row["rewards/unsure/mean"] + 0.1, rel=1e-4
        )
    assert min(row["rollout/scored"] for row in cycles(tmp_path)) < 1


def test_the_samples_that_a_reward_failed_on_are_kept(folder, tmp_path):
    calls = []

    def failing(outputs, number):
        calls.append(list(outputs))
        return [float("nan")] * len(outputs) if len(calls) == 3 else [1.0] * len(outputs)

    prompts = [{"prompt": text, "number": i} for i, text in enumerate(PROMPTS)]
    with pytest.raises(RewardError, match=r"its 16 samples are in .*failed_rollouts\.jsonl"):
        train(folder, failing, prompts, config=make_tiny_config(tmp_path))
    rows = read_lines(tmp_path / "failed_rollouts.jsonl")
    assert [row["output"] for row in rows] == calls[2]
    assert all(row["prompt"] == PROMPTS[row["number"]] for row in rows)
    assert {row["cycle"] for row in rows} == {2}
    # what was complete is saved, and the same call goes on
    trained = train(folder, failing, prompts, config=make_tiny_config(tmp_path))
    assert trained.summary["reward/mean"]["after"] == 1.0


def test_a_cycle_without_any_score_ends_the_run(folder, tmp_path):
    calls = []

    def silent(outputs):
        calls.append(1)
        return [None if len(calls) > 1 else 1.0] * len(outputs)

    with pytest.raises(RewardError, match="no sample of cycle 1 has a score"):
        run(folder, tmp_path, silent)


def test_a_reward_that_hangs_is_left_behind(folder, tmp_path):
    import threading

    def hangs(outputs):
        threading.Event().wait(60)

    reward = Reward(hangs, timeout=0.2)
    with pytest.raises(RewardError, match=r"hangs took more than 0\.2 s"):
        run(folder, tmp_path, reward)
