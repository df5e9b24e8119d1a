"""Conversations: what is said, what is trained on, what it costs, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_train import EOS, PROMPTS, make_tiny_config, make_tokenizer, read_lines, save_model

from jaxppo import Evaluation, RewardError, Rollout, load_pretrained, make_evaluate, train
from jaxppo.config import ConfigError
from jaxppo.environments import converse
from jaxppo.experience import make_experience
from jaxppo.sampling import Samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "policy")


class Echo:
    """Says the first letter that it heard twice; it is over after `ab`."""

    def reset(self, prompt, tag):
        self.tag = tag
        return tag

    def step(self, action):
        return 2 * action[:1], float(len(action)), action == "ab"


SCRIPT = {0: ["ab"], 1: ["c", "ab"], 2: ["d", "e", "f"]}  # actions of rows


def scripted(script=SCRIPT, calls=None):
    """A `generate` that says what is written, and checks that it is told all that was said."""
    letters, turns = make_tokenizer(), dict.fromkeys(script, 0)

    def generate(params, key, prompts, prompt_mask, row_ids):
        rows = np.asarray(row_ids).tolist()
        if calls is not None:
            calls.append(([letters.decode(p[m]) for p, m in zip(prompts, prompt_mask)], rows))
        tokens, mask = np.zeros((len(rows), 3), np.int32), np.zeros((len(rows), 3), bool)
        for i, row in enumerate(rows):
            ids = letters(script[row][turns[row]], add_special_tokens=False)["input_ids"]
            ids = [*ids, EOS][:3]
            tokens[i, : len(ids)], mask[i, : len(ids)] = ids, True
        for row in set(rows):
            turns[row] += 1
        return Samples(tokens, -1.0 * mask, mask, mask[:, -1])

    return generate


def play(make=Echo, generate=None, texts=("a", "b", "cc"), **options):
    tokenizer = make_tokenizer()
    options = {"max_turns": 3, "action_tokens": 3, "observation_tokens": 6, **options}
    return converse(
        make, generate or scripted(), None, jax.random.key(0),
        prompts=[np.asarray(tokenizer(t)["input_ids"]) for t in texts], texts=texts,
        columns={"tag": ["j", "", "k"], "other": [1, 2, 3]}, row_ids=range(3), rows=4,
        prompt_width=2, tokenizer=tokenizer, pad_id=22, **options,
    )  # fmt: skip


def said(conversations, row):
    tokens = conversations.samples.tokens[row][conversations.seen[row]]
    return make_tokenizer().decode(tokens).replace("<eos>", "|")


def test_what_is_said_lies_on_the_grid_and_only_actions_are_masked():
    calls = []
    held = play(generate=scripted(calls=calls))
    assert [said(held, row) for row in range(3)] == ["jab|", "c|ccab|", "kd|dde|eef|"]
    mask = ["".join(".A"[int(x)] for x in row) for row in held.samples.mask]
    assert mask == [".AAA...........", "AA..AAA........", ".AA..AA..AA...."]
    assert held.samples.logprobs[held.samples.mask].tolist() == [-1.0] * 14
    assert not held.samples.logprobs[~held.samples.mask].any()
    assert held.samples.ended.tolist() == [True, True, False]
    assert held.turns.tolist() == [1, 2, 3]
    assert np.argwhere(held.earned).tolist() == [[0, 3], [1, 1], [1, 6], [2, 2], [2, 6], [2, 10]]
    assert held.earned.sum(1).tolist() == [2, 3, 3]
    # all that was said is the next turn's prompt, and conversations that are over are not decoded
    assert [rows for _, rows in calls] == [[0, 1, 2, 0], [1, 2], [2]]
    assert [text.replace("<eos>", "|") for text in calls[1][0]] == ["bc|cc", "cckd|dd"]


def test_an_observation_without_room_ends_a_conversation():
    held = play(observation_tokens=2)
    assert [said(held, row) for row in range(3)] == ["jab|", "c|ccab|", "kd|"]
    assert held.samples.ended.tolist() == [True, True, False]
    with pytest.raises(RewardError, match=r"Echo begins with more than the 0 tokens"):
        play(observation_tokens=0)


def test_token_ids_pass_as_they_are():
    heard = []

    class Tokens:
        takes_ids = True

        def reset(self, prompt):
            return [3]

        def step(self, action):
            heard.append(action)
            return np.array([5, 6]), 0.0, False

    held = play(Tokens, max_turns=1)
    assert [said(held, row)[0] for row in range(3)] == ["d"] * 3
    assert heard == [[0, 1, EOS], [2, EOS], [3, EOS]]


class Odd:
    answer = None

    def reset(self, prompt):
        return ""

    def step(self, action):
        return type(self).answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (1.0, r"answered 1\.0; it must return an observation, a reward"),
        (("a", float("nan"), True), "gave the reward nan"),
        (("a", "much", True), "gave the reward 'much'"),
        (("", 0.0, False), "observed nothing after an action"),
        ((["x"], 0.0, False), r"observed \['x'\]; give text"),
        (([99], 0.0, False), r"observed \[99\]"),
        (("\ud800", 0.0, False), "observed text that holds half of a surrogate pair"),
    ],
)
def test_odd_answers_are_errors_that_name_environment_and_prompt(answer, message):
    Odd.answer = answer
    with pytest.raises(RewardError, match=message) as caught:
        play(Odd)
    assert str(caught.value).startswith("the environment Odd ")
    assert "(prompt 'a')" in str(caught.value)


def test_what_an_environment_raises_is_named():
    class Broken(Odd):
        def step(self, action):
            raise KeyError("door")

    with pytest.raises(RewardError, match="the environment Broken raised KeyError: 'door'"):
        play(Broken)


def test_observations_have_no_part_in_advantages_losses_and_kl(folder):
    """NaN at every token that was read and not said changes nothing."""
    held = play()
    shape = held.seen.shape
    rng = np.random.default_rng(0)
    rollout = Rollout(
        jnp.zeros((3, 2), jnp.int32), jnp.ones((3, 2), bool), jnp.asarray(held.samples.tokens),
        jnp.asarray(held.samples.mask), seen=jnp.asarray(held.seen),
    )  # fmt: skip
    logprobs, values, ref = rng.normal(size=(3, *shape)).astype(np.float32)

    def batch(fill):
        x = [jnp.where(rollout.mask, a, fill) for a in (logprobs, values, ref)]
        old = Evaluation(x[0], x[1], x[0])
        return make_experience(
            rollout, jnp.asarray(held.earned), old, x[2], kl_coef=0.1, gamma=0.9, lam=0.8
        )

    (one, figures), (two, same) = batch(0.0), batch(jnp.nan)
    assert {k: float(v) for k, v in figures.items()} == {k: float(v) for k, v in same.items()}
    real = np.asarray(rollout.mask)
    for name in ("advantages", "returns", "kl"):
        a, b = (np.asarray(getattr(x, name)) for x in (one, two))
        np.testing.assert_array_equal(a if a.ndim == 1 else a[real], b if b.ndim == 1 else b[real])
    # GAE goes from an action to the next one, over what lies between
    row, lam, gamma = 1, 0.8, 0.9
    at = np.flatnonzero(real[row])
    rewards = held.earned[row, at] - 0.1 * (logprobs - ref)[row, at]
    v, running, returns = [*values[row, at], 0.0], 0.0, []
    for t in reversed(range(len(at))):
        running = rewards[t] + gamma * v[t + 1] - v[t] + gamma * lam * running
        returns.append(running + v[t])
    np.testing.assert_allclose(np.asarray(one.returns)[row, at], returns[::-1], rtol=1e-5)


class Alphabet:
    """Asks for the letter after the one that it says; twice."""

    def reset(self, prompt):
        self.turn, self.letter = 0, "c"
        return "c"

    def step(self, action):
        right = float(action[:1] == chr(ord(self.letter) + 1))
        self.turn += 1
        self.letter = "jq"[self.turn % 2]
        return self.letter * self.turn, right, self.turn > 1 and right > 0


def run(model, folder, **options):
    options = {
        "environment__max_turns": 3, "environment__observation_tokens": 4, "train__seq_length": 32,
        "method__gen_kwargs__max_new_tokens": 3, "train__total_steps": 8, **options,
    }  # fmt: skip
    environment = options.pop("environment", Alphabet)
    config = make_tiny_config(folder, **options)
    return train(model, None, PROMPTS, config=config, environment=environment)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method__name": "grpo", "method__group_size": 4, "method__gen_kwargs__top_k": 5},
        {"method__gen_kwargs__min_new_tokens": 2, "model__num_layers_unfrozen": 1},
    ],
    ids=["ppo", "grpo", "min_new_tokens"],
)
def test_the_scorer_sees_what_the_sampler_saw(folder, tmp_path, options):
    """Log-probs of both agree, turn for turn, whatever stands between the actions."""
    run(folder, tmp_path, **options)
    rows = [r for r in read_lines(tmp_path / "metrics.jsonl") if "losses/total_loss" in r]
    assert len(rows) == 2
    assert max(row["rollout/logprob_gap"] for row in rows) < 1e-5
    assert rows[0]["policy/kl"] == 0.0
    assert 1 <= rows[0]["rollout/turns"] <= 3
    assert rows[0]["rollout/response_length"] <= 9


def test_a_conversation_does_not_depend_on_those_beside_it(folder, tmp_path):
    for chunk in (8, 16):
        run(folder, tmp_path / str(chunk), method__chunk_size=chunk, train__total_steps=4)
    one, two = (read_lines(tmp_path / str(c) / "metrics.jsonl") for c in (8, 16))
    for name in ("rollout_scores/mean", "rollout/response_length", "losses/policy_loss"):
        a, b = ([row[name] for row in rows if name in row] for rows in (one, two))
        np.testing.assert_allclose(a, b, rtol=1e-4)


def test_a_killed_run_goes_on_bit_for_bit(folder, tmp_path):
    made = []

    class Dying(Alphabet):
        def step(self, action):
            made.append(1)
            if len(made) == 150:
                raise KeyboardInterrupt
            return super().step(action)

    options = {"train__total_steps": 12, "train__checkpoint_interval": 4}
    whole = run(folder, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "killed", environment=Dying, **options)
    resumed = run(folder, tmp_path / "killed", **options)
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)


def test_reward_functions_are_added_and_see_the_conversation(folder, tmp_path):
    seen = []

    def reward(prompts, outputs):
        seen.extend(zip(prompts, outputs))
        return [100.0] * len(outputs)

    config = make_tiny_config(
        tmp_path, train__total_steps=4, train__seq_length=32, environment__observation_tokens=4
    )
    train(folder, reward, PROMPTS, config=config, environment=Alphabet)
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert all(row["reward/mean"] >= 100 for row in rows if "reward/mean" in row)
    assert all(output.startswith("c") for _, output in seen)  # the first observation


def test_what_has_no_effect_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"method\.decode_slots has no effect on conversations"):
        run(folder, tmp_path, method__decode_slots=8)
    with pytest.raises(ConfigError, match="leave no room for a prompt"):
        run(folder, tmp_path, environment__observation_tokens=64)


def test_evaluate_reads_observations(folder):
    """Log-probs of a conversation are those of its tokens in one text."""
    model, params, _ = load_pretrained(folder)
    tokens = jnp.arange(2, 14, dtype=jnp.int32)[None]
    prompts, ones = tokens[:, :3], jnp.ones((1, 3), bool)
    mask = jnp.asarray([[True, True, False, False, True, True, False, True, True]])
    evaluate = make_evaluate(model)
    told = evaluate(
        params, Rollout(prompts, ones, tokens[:, 3:], mask, seen=jnp.ones((1, 9), bool))
    )
    whole = evaluate(params, Rollout(prompts, ones, tokens[:, 3:], jnp.ones((1, 9), bool)))
    np.testing.assert_allclose(told.logprobs, whole.logprobs, atol=1e-6)
