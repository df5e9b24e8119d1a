"""Verifiers: right answers in many spellings, wrong ones, none, and what can't be compared."""

import subprocess
import sys

import pytest

from jaxppo import Reward, RewardError
from jaxppo.rewards import (
    as_rewards,
    exact_answer,
    last_number,
    matches,
    math_equal,
    numeric_answer,
    reasoning_task,
    score_samples,
)


@pytest.mark.parametrize(
    ("text", "number"),
    {
        "-1,234.5": -1234.5, "+.5": 0.5, "2e-3": 0.002, "$5": 5, "-$5": -5, "3/4": 0.75,
        "12 %": 0.12, "the answer is 42.": 42, "x=3": 3, "1,2,3": 3, "v2.0 is 7": 7, "5.": 5,
        "3-4": 4, "=-4": -4, "12,345": 12345, "20 30": 30, "(7)": 7, "7!": 7, "1/0": None,
        "": None, "no": None, "a1b": None, "1e400": None, "3, then 1/0": 3,
    }.items(),
)  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == (None if number is None else pytest.approx(number))


def test_exact_answers():
    check = exact_answer()
    answers = ["4", 5, "x y", None, "4"]
    outputs = [" 4\n", "5", "x  y", "7", "4."]
    assert check(outputs, answer=answers) == [1, 1, 0, None, 0]
    check = exact_answer("label", extract=r"<a>(.*?)</a>")
    outputs = ["<a>1</a> no <a> 2 </a>", "2", "<a>2</a>"]
    assert check(outputs, label=["2", "2", "1"]) == [1, 0, 0]
    assert exact_answer(extract=r"\d+")(["1 and 12"], answer=[12]) == [1]
    assert exact_answer(extract=lambda text: text[:1] or None)(["ab", ""], answer=["a", ""]) == [
        1,
        0,
    ]


def test_numeric_answers():
    check = numeric_answer()
    outputs = ["It is 1,000.", "about 0.5", "none", "50%", "7"]
    assert check(outputs, answer=["1000", 0.5, 3, "1/2", None]) == [1, 1, 0, 1, None]
    close = numeric_answer(rtol=0.0, atol=0.1)
    assert close(["3.05", "3.2"], answer=[3, 3]) == [1, 0]
    with pytest.raises(RewardError, match=r"can't use 'many', the column 'answer' of sample 1"):
        check(["1", "2"], answer=[1, "many"])


def test_formats():
    assert matches(r"<think>.*</think>\s*\d+", full=True)(["<think>a</think> 4\n", "4"]) == [1, 0]
    assert matches("ab", 2, full=False)(["xAB", "ba"]) == [1, 0]  # 2: re.IGNORECASE
    with pytest.raises(RewardError, match="is no regular expression"):
        matches("(")


def test_mathematical_equality():
    outputs = [
        r"So the answer is \boxed{\frac{1}{2}}.", "$0.5$", "It is 1/2", r"$\frac{2}{3}$", "no idea",
        "$x^2 + 2x + 1$", r"$\{2, 1\}$", "",
    ]  # fmt: skip
    answers = ["0.5", r"\frac12", 0.5, "0.5", "0.5", "(x+1)^2", r"\{1, 2\}", "3"]
    assert math_equal()(outputs, answer=answers) == [1, 1, 1, 0, 0, 1, 1, 0]
    assert math_equal()(["4", "$4$"], answer=[None, "4"]) == [None, 1]
    with pytest.raises(RewardError, match="math_equal can't use '', the column 'answer'"):
        math_equal()(["1"], answer=[""])


def test_math_works_beside_the_main_thread():
    """Rewards run in threads, where the package's own time limits don't."""
    scores, _ = score_samples(
        as_rewards(Reward(math_equal(), timeout=60.0)), samples=["$2$"], prompts=[""],
        outputs=["$2$"], tokenizer=None, columns={"answer": ["2"]}, lengths=[1], width=1,
    )  # fmt: skip
    assert scores.totals.tolist() == [1]


def test_tasks_of_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    prompts, reward = reasoning_task("chain_sum", size=3, seed=1, extract=r"-?\d+")
    assert len(prompts) == 3
    assert prompts == reasoning_task("chain_sum", size=3, seed=1)[0]
    entries = [p["entry"] for p in prompts]
    right = [f"I think {entry['answer']}" for entry in entries]
    assert reward(right, entry=entries) == [1, 1, 1]
    assert reward(["none"] * 3, entry=entries) == [0, 0, 0]
    with pytest.raises(RewardError, match=r"no task 'chain_sums'; near it: chain_sum"):
        reasoning_task("chain_sums")
    with pytest.raises(RewardError, match="chain_sum refuses its options"):
        reasoning_task("chain_sum", min_terms=-1)


@pytest.mark.parametrize("make", [exact_answer, numeric_answer, math_equal])
def test_a_column_that_is_missing_is_named(make):
    with pytest.raises(RewardError, match=r"column 'answer', .* they have label: pass dicts"):
        make()(["1"], label=["1"], prompts=["p"], samples=["p1"])


def test_packages_that_are_missing_are_named():
    code = (
        "import sys; sys.modules.update(math_verify=None, httpx=None, reasoning_gym=None)\n"
        "from jaxppo.rewards import *\n"
        "for make in (math_equal, lambda: reasoning_task('x'), lambda: judge('http://x', 'y')):\n"
        "    try: make()\n"
        "    except RewardError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    extras = [line.rpartition("pip install ")[2] for line in done.stdout.splitlines()]
    assert extras == ["'jaxppo[reasoning]'", "'jaxppo[reasoning]'", "'jaxppo[judge]'"]
