"""Each row of METHODS against its paper's formula, by a plain float64 loop."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.core import policy_loss_sums
from jaxppo.core.batch import Evaluation, PPOBatch, Prices
from jaxppo.core.clips import Clipped
from jaxppo.methods import METHODS, Feedback, Method
from jaxppo.objectives import make_objective

DOCS = (pathlib.Path(__file__).parents[1] / "docs" / "methods.md").read_text()
# Nine samples of three prompts, in no order. Sample 5 has no action, sample 8 no reward; the rest
# are trained on. The two samples of prompt 8 score the same.
GROUPS = np.array([3, 1, 3, 1, 8, 3, 8, 1, 3])
LENGTHS = np.array([4, 2, 3, 1, 4, 0, 2, 3, 4])
B, N, LONGEST, BETA = 9, 4, 6, 0.1
MASK = np.arange(N) < LENGTHS[:, None]
PRESENT = np.arange(B) != 8
ROWS = [0, 1, 2, 3, 4, 6, 7]
rng = np.random.default_rng(11)
NOW, REF = rng.normal(-2, 0.4, (2, B, N))
OLD = NOW + 0.25 * rng.normal(size=(B, N))
SCORES = rng.normal(size=B)
SCORES[[4, 6]] = 0.1
VALUES, GREEDY, STEP = rng.normal(size=(B, N)), rng.normal(size=B), 2


# Advantages. Each takes the score of a sample and returns one figure a sample, or one a token.


def siblings(i):
    return [j for j in ROWS if GROUPS[j] == GROUPS[i]]


def with_kl(score, i):
    """RLHF's reward of a response: its score less the price of sum_t log pi_old/pi_ref."""
    return score - BETA * sum(OLD[i, t] - REF[i, t] for t in range(LENGTHS[i]))


def token_reward(i, t):
    score = SCORES[i] if t == LENGTHS[i] - 1 else 0.0
    return score - BETA * (OLD[i, t] - REF[i, t])


def whitened(by_token):
    values = np.array(list(by_token.values()))
    return {k: (v - values.mean()) / np.sqrt(values.var() + 1e-8) for k, v in by_token.items()}


def ppo_advantages():
    result = {}
    for i in ROWS:
        for t in range(LENGTHS[i]):
            total = 0.0
            for later in range(t, LENGTHS[i]):
                following = VALUES[i, later + 1] if later + 1 < LENGTHS[i] else 0.0
                delta = token_reward(i, later) + following - VALUES[i, later]
                total += 0.95 ** (later - t) * delta
            result[i, t] = total
    return whitened(result)


def reinforce_pp_advantages():
    to_go = lambda i, t: sum(token_reward(i, s) for s in range(t, LENGTHS[i]))  # noqa: E731
    return whitened({(i, t): to_go(i, t) for i in ROWS for t in range(LENGTHS[i])})


