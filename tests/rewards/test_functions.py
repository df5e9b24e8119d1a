"""Users' functions of every form are called, and nothing odd passes in silence."""

import asyncio
import functools
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.rewards import RewardError, call_metric, call_reward

PROMPTS, OUTPUTS = ["p", "q", "r"], ["a", "bb", ""]
SAMPLES = ["pa", "qbb", "r"]
LENGTHS, WIDTH = [2, 3, 0], 4
TOKENIZER = object()


def reward(fn, samples=SAMPLES, lengths=LENGTHS, **columns):
    return call_reward(
        fn, samples=samples, prompts=PROMPTS, outputs=OUTPUTS, tokenizer=TOKENIZER,
        columns=columns, lengths=lengths, width=WIDTH,
    )  # fmt: skip


def metric(fn, **columns):
    return call_metric(
        fn, samples=SAMPLES, prompts=PROMPTS, outputs=OUTPUTS, columns=columns, tokenizer=TOKENIZER
    )


def lens(texts):
    return [float(len(text)) for text in texts]


def first_age(samples):
    return lens(samples)


def with_kwargs(samples, **kwargs):
    assert kwargs == {
        "prompts": PROMPTS,
        "outputs": OUTPUTS,
        "tokenizer": TOKENIZER,
        "k": [1, 2, 3],
    }
    return lens(samples)


def all_named(samples, prompts, outputs, tokenizer, **kwargs):
    assert (prompts, outputs, tokenizer) == (PROMPTS, OUTPUTS, TOKENIZER)
    assert kwargs == {"k": [1, 2, 3]}
    return lens(samples)


def column_named(outputs, k, samples):
    assert (outputs, k) == (OUTPUTS, [1, 2, 3])
    return lens(samples)


def keyword_only(*, samples, k=None):
    assert k == [1, 2, 3]
    return lens(samples)


def positional_only(texts, /):
    return lens(texts)


def with_default(samples, threshold=0.0):
    return [x + threshold for x in lens(samples)]


def with_leading(offset, samples, **_):
    return [x + offset for x in lens(samples)]


async def awaited(samples, **_):
    await asyncio.sleep(0)
    return lens(samples)


class Judge:
    def __call__(self, samples, **_):
        return lens(samples)

    def method(self, samples, prompts):
        assert prompts == PROMPTS
        return lens(samples)

    async def later(self, samples):
        await asyncio.sleep(0)
        return lens(samples)


FORMS = {
    "samples only": first_age,
    "samples and kwargs": with_kwargs,
    "all by name": all_named,
    "a column by name": column_named,
    "keyword only": keyword_only,
    "positional only": positional_only,
    "a default of its own": with_default,
    "lambda of another name": lambda texts: lens(texts),
    "lambda of args": lambda *args: lens(*args),
    "an object": Judge(),
    "a method": Judge().method,
    "partial by keyword": functools.partial(with_default, threshold=0.0),
    "partial by position": functools.partial(with_leading, 0.0),
    "async": awaited,
    "an async method": Judge().later,
    "a partial of async": functools.partial(awaited, seed=1),
}


@pytest.mark.parametrize("fn", FORMS.values(), ids=FORMS)
def test_functions_of_all_forms_are_called_with_what_they_take(fn):
    assert reward(fn, k=[1, 2, 3]).totals.tolist() == [2, 3, 1]


def test_a_builtin_without_a_signature_gets_the_samples():
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(iter)
    # what it gives back is no list of scores, but it was called and looked at
    with pytest.raises(RewardError, match="function iter returned a list_iterator"):
        reward(iter)


def test_an_async_function_works_where_a_loop_runs_already():
    async def notebook():
        return reward(awaited)

    assert asyncio.run(notebook()).totals.tolist() == [2, 3, 1]


class TorchLike:
    """What a tensor of torch does: numpy gets it only when detached, and never as bfloat16."""

    def __init__(self, data, dtype="torch.float32", attached=True):
        self.data, self.dtype, self.attached = np.asarray(data, np.float32), dtype, attached

    def detach(self):
        return TorchLike(self.data, self.dtype, attached=False)

    def cpu(self):
        return self

    def float(self):
        return TorchLike(self.data, "torch.float32", self.attached)

    def __array__(self, dtype=None, copy=None):
        if self.attached or self.dtype == "torch.bfloat16":
            raise TypeError("can't convert")
        return self.data


def torch_tensor(x):
    return pytest.importorskip("torch").tensor(x, requires_grad=True)


