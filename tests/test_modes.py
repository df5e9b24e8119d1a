"""What is trained in each mode, what stays, and that the reference is what the policy began as."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers_train import PROMPTS, letter_share, make_tiny_config, read_lines, save_model

from jaxppo import ConfigError, Rollout, load_pretrained, ppo_init, train
from jaxppo.core.kl import fixed_kl
from jaxppo.policy import make_policy
from jaxppo.programs import make_programs
from jaxppo.rewards.scaling import init_scaling

B, P, N = 8, 4, 6
MODES = {
    "all": {},
    "top 1": {"model.num_layers_unfrozen": 1},
    "top 0": {"model.num_layers_unfrozen": 0},
    "all, branch": {"method.num_value_layers_unfrozen": 1},
    "top 1, branch": {"model.num_layers_unfrozen": 1, "method.num_value_layers_unfrozen": 1},
    "top 1, critic": {"model.num_layers_unfrozen": 1, "model.critic_path": True},
    "lora": {"model.lora.rank": 2, "model.lora.targets": ("query", "up")},
    "lora on top": {"model.lora.rank": 2, "model.lora.targets": ("block_1/.*",)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def critic(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "critic", seed=1)


def options(name, critic, **others):
    chosen = dict(MODES[name])
    if "model.critic_path" in chosen:
        chosen["model.critic_path"] = str(critic)
    return chosen | others


def copied(tree):
    return jax.tree.map(np.array, tree)


@pytest.mark.parametrize("name", MODES)
def test_one_cycle(name, folder, critic, tmp_path):
    """Reference and policy agree to the bit before it; afterwards only what is trained moved."""
    config = make_tiny_config(tmp_path)
    config.update_from_flattened_dict(options(name, critic))
    config.method.gen_kwargs.max_new_tokens = N
    model, params, _ = load_pretrained(folder)
    policy = make_policy(config, model, params, jax.random.key(0))
    programs = make_programs(config, policy, eos_ids=(21,), pad_id=22, stops=None)
    before, frozen = copied(policy.trained), copied(policy.frozen)
    state = ppo_init(policy.trained, optimizer=programs.optimizer, kl=fixed_kl(0.1))
    prompts, ones = np.arange(B * P).reshape(B, P) % 20, np.ones((B, P), bool)
    whole = policy.merged(state.params)
    samples = programs.generate(whole, jax.random.key(1), prompts, ones, np.arange(B))
    rollout = Rollout(prompts, ones, samples.tokens, samples.mask, samples.kept)
    score = lambda trained: programs.score(  # noqa: E731
        trained, policy.frozen, policy.initial, rollout, samples.logprobs
    )
    scored = score(state.params)
    reference = np.array(scored.ref_logprobs)
    np.testing.assert_array_equal(scored.old.logprobs, scored.ref_logprobs)
    assert scored.gap.max() < 1e-5
    assert (scored.trunk is not None) == (policy.trunk_layers > 0)

    rewards = np.linspace(-1, 1, B, dtype=np.float32)
    grid = np.where(np.arange(N) == samples.mask.sum(1, keepdims=True) - 1, rewards[:, None], 0)
    batch, *_ = programs.experience(
        rollout, grid, rewards, np.ones(B, bool), samples.ended, np.arange(B), init_scaling(),
        scored, 0.1, 0,
    )  # fmt: skip
    state, _ = programs.update(state, policy.frozen, policy.initial, batch, jax.random.key(2))
    after = copied(state.params)
    moved = [np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after))]
    names = list(flatten_dict(before, sep="/"))
    still = {n for n, m in zip(sorted(names), moved) if not m}
    # a kernel A moves once B has left 0; the embedding of a token nobody used stays
    assert not {n for n in still if not n.endswith("/bias")}, still
    jax.tree.map(np.testing.assert_array_equal, frozen, copied(policy.frozen))
    np.testing.assert_array_equal(score(state.params).ref_logprobs, reference)
    assert np.abs(score(state.params).old.logprobs - reference).max() > 1e-4
    trained_size = sum(x.size for x in jax.tree.leaves(before))
    momenta = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sum(x.size for x in momenta) == 2 * trained_size


def test_what_is_trained_in_each_mode(folder, critic, tmp_path):
    """The trained tree's parts, the reference's own copies, and the shared layers."""

    def parts(name):
        config = make_tiny_config(tmp_path)
        config.update_from_flattened_dict(options(name, critic))
        model, params, _ = load_pretrained(folder)
        policy = make_policy(config, model, params, jax.random.key(0))
        return set(policy.trained), set(policy.initial), policy.trunk_layers

    everything = {"tokens", "positions", "block_0", "block_1", "norm"}
    assert parts("all") == (everything | {"value_head"}, everything, 0)
    assert parts("top 1") == ({"block_1", "norm", "value_head"}, {"block_1", "norm"}, 1)
    assert parts("top 0") == ({"norm", "value_head"}, {"norm"}, 2)
    branch = {"block_1", "norm", "value_head", "value_branch"}
    assert parts("top 1, branch") == (branch, {"block_1", "norm"}, 1)
    assert parts("top 1, critic")[0] == {"block_1", "norm", "value_head", "critic"}
    assert parts("lora") == ({"block_0", "block_1", "value_head"}, set(), 0)
    assert parts("lora on top") == ({"block_1", "value_head"}, set(), 1)


def test_a_kept_trunk_changes_no_number(folder, tmp_path):
    """Layers computed once a cycle, or in every update: the same parameters to the last bits."""
    ends = []
    for cache in (True, False):
        trained = train(
            folder, letter_share, PROMPTS,
            config=make_tiny_config(
                tmp_path / str(cache), model__num_layers_unfrozen=1, train__cache_trunk=cache,
                train__total_steps=8,
            ),
        )  # fmt: skip
        ends.append(trained.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *ends)


@pytest.mark.parametrize("name", ["top 1, critic", "lora on top"])
def test_a_killed_run_goes_on_bit_for_bit(name, folder, critic, tmp_path):
    calls = []

    def failing(outputs, **_):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return letter_share(outputs)

    chosen = {key.replace(".", "__"): x for key, x in options(name, critic).items()}
    chosen |= {"train__checkpoint_interval": 4, "train__critic_warmup_steps": 2}
    run = lambda where, reward: train(  # noqa: E731
        folder, reward, PROMPTS, config=make_tiny_config(tmp_path / where, **chosen)
    )
    whole = run("whole", letter_share)
    with pytest.raises(KeyboardInterrupt):
        run("killed", failing)
    resumed = run("killed", letter_share)
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    figures = [
        [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]
        for rows in (read_lines(tmp_path / x / "metrics.jsonl") for x in ("whole", "killed"))
    ]
    assert figures[0] == figures[1]
    assert (tmp_path / "whole" / "adapter" / "adapter_config.json").exists() == ("lora" in name)
    model, params, _ = load_pretrained(tmp_path / "whole" / "model")  # an ordinary model
    assert not any("lora" in path for path in flatten_dict(params, sep="/"))
    tokens = np.arange(6)[None]
    np.testing.assert_allclose(
        model.logits(params, tokens), whole.model.logits(whole.params, tokens), atol=1e-5
    )


def test_the_critic_learns_alone_in_its_warm_up(folder, tmp_path):
    """The policy does not move for so many steps, then it does; the head moves from the first."""
    ends = {}
    for warmup in (4, 3):
        trained = train(
            folder, letter_share, PROMPTS,
            config=make_tiny_config(
                tmp_path / str(warmup), train__total_steps=4, train__critic_warmup_steps=warmup,
                optimizer__critic_lr=0.05,
            ),
        )  # fmt: skip
        ends[warmup] = trained.params
    _, start, _ = load_pretrained(folder)
    assert np.abs(ends[4]["value_head"]["out"]["kernel"]).max() > 0.05
    policy = {k: v for k, v in ends[4].items() if k != "value_head"}
    jax.tree.map(np.testing.assert_array_equal, policy, start)
    assert np.any(ends[3]["tokens"] != start["tokens"])


def test_compute_in_bfloat16_is_close_and_keeps_float32_masters(folder, tmp_path):
    seen = {}
    for dtype in ("float32", "bfloat16"):
        config = make_tiny_config(tmp_path, model__compute_dtype=dtype)
        model, params, _ = load_pretrained(folder)
        policy = make_policy(config, model, params, jax.random.key(0))
        programs = make_programs(config, policy, eos_ids=(), pad_id=22, stops=None)
        assert {x.dtype for x in jax.tree.leaves(policy.trained)} == {jnp.dtype("float32")}
        rng = np.random.default_rng(0)
        tokens, ones = rng.integers(0, 20, (B, P + N)), np.ones((B, P + N), bool)
        rollout = Rollout(tokens[:, :P], ones[:, :P], tokens[:, P:], ones[:, P:])
        score = programs.score(
            policy.trained, policy.frozen, policy.initial, rollout, np.zeros((B, N))
        )
        assert score.old.logprobs.dtype == jnp.float32
        np.testing.assert_array_equal(score.old.logprobs, score.ref_logprobs)
        seen[dtype] = np.asarray(score.old.logprobs)
    difference = np.abs(seen["float32"] - seen["bfloat16"]).max()
    assert 0 < difference < 0.05


def test_more_layers_than_there_are_is_refused(folder, tmp_path):
    for option in ("model__num_layers_unfrozen", "method__num_value_layers_unfrozen"):
        config = make_tiny_config(tmp_path / "run", **{option: 5})
        with pytest.raises(ConfigError, match="too large for a model of 2 layers"):
            train(folder, letter_share, PROMPTS, config=config)
    config = make_tiny_config(tmp_path / "run", model__lora={"rank": 2, "targets": ("wq",)})
    with pytest.raises(ConfigError, match="'wq' matches none"):
        train(folder, letter_share, PROMPTS, config=config)
    assert not (tmp_path / "run").exists()
