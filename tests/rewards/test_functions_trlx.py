"""Calls as trlx's users wrote them, in every age of it, and what functions may do to their lists.

Forms of return values and refusals are in `rewards/test_functions.py`.
"""

import functools

import numpy as np
import pytest

from jaxppo.rewards import RewardError, call_metric, call_reward

PROMPTS, OUTPUTS = ["I ", "We ", "It "], ["loved it", "hated it.", "bananas"]
SAMPLES = [prompt + output for prompt, output in zip(PROMPTS, OUTPUTS)]
LENGTHS, WIDTH = [2, 4, 1], 4


class Words:
    """A tokenizer of words, called as a transformers one."""

    def __call__(self, text):
        return type("Encoding", (), {"input_ids": list(range(len(text.split())))})()


TOKENIZER = Words()
SCORED = [6.0, 9.0, 7.0]  # what the functions below should come to


def reward(fn, **columns):
    return call_reward(
        fn, samples=SAMPLES, prompts=PROMPTS, outputs=OUTPUTS, tokenizer=TOKENIZER,
        columns=columns, lengths=LENGTHS, width=WIDTH,
    )  # fmt: skip


def metric(fn):
    return call_metric(fn, samples=SAMPLES, prompts=PROMPTS, outputs=OUTPUTS, columns={})


def bananas(samples):
    return [float(text.count("an")) for text in samples]


def sentiment(samples, **kwargs):
    return [1.0 if "loved" in text else 0.0 for text in samples]


def helpful(samples, prompts, outputs):
    return [float(len(s) - len(p)) - len(o) + 1 for s, p, o in zip(samples, prompts, outputs)]


def with_answers(samples, prompts, outputs, original_output, **kwargs):
    return [float(o == want) for o, want in zip(outputs, original_output)]


EXAMPLES = {
    # one function of each age: samples only; then prompts and outputs; **kwargs; columns
    "samples only": (bananas, [0, 0, 2]),
    "samples, **kwargs": (sentiment, [1, 0, 0]),
    "no tokenizer, no kwargs": (helpful, [1, 1, 1]),
    "a column by name": (with_answers, [0, 0, 1]),
    "a lambda": (lambda samples, **_: [len(s) for s in samples], [10, 12, 10]),
}


@pytest.mark.parametrize(("fn", "expected"), EXAMPLES.values(), ids=EXAMPLES)
def test_functions_of_every_age_of_trlx_run_unchanged(fn, expected):
    scores = reward(fn, original_output=["x", "y", "bananas"])
    assert scores.totals.tolist() == expected
    for row, total, length in zip(scores.grid, expected, LENGTHS):
        np.testing.assert_array_equal(row, np.eye(WIDTH)[length - 1] * total)


def test_a_dense_function_that_counts_with_the_tokenizer():
    def dense(samples, prompts, outputs, tokenizer, **kwargs):
        rows = []
        for output in outputs:
            row = [0] * len(tokenizer(output).input_ids)
            row[0], row[-1] = 0.25, len(output)
            rows.append(row)
        return rows

    scores = reward(dense)
    assert scores.dense
    np.testing.assert_array_equal(scores.grid, [[0.25, 8, 0, 0], [0.25, 9, 0, 0], [7, 0, 0, 0]])
    np.testing.assert_array_equal(scores.totals, [8.25, 9.25, 7])


def first_positional(samples, /, outputs):
    assert (samples, outputs) == (SAMPLES, OUTPUTS)
    return SCORED


def positional_and_rest(texts, /, **rest):
    assert texts == SAMPLES
    assert rest == {"prompts": PROMPTS, "outputs": OUTPUTS, "tokenizer": TOKENIZER, "k": [1, 2, 3]}
    return SCORED


def two_positional(texts, outputs, /, threshold=0.0):
    assert (texts, outputs, threshold) == (SAMPLES, OUTPUTS, 0.0)
    return SCORED


def column_first(k, samples, /, *, prompts):
    assert (k, samples, prompts) == ([1, 2, 3], SAMPLES, PROMPTS)
    return SCORED


def named(samples, tokenizer, **rest):
    assert tokenizer == "the reward model's"
    assert set(rest) == {"prompts", "outputs", "k"}
    return SCORED


def unnamed(texts, tokenizer):
    assert (texts, tokenizer) == (SAMPLES, "the reward model's")
    return SCORED


FORMS = {
    "samples by position, outputs by name": first_positional,
    "samples by position, the rest as kwargs": positional_and_rest,
    "two by position": two_positional,
    "a column by position": column_first,
    # what the user has bound is not taken away again
    "a bound keyword": functools.partial(named, tokenizer="the reward model's"),
    "a bound keyword, samples unnamed": functools.partial(unnamed, tokenizer="the reward model's"),
}


@pytest.mark.parametrize("fn", FORMS.values(), ids=FORMS)
def test_arguments_arrive_as_the_function_takes_them(fn):
    assert reward(fn, k=[1, 2, 3]).totals.tolist() == SCORED


def test_what_a_function_does_to_its_lists_stays_with_it():
    def careless(samples, prompts, outputs, k):
        scores = [float(len(output)) for output in outputs]
        samples.clear(), prompts.sort(), k.pop()
        outputs[:] = [text.upper() for text in outputs]
        return scores

    before, k = (list(SAMPLES), list(PROMPTS), list(OUTPUTS)), [1, 2, 3]
    assert reward(careless, k=k).totals.tolist() == [8, 9, 7]
    assert (SAMPLES, PROMPTS, OUTPUTS) == before
    assert k == [1, 2, 3]

    def wrong(samples):
        samples.clear()
        return [1, {}, 2]

    with pytest.raises(RewardError, match=r"1, 'We hated it\.'; scores must be numbers"):
        reward(wrong)
    assert metric(lambda samples: {"n": [samples.pop() and 1 for _ in range(3)]}) == {"n": [1] * 3}
    assert (SAMPLES, PROMPTS, OUTPUTS) == before


def test_metrics_keep_double_precision():
    values = {"rate": 0.1, "count": 123456789, "each": [0.1, 16777217, 1e39]}
    assert metric(lambda samples: values) == values


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("row", [[1e308, 1e308], [np.inf, -np.inf], [-1e39, 1.0]])
def test_dense_scores_beyond_float32_are_named_without_numpys_warnings(row):
    with pytest.raises(RewardError, match=r"returned -?inf for sample 1, 'We hated it.'"):
        reward(lambda samples: [[1.0], row, [1.0]])


def test_dense_totals_are_summed_in_float64():
    # the sum fits float32; adding 1 to 2^24 there does not
    scores = reward(lambda samples: [[], [2.0**24, 1.0, 1.0], []])
    assert scores.totals.tolist() == [0, 2**24 + 2, 0]


def test_an_error_of_many_lines_or_none_is_one_sentence():
    def raises(error):
        def judge(samples):
            raise error

        with pytest.raises(RewardError) as caught:
            reward(judge)
        assert caught.value.__cause__ is error
        return str(caught.value)

    assert raises(ValueError("one\n  two\n")) == (
        "the reward function judge raised ValueError: one two"
    )
    assert raises(AssertionError()) == "the reward function judge raised AssertionError"