SCALARS = {
    "list": list,
    "tuple": tuple,
    "numpy": np.array,
    "numpy float16": lambda x: np.array(x, np.float16),
    "numpy ints": lambda x: np.array(x).astype(np.int64),
    "numpy objects": lambda x: np.array(x, object),
    "jax": jnp.array,
    "jax bfloat16": lambda x: jnp.array(x, jnp.bfloat16),
    "torch-like": TorchLike,
    "torch-like bfloat16": lambda x: TorchLike(x, "torch.bfloat16"),
    "torch": torch_tensor,
    "numpy scalars": lambda x: [np.float32(v) for v in x],
    "0-d arrays": lambda x: [np.array(v) for v in x],
    "0-d jax arrays": lambda x: [jnp.array(v, jnp.bfloat16) for v in x],
    "0-d torch-like": lambda x: [TorchLike(v) for v in x],
    "ints": lambda x: [int(v) for v in x],
}


@pytest.mark.parametrize("make", SCALARS.values(), ids=SCALARS)
def test_a_number_a_sample_lies_on_the_last_action(make):
    scores = reward(lambda samples: make([2.0, -3.0, 7.0]))
    assert not scores.dense
    np.testing.assert_array_equal(scores.totals, [2, -3, 7])
    # the third response is empty: its score is in the totals only
    np.testing.assert_array_equal(scores.grid, [[0, 2, 0, 0], [0, 0, -3, 0], [0, 0, 0, 0]])
    assert scores.grid.dtype == scores.totals.dtype == np.float32


def test_booleans_are_numbers():
    assert reward(lambda samples: [True, False, True]).totals.tolist() == [1, 0, 1]


def test_a_response_as_wide_as_the_grid():
    scores = reward(lambda samples: [5, 6, 7], lengths=[4, 1, 4])
    np.testing.assert_array_equal(scores.grid, [[0, 0, 0, 5], [6, 0, 0, 0], [0, 0, 0, 7]])


DENSE = {
    "lists": list,
    "tuples": tuple,
    "numpy": np.array,
    "jax": jnp.array,
    "bfloat16": lambda x: jnp.array(x, jnp.bfloat16),
    "torch-like": TorchLike,
    "lists of 0-d arrays": lambda x: [np.array(v) for v in x],
    "lists of torch-like": lambda x: [TorchLike(v) for v in x],
}