def grpo_advantages():
    result = {}
    for i in ROWS:
        rewards = np.array([SCORES[j] for j in siblings(i)])
        result[i] = (SCORES[i] - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    return result


def dr_grpo_advantages():
    return {i: SCORES[i] - np.mean([SCORES[j] for j in siblings(i)]) for i in ROWS}


def rloo_advantages():
    rewards = {i: with_kl(SCORES[i], i) for i in ROWS}
    return {i: rewards[i] - np.mean([rewards[j] for j in siblings(i) if j != i]) for i in ROWS}


def reinforce_pp_baseline_advantages():
    centred = dr_grpo_advantages()
    std = np.std(list(centred.values()), ddof=1)
    return {i: (a - np.mean(list(centred.values()))) / (std + 1e-8) for i, a in centred.items()}


def remax_advantages():
    return {i: with_kl(SCORES[i], i) - GREEDY[i] for i in ROWS}


def pass_at_2_advantages():
    """The mean lead over a sibling, 0 where there is none."""
    return {
        i: np.mean([max(SCORES[i] - SCORES[j], 0) for j in siblings(i) if j != i]) for i in ROWS
    }


def best_of_n():
    best = {}
    for i in ROWS:
        scores = [SCORES[j] for j in siblings(i)]
        if SCORES[i] == max(scores) > min(scores):
            best[i] = 1.0
    return best


def rft():
    percentile = 0.7 + 0.25 * STEP / 4
    chosen = {}
    for i in ROWS:
        scores = [SCORES[j] for j in siblings(i)]
        if SCORES[i] >= np.quantile(scores, percentile) and SCORES[i] > min(scores):
            chosen[i] = 1.0
    return chosen


# Losses of one optimizer step, given log-probs `x` and, for what is no part of the gradient, `c`.


def surrogate(rho, a, low=0.2, high=0.2):
    return -min(rho * a, min(max(rho, 1 - low), 1 + high) * a)


def rho(x, i, t):
    return np.exp(x[i, t] - OLD[i, t])


def geometric(x, i):
    return np.exp(np.mean([x[i, t] - OLD[i, t] for t in range(LENGTHS[i])]))


def token_mean(term, a):
    tokens = [(i, t) for i in a for t in range(LENGTHS[i])]
    return sum(term(i, t) for i, t in tokens) / len(tokens)


def sequence_mean(term, a):
    return np.mean([np.mean([term(i, t) for t in range(LENGTHS[i])]) for i in a])


def at(a, i, t):
    return a[i, t] if (i, t) in a else a[i]


def ppo_loss(x, c, a, **ranges):
    tokens = [(i, t) for i in ROWS for t in range(LENGTHS[i])]
    return np.mean([surrogate(rho(x, i, t), at(a, i, t), **ranges) for i, t in tokens])


def grpo_loss(x, c, a):
    return sequence_mean(lambda i, t: surrogate(rho(x, i, t), a[i]), a)


def dr_grpo_loss(x, c, a):
    by_row = [sum(surrogate(rho(x, i, t), a[i]) for t in range(LENGTHS[i])) for i in a]
    return np.mean(by_row) / LONGEST


def rloo_loss(x, c, a):
    """The response is one action."""
    whole = lambda i: np.prod([rho(x, i, t) for t in range(LENGTHS[i])])  # noqa: E731
    return np.mean([surrogate(whole(i), a[i]) for i in a])


def remax_loss(x, c, a):
    return -np.mean([a[i] * sum(x[i, t] for t in range(LENGTHS[i])) for i in a])


def gspo_loss(x, c, a):
    return np.mean([surrogate(geometric(x, i), a[i], 3e-4, 4e-4) for i in a])


def gspo_token_loss(x, c, a):
    ratio = lambda i, t: geometric(c, i) * np.exp(x[i, t] - c[i, t])  # noqa: E731
    return sequence_mean(lambda i, t: surrogate(ratio(i, t), a[i], 3e-4, 4e-4), a)


def luspo_loss(x, c, a):
    return np.mean([LENGTHS[i] * surrogate(geometric(x, i), a[i], 3e-4, 4e-4) for i in a])


def two_sided_loss(x, c, a):
    def term(i, t):
        ratio = rho(x, i, t)
        return -min(min(ratio, 4.0) * a[i], min(max(ratio, 0.8), 1.2) * a[i])

    return token_mean(term, a)


def cispo_loss(x, c, a):
    return token_mean(lambda i, t: -min(rho(c, i, t), 5.0) * a[i] * x[i, t], a)


def sapo_loss(x, c, a):
    def term(i, t):
        tau = 1.0 if a[i] > 0 else 1.05
        return -a[i] * 4 / tau / (1 + np.exp(-tau * (rho(x, i, t) - 1)))

    return sequence_mean(term, a)


def gmpo_loss(x, c, a):
    total = 0.0
    for i in a:
        product = 1.0
        for t in range(LENGTHS[i]):
            sign = 1.0 if a[i] > 0 else -1.0
            bounded = min(max(rho(x, i, t), np.exp(-0.4)), np.exp(0.4))
            product *= min(rho(x, i, t) ** sign, bounded**sign) ** sign
        total -= product ** (1 / LENGTHS[i]) * a[i] / len(a)
    return total


def vespo_loss(x, c, a):
    def term(i, t):
        w = np.prod([rho(c, i, s) for s in range(LENGTHS[i])])
        k, lam = (2, 3) if a[i] >= 0 else (3, 2)
        return -(w**k) * np.exp(lam * (1 - w)) * a[i] * x[i, t]

    return token_mean(term, a)


def likelihood_loss(x, c, a):
    return token_mean(lambda i, t: -x[i, t], a)


dapo_loss = functools.partial(ppo_loss, low=0.2, high=0.28)

FORMULAS = {
    "ppo": (ppo_advantages, ppo_loss),
    "grpo": (grpo_advantages, grpo_loss),
    "dr_grpo": (dr_grpo_advantages, dr_grpo_loss),
    "rloo": (rloo_advantages, rloo_loss),
    "reinforce_pp": (reinforce_pp_advantages, ppo_loss),
    "reinforce_pp_baseline": (reinforce_pp_baseline_advantages, ppo_loss),
    "remax": (remax_advantages, remax_loss),
    "gspo": (grpo_advantages, gspo_loss),
    "gspo_token": (grpo_advantages, gspo_token_loss),
    "luspo": (grpo_advantages, luspo_loss),
    "dapo": (grpo_advantages, dapo_loss),
    "two_sided_grpo": (grpo_advantages, two_sided_loss),
    "cispo": (grpo_advantages, cispo_loss),
    "sapo": (grpo_advantages, sapo_loss),
    "gmpo": (grpo_advantages, gmpo_loss),
    "vespo": (grpo_advantages, vespo_loss),
    "pass_at_k": (pass_at_2_advantages, ppo_loss),
    "best_of_n": (best_of_n, likelihood_loss),
    "rft": (rft, likelihood_loss),
}
# How a KL in the loss is averaged, in the words of the paper: as the policy's terms are.
KL_MEANS = {"grpo": sequence_mean}
ESTIMATES = {"k2": lambda r: r**2 / 2, "k3": lambda r: np.exp(-r) - 1 + r}


def slope_of(loss):
    """Central differences, at every position."""
    slope = np.zeros((B, N))
    for i, t in np.argwhere(MASK):
        step = np.zeros((B, N))
        step[i, t] = 1e-6
        slope[i, t] = (loss(NOW + step) - loss(NOW - step)) / 2e-6
    return slope


def feedback_of(method):
    """What the loop hands to the method; every place that holds nothing holds NaN."""
    last = np.arange(N) == LENGTHS[:, None] - 1
    rewards = np.where(last, np.where(PRESENT, SCORES, np.nan)[:, None], 0.0)
    if method.kl.reward:
        rewards = rewards - BETA * (OLD - REF)
    rewards = np.where(MASK, rewards, np.nan)
    values = np.where(MASK, VALUES, np.nan)
    return Feedback(rewards, MASK, GROUPS, PRESENT, values, GREEDY, STEP)


def batch_of(method, credit):
    nan = lambda x: np.where(MASK, x, np.nan)  # noqa: E731
    return PPOBatch(
        inputs=None,
        old_logprobs=nan(OLD),
        old_values=nan(VALUES),
        advantages=credit.advantages,
        returns=credit.returns,
        mask=jnp.asarray(MASK) & credit.keep[:, None],
        kl=np.zeros(B),
        ref_logprobs=nan(REF),
    )


def loss_of(objective, batch, rows=slice(None)):
    """The loss and its slope by log-probs, of the step or of some of its rows."""
    weights = objective.weigh(batch)
    part, weights = jax.tree.map(lambda x: x[rows], (batch, weights))
    zeros = jnp.zeros((B, N))[rows]

    def loss(logprobs):
        seen = Evaluation(logprobs, jnp.asarray(VALUES)[rows], zeros)
        return objective.sums(seen, part, weights, Prices(BETA, 0.0))["losses/total_loss"]

    return jax.jit(jax.value_and_grad(loss))(jnp.asarray(np.where(MASK, NOW, np.nan))[rows])


def test_every_row_has_a_formula_and_stands_in_the_docs():
    assert FORMULAS.keys() == METHODS.keys()
    table = DOCS.split("## The table")[1].split("\n\n")[1]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(METHODS)
    for name, arxiv in (("grpo", "2402.03300"), ("dapo", "2503.14476")):
        assert re.search(rf"^\| `{name}` .*{arxiv}", table, re.MULTILINE)


@pytest.mark.parametrize("name", METHODS)
def test_a_row_is_its_papers_formula(name):
    method = METHODS[name]
    advantages, loss = FORMULAS[name]
    expected = advantages()
    with jax.enable_x64(True):
        credit = jax.jit(method.advantage)(feedback_of(method))
        objective = make_objective(method, max_length=LONGEST, vf_coef=0.0)
        batch = batch_of(method, credit)
        value, slope = loss_of(objective, batch)
        two = [loss_of(objective, batch, rows) for rows in (slice(0, 4), slice(4, B))]

    grid = np.zeros((B, N))
    for sample_or_token, advantage in expected.items():
        grid[sample_or_token] = advantage
    np.testing.assert_allclose(credit.advantages, np.where(MASK, grid, 0), rtol=1e-10, atol=1e-12)
    trained = {key[0] if isinstance(key, tuple) else key for key in expected}
    np.testing.assert_array_equal(np.flatnonzero(credit.keep), sorted(trained))

    wanted = loss(NOW, NOW, expected)
    wanted_slope = slope_of(lambda x: loss(x, NOW, expected))
    if method.kl.loss:
        # The estimate's value and the KL's gradient, under the ratio of policy to old policy.
        mean, kind = KL_MEANS.get(name, token_mean), ESTIMATES[method.kl.loss]
        r = NOW - REF
        wanted += BETA * mean(lambda i, t: rho(NOW, i, t) * kind(r[i, t]), expected)
        wanted_slope += slope_of(
            lambda x: BETA * mean(lambda i, t: rho(NOW, i, t) * r[i, t] * x[i, t], expected)
        )
    np.testing.assert_allclose(value, wanted, rtol=1e-10)
    np.testing.assert_allclose(slope, wanted_slope, rtol=1e-6, atol=1e-9)
    assert np.abs(wanted_slope).max() > 1e-3

    # Cut in two, the step is the same.
    np.testing.assert_allclose(sum(float(v) for v, _ in two), value, rtol=1e-10)
    np.testing.assert_allclose(np.concatenate([s for _, s in two]), slope, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("name", METHODS)
def test_nothing_to_train_on_gives_nothing(name):
    """No reward given at all; and the same for a batch of empty responses."""
    method = METHODS[name]
    objective = make_objective(method, max_length=LONGEST)
    feedback = feedback_of(method)
    for nothing in (
        feedback._replace(present=np.zeros(B, bool)),
        feedback._replace(mask=np.zeros((B, N), bool)),
    ):
        credit = jax.jit(method.advantage)(nothing)
        assert not credit.keep.any()
        np.testing.assert_array_equal(credit.advantages, np.zeros((B, N)))
        value, slope = loss_of(objective, batch_of(method, credit))
        assert value == 0
        np.testing.assert_array_equal(slope, np.zeros((B, N)))


@pytest.mark.parametrize("name", [k for k in METHODS if k not in ("ppo", "remax")])
def test_equal_scores_give_no_advantage(name):
    last = np.arange(N) == LENGTHS[:, None] - 1
    rewards = np.where(last, np.float32(0.1), 0).astype(np.float32)
    feedback = Feedback(jnp.asarray(rewards), MASK, GROUPS)
    if name == "reinforce_pp":  # its batch is the group: all returns are 0.1
        returns = jax.jit(METHODS[name].advantage)(feedback).returns
        assert np.unique(np.asarray(returns)[MASK]).size == 1
    credit = jax.jit(METHODS[name].advantage)(feedback)
    np.testing.assert_array_equal(credit.advantages, np.zeros((B, N)))


def test_what_a_method_needs_is_asked_for():
    plain = Feedback(jnp.zeros((B, N)), MASK)
    for name in ("grpo", "rft", "best_of_n"):
        with pytest.raises(ValueError, match="give groups"):
            METHODS[name].advantage(plain)
    with pytest.raises(ValueError, match="critic"):
        METHODS["ppo"].advantage(plain)
    with pytest.raises(ValueError, match="greedy"):
        METHODS["remax"].advantage(plain)
    credit = METHODS["grpo"].advantage(feedback_of(METHODS["grpo"]))
    batch = batch_of(METHODS["grpo"], credit).replace(ref_logprobs=None)
    with pytest.raises(ValueError, match="ref_logprobs"):
        loss_of(make_objective(METHODS["grpo"]), batch)
    with pytest.raises(ValueError, match="max_length"):
        loss_of(make_objective(METHODS["dr_grpo"]), batch)
    for option in ({"entropy_share": 0.5}, {"importance": lambda *x: x[0]}):
        with pytest.raises(ValueError, match="needs"):
            loss_of(make_objective(METHODS["dapo"], **option), batch)


def test_a_new_method_is_a_function_and_a_row():
    """As docs/methods.md has it: a clip of one's own, in an existing row."""

    def squared(log_ratio, logprobs, advantages, mask):
        distance = jnp.square(jnp.expm1(log_ratio))
        return Clipped(-advantages * jnp.exp(log_ratio) + distance, distance > 1)

    method = METHODS["grpo"]._replace(clip=squared)
    assert isinstance(method, Method)
    with jax.enable_x64(True):
        credit = method.advantage(feedback_of(method))
        value, _ = loss_of(make_objective(method), batch_of(method, credit))
        a = grpo_advantages()
        r = NOW - REF
        term = lambda i, t: -a[i] * rho(NOW, i, t) + (rho(NOW, i, t) - 1) ** 2  # noqa: E731
        kl = lambda i, t: rho(NOW, i, t) * ESTIMATES["k3"](r[i, t])  # noqa: E731
        wanted = sequence_mean(term, a) + BETA * sequence_mean(kl, a)
    np.testing.assert_allclose(value, wanted, rtol=1e-10)


def test_policy_loss_sums_is_what_the_objective_calls():
    """Nothing of the loss is hidden in the objective: weights in, the same figure out."""
    method = METHODS["dapo"]
    with jax.enable_x64(True):
        batch = batch_of(method, method.advantage(feedback_of(method)))
        value, _ = loss_of(make_objective(method), batch)
        sums = policy_loss_sums(
            NOW, OLD, batch.advantages, batch.mask, method.normaliser(batch.mask),
            ratio=method.ratio, clip=method.clip,
        )  # fmt: skip
    np.testing.assert_allclose(value, sums["losses/total_loss"], rtol=1e-12)