@pytest.mark.parametrize("make", DENSE.values(), ids=DENSE)
def test_dense_rows_are_ragged_and_may_be_short(make):
    # the second has fewer scores than tokens: the rest is 0
    scores = reward(lambda samples: [make([1.0, 2.0]), make([-4.0]), make([])])
    assert scores.dense
    np.testing.assert_array_equal(scores.grid, [[1, 2, 0, 0], [-4, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(scores.totals, [3, -4, 0])


def test_dense_scores_as_one_array():
    scores = reward(lambda samples: np.arange(6).reshape(3, 2), lengths=[2, 3, 4])
    np.testing.assert_array_equal(scores.grid[:, :2], [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_array_equal(scores.totals, [1, 5, 9])


REFUSED = {
    "too few": ([1, 2], r"returned 2 values for 3 samples"),
    "too many": ([1, 2, 3, 4], r"returned 4 values for 3 samples"),
    "None": (None, r"returned a NoneType; it must return one score a sample"),
    "a number": (1.0, r"returned a float; it must"),
    "text": ("abc", r"returned a str; it must"),
    "a dict": ({"a": 1, "b": 2, "c": 3}, r"returned a dict; it must"),
    "a set": ({1, 2, 3}, r"returned a set; it must"),
    "a generator": ((x for x in (1, 2, 3)), r"returned a generator; it must"),
    "one str": ([1, 2, "0.5"], r"returned a str \('0\.5'\) for sample 2, 'r'"),
    "one dict": ([{"x": 1}, 2, 3], r"returned a dict .* for sample 0, 'pa'"),
    "complex": ([1, 2j, 3], r"returned a complex .* for sample 1"),
    "NaN": ([1, 2, float("nan")], r"returned nan for sample 2, 'r'; scores must be finite"),
    "inf": ([1, float("inf"), 1], r"returned inf for sample 1"),
    "minus inf": (np.array([-np.inf, 1, 2]), r"returned -inf for sample 0"),
    "beyond float32": ([1, 1e39, 2], r"returned inf for sample 1"),
    "number and list": ([1.0, [1.0], [2.0]], r"a number for sample 0 and a list for sample 1"),
    "list and number": ([[1.0], 3.0, []], r"a number for sample 1 and a list for sample 0"),
    "too many dense": ([[1, 2], [1, 2, 3, 4], []], r"4 scores for sample 1, 'qbb', which has 3"),
    "dense for nothing": ([[1], [1, 2], [0.0]], r"1 scores for sample 2, 'r', which has 0 tokens"),
    "dense NaN": ([[1, 2], [1, np.nan], []], r"nan for sample 1"),
    "dense None": ([[1, None], [1], []], r"returned a list \(.*\) for sample 0"),
    "dense text": ([["a"], [1], []], r"returned a list .* for sample 0"),
    "dense beyond float32": ([[1], [3e38, 3e38], []], r"inf for sample 1"),
    "lists of lists": ([[[1, 2]], [[1]], [[]]], r"returned a list .* for sample 0"),
    "ragged lists of lists": ([[[1, 2], [1]], [1], []], r"returned a list .* for sample 0"),
}


@pytest.mark.filterwarnings("error")  # numpy's warnings are no substitute
@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED)
def test_odd_results_are_errors_that_name_function_and_sample(value, message):
    def judge(samples):
        return value

    with pytest.raises(RewardError, match=message) as caught:
        reward(judge)
    assert str(caught.value).startswith("the reward function judge returned ")


def test_any_text_can_be_named():
    # braces are what format strings are made of, and code is full of them
    samples = ['f"{x}" {} {0!z}', "y" * 200, "z"]
    with pytest.raises(RewardError) as caught:
        reward(lambda samples: [float("nan"), 1, 2], samples=samples)
    assert repr(samples[0]) in str(caught.value)
    with pytest.raises(RewardError) as caught:
        reward(lambda samples: [1, "bad", 2], samples=samples)
    assert "yyy..." in str(caught.value)
    assert "y" * 61 not in str(caught.value)


def test_what_a_function_raises_is_named_and_kept():
    def judge(samples):
        raise KeyError("model")

    async def later(samples):
        raise ValueError("no answer")

    for fn in (judge, functools.partial(judge)):
        with pytest.raises(
            RewardError, match="reward function judge raised KeyError: 'model'"
        ) as e:
            reward(fn)
        assert isinstance(e.value.__cause__, KeyError)
    with pytest.raises(RewardError, match="later raised ValueError: no answer"):
        reward(later)
    with pytest.raises(RewardError, match=r"reward function Judge raised TypeError: .*argument"):
        reward(type("Judge", (), {"__call__": lambda self, outputs, other: None})())


def test_an_interrupt_is_no_failure_of_the_function():
    def judge(samples):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reward(judge)


def test_metrics_are_lists_or_numbers():
    def fn(samples, prompts, k, **_):
        assert (prompts, k) == (PROMPTS, [1, 2, 3])
        return {
            "list": [1, 2.5, True],
            "numpy": np.arange(3),
            "jax": jnp.array([1, 2, 3], jnp.bfloat16),
            "torch-like": TorchLike([1, 2, 3]),
            "number": 3,
            "0-d": np.array(4.0),
            "0-d jax": jnp.float32(5),
            "nan": [float("nan"), 1, 2],
            7: 0.0,
        }

    found = metric(fn, k=[1, 2, 3])
    assert np.isnan(found.pop("nan")[0])
    assert found == {
        "list": [1, 2.5, 1], "numpy": [0, 1, 2], "jax": [1, 2, 3], "torch-like": [1, 2, 3],
        "number": 3, "0-d": 4, "0-d jax": 5, "7": 0,
    }  # fmt: skip
    kinds = {type(x) for value in found.values() for x in np.ravel(value).tolist()}
    assert kinds <= {float}
    assert metric(lambda texts: {"n": len(texts)}) == {"n": 3}
    assert metric(lambda samples: {}) == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2, 3], r"returned a list, not a dict of metrics"),
        (None, r"returned a NoneType, not a dict"),
        ({"x": [1, 2]}, r"returned 2 values for 3 samples as 'x'"),
        ({"y": 1, "x{}": [1, None, 2]}, r"returned None as 'x\{\}'"),
        ({"x": "high"}, r"returned a str \('high'\) as 'x'"),
        ({"x": ["a", "b", "c"]}, r"returned a str \('a'\) as 'x'"),
        ({"x": [[1, 2], [1, 2], [1, 2]]}, r"returned a list .* as 'x'"),
        ({"x": np.ones((3, 1))}, r"returned a ndarray .* as 'x'"),
    ],
)
def test_odd_metrics_are_errors_that_name_function_and_metric(value, message):
    def quality(samples):
        return value

    with pytest.raises(RewardError, match=message) as caught:
        metric(quality)
    assert str(caught.value).startswith("the metric function quality returned ")


def test_a_metric_function_that_raises_is_named():
    def quality(samples):
        return 1 / 0

    with pytest.raises(RewardError, match="the metric function quality raised ZeroDivisionError"):
        metric(quality)


def test_a_column_of_scores_is_a_score_a_sample():
    result = call_reward(
        lambda samples: np.array([[1.0], [2.0]]),
        samples=["a", "b"],
        prompts=["", ""],
        outputs=["a", "b"],
        tokenizer=None,
        columns={},
        lengths=[3, 2],
        width=3,
    )
    np.testing.assert_array_equal(result.grid, [[0, 0, 1], [0, 2, 0]])
    assert not result.dense


def test_exiting_is_a_failure_as_any_other():
    def fn(samples):
        raise SystemExit(0)

    with pytest.raises(RewardError, match="the reward function fn raised SystemExit: 0"):
        call_reward(
            fn, samples=["a"], prompts=[""], outputs=["a"], tokenizer=None, columns={},
            lengths=[1], width=1,
        )  # fmt: skip
