"""The decode loop: log-probs are the scorer's, rows are independent and end as they should."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import byte_level_tokenizer, random_params, tiny_model

from jaxppo import Rollout, create_model, make_evaluate, sample, stop_table

B, P, N, PAD = 6, 5, 8, 36
EOS_IDS = (3, 30)
MANY_EOS_IDS = (1, 3, 8, 14, 22, 30, PAD)  # likely enough that rows end at all lengths
MODEL, PARAMS = tiny_model(layers=1)  # one layer compiles fast; the golden GPT-2 has three
RNG = np.random.default_rng(0)
PROMPT_MASK = np.arange(P) >= P - np.array([5, 1, 3, 2, 4, 1])[:, None]
PROMPTS = np.where(PROMPT_MASK, RNG.integers(0, 36, (B, P)), PAD).astype(np.int32)


@functools.cache
def sampler(**options):
    """One compilation for each set of options."""
    options = {"model": MODEL, "max_new_tokens": N, "eos_ids": EOS_IDS, "pad_id": PAD} | options
    return jax.jit(functools.partial(sample, **options))


def draw(key=0, params=PARAMS, rows=slice(None), traced=None, **options):
    """Samples for the prompts of this module; `traced` arguments don't ask for a compilation."""
    return jax.tree.map(
        np.asarray,
        sampler(**options)(
            params, jax.random.key(key), PROMPTS[rows], PROMPT_MASK[rows], **(traced or {})
        ),
    )


def as_rollout(samples):
    return Rollout(PROMPTS, PROMPT_MASK, samples.tokens, samples.mask, samples.kept)


def assert_evaluation_agrees(samples, **options):
    evaluate = jax.jit(make_evaluate(MODEL, eos_ids=EOS_IDS, **options))
    logprobs = np.asarray(evaluate(PARAMS, as_rollout(samples)).logprobs)
    assert np.isfinite(samples.logprobs).all()
    np.testing.assert_allclose(
        np.where(samples.mask, logprobs, 0.0), samples.logprobs, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "min_new_tokens": 3},
        {"top_k": 5},
        {"top_p": 0.8, "temperature": 1.5},
        {"min_p": 0.1, "min_new_tokens": 8},
        {"top_k": 9, "top_p": 0.7, "min_p": 0.05, "temperature": 2.0, "min_new_tokens": 3},
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_scorer(options):
    samples = draw(**options)
    assert_evaluation_agrees(samples, **options)
    truncating = options.keys() & {"top_k", "top_p", "min_p"}
    assert (samples.kept is not None) == bool(truncating)
    if truncating:
        assert (samples.kept[samples.mask] >= 1).all()
        assert samples.kept[samples.mask].max() > 1
        assert samples.kept[samples.mask].max() <= options.get("top_k", 37)


@pytest.mark.parametrize(("top_k", "min_new_tokens"), [(0, 0), (7, 3)])
def test_logprobs_are_those_of_the_scorer_for_traced_options(top_k, min_new_tokens):
    fixed = {"top_k": top_k, "min_new_tokens": min_new_tokens}

    @jax.jit
    def score(params, rollout, traced):
        return make_evaluate(MODEL, eos_ids=EOS_IDS, **fixed, **traced)(params, rollout).logprobs

    seen = set()
    for temperature in (0.5, 1.0, 2.5):
        for top_p in (0.3, 0.9, 1.0):
            for min_p in (0.0, 0.2):
                traced = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
                traced = {k: np.float32(v) for k, v in traced.items()}
                samples = draw(traced=traced, **fixed)
                logprobs = np.asarray(score(PARAMS, as_rollout(samples), traced))
                np.testing.assert_allclose(
                    np.where(samples.mask, logprobs, 0.0),
                    samples.logprobs,
                    atol=1e-5,
                    rtol=0,
                    err_msg=str(traced),
                )
                seen.add(samples.tokens.tobytes())
    assert len(seen) > 6  # the options did reach the sampler


def test_the_kl_to_equal_parameters_is_exactly_zero():
    samples = draw(temperature=0.7, min_new_tokens=3)
    evaluate = make_evaluate(MODEL, eos_ids=EOS_IDS, temperature=0.7, min_new_tokens=3)

    @jax.jit
    def log_ratio(params, reference, rollout):
        return evaluate(params, rollout).logprobs - evaluate(reference, rollout).logprobs

    copy = jax.tree.map(jnp.array, PARAMS)
    np.testing.assert_array_equal(log_ratio(PARAMS, copy, as_rollout(samples)), 0.0)
    other = random_params(MODEL, seed=1)
    assert jnp.abs(log_ratio(PARAMS, other, as_rollout(samples))).max() > 0.1


def test_first_tokens_and_the_next_have_the_models_probabilities():
    """20,000 rows of one prompt: the first token, and the second given the most frequent first."""
    model, params = tiny_model(vocab=5, positions=8)
    params = dict(params, tokens=params["tokens"] * 0.5)
    prompt = np.tile(np.array([[1, 4]], np.int32), (20_000, 1))
    samples = jax.jit(functools.partial(sample, model=model, max_new_tokens=2))(
        params, jax.random.key(0), prompt, np.ones(prompt.shape, bool)
    )

    def check(tokens, context):
        expected = jax.nn.softmax(model.logits(params, np.array([context]))[0, -1])
        expected = np.asarray(expected, np.float64) * len(tokens)
        observed = np.bincount(tokens, minlength=5)
        assert expected.min() > 5
        assert ((observed - expected) ** 2 / expected).sum() < 4 + 5 * np.sqrt(8)

    first, second = np.asarray(samples.tokens).T
    check(first, [1, 4])
    most = np.bincount(first).argmax()
    check(second[first == most], [1, 4, most])


def test_greedy_takes_the_most_probable_token_and_respects_what_is_forbidden():
    samples = draw(temperature=0, min_new_tokens=N)
    np.testing.assert_array_equal(samples.logprobs, 0.0)
    assert samples.kept is None
    tokens = np.concatenate([PROMPTS, samples.tokens], axis=1)
    mask = np.concatenate([PROMPT_MASK, samples.mask], axis=1)
    logits = np.array(jax.jit(MODEL.logits)(PARAMS, tokens, mask))[:, P - 1 : -1]
    logits[..., list(EOS_IDS)] = -np.inf
    np.testing.assert_array_equal(samples.tokens, logits.argmax(-1))
    np.testing.assert_array_equal(
        draw(key=5, temperature=0, min_new_tokens=N).tokens, samples.tokens
    )


def test_rows_do_not_depend_on_the_rows_beside_them():
    whole = draw(key=3)
    rows = slice(2, 5)
    part = draw(key=3, rows=rows, traced={"row_ids": np.arange(2, 5)})
    np.testing.assert_array_equal(part.tokens, whole.tokens[rows])
    np.testing.assert_array_equal(part.mask, whole.mask[rows])
    np.testing.assert_array_equal(part.ended, whole.ended[rows])
    np.testing.assert_allclose(part.logprobs, whole.logprobs[rows], atol=1e-5)
    # without their numbers they are other rows
    other = draw(key=3, rows=rows, traced={"row_ids": np.arange(3)})
    assert (other.tokens != whole.tokens[rows]).any()
    np.testing.assert_array_equal(
        draw(key=3, traced={"row_ids": np.arange(B)}).tokens, whole.tokens
    )


def test_equal_prompts_give_different_rows():
    prompts, mask = np.tile(PROMPTS[:1], (B, 1)), np.ones((B, P), bool)
    samples = sampler()(PARAMS, jax.random.key(0), prompts, mask)
    assert len({tuple(row) for row in np.asarray(samples.tokens)}) > 1


def test_prompt_padding_changes_nothing():
    whole = draw(key=4)
    wide = np.concatenate([np.full((B, 3), 11, np.int32), PROMPTS], axis=1)
    wide_mask = np.concatenate([np.zeros((B, 3), bool), PROMPT_MASK], axis=1)
    samples = sampler()(PARAMS, jax.random.key(4), wide, wide_mask)
    np.testing.assert_array_equal(samples.tokens, whole.tokens)
    np.testing.assert_allclose(samples.logprobs, whole.logprobs, atol=1e-5)


def test_the_key_decides():
    np.testing.assert_array_equal(draw(key=1).tokens, draw(key=1).tokens)
    assert (draw(key=1).tokens != draw(key=2).tokens).any()


def test_each_step_has_a_number_of_its_own():
    """With the same uniform number at every step, equal distributions would repeat one token."""
    flat = jax.tree.map(jnp.zeros_like, PARAMS)
    samples = draw(params=flat, eos_ids=())
    assert all(len(set(row)) > N // 2 for row in samples.tokens)
    np.testing.assert_allclose(samples.logprobs, -np.log(37), rtol=1e-6)


def assert_well_formed(samples, ends):
    """Sampled tokens up to and with the first of `ends`, then padding and nothing else."""
    length = samples.mask.sum(1)
    np.testing.assert_array_equal(samples.mask, np.arange(N) < length[:, None])
    np.testing.assert_array_equal(samples.tokens[~samples.mask], PAD)
    np.testing.assert_array_equal(samples.logprobs[~samples.mask], 0.0)
    assert (samples.logprobs[samples.mask] < 0).all()
    for row, n, ended in zip(samples.tokens, length, samples.ended):
        assert n >= 1
        assert not np.isin(row[: n - 1], ends).any()
        assert ended == (row[n - 1] in ends)
        assert ended or n == N


def test_rows_end_with_any_of_the_eos_ids():
    samples = [draw(key=k, eos_ids=MANY_EOS_IDS, temperature=2.0) for k in range(6)]
    for s in samples:
        assert_well_formed(s, MANY_EOS_IDS)
    ended = np.concatenate([s.ended for s in samples])
    assert 0 < ended.sum() < len(ended)
    last = {s.tokens[i, s.mask[i].sum() - 1] for s in samples for i in range(B) if s.ended[i]}
    assert len(last) > 1
    assert any(1 < s.mask[i].sum() < N for s in samples for i in range(B))


def test_without_eos_ids_nothing_ends():
    samples = draw(eos_ids=())
    assert samples.mask.all()
    assert not samples.ended.any()


def test_the_padding_id_changes_only_the_padding():
    """Also when it is an EOS id, as one of the two is."""
    one = draw(key=1, eos_ids=MANY_EOS_IDS, temperature=2.0)
    two = draw(key=1, eos_ids=MANY_EOS_IDS, temperature=2.0, pad_id=0)
    assert one.ended.any()
    for field in ("logprobs", "mask", "ended"):
        np.testing.assert_array_equal(getattr(one, field), getattr(two, field))
    np.testing.assert_array_equal(one.tokens[one.mask], two.tokens[two.mask])
    np.testing.assert_array_equal(one.tokens[~one.mask], PAD)
    np.testing.assert_array_equal(two.tokens[~two.mask], 0)


def test_no_eos_before_min_new_tokens():
    least = 3
    ends = tuple(range(30))  # likely enough to end every row at once
    samples = draw(eos_ids=ends, min_new_tokens=least)
    assert not np.isin(samples.tokens[:, :least], ends).any()
    assert samples.mask[:, :least].all()
    assert samples.ended.all()
    assert samples.mask.sum(1).min() < N


def counted(model, count):
    """The model, calling `count(tokens per row)` whenever it runs."""

    def apply(params, tokens, **options):
        jax.debug.callback(lambda _: count.append(tokens.shape[1]), tokens[0, 0])
        return model.apply(params, tokens, **options)

    return dataclasses.replace(model, apply=apply)


@pytest.mark.parametrize(("ends", "steps"), [(tuple(range(37)), 1), ((), N)])
def test_the_loop_stops_when_every_row_has_ended(ends, steps):
    count = []
    samples = jax.jit(
        functools.partial(
            sample, model=counted(MODEL, count), max_new_tokens=N, eos_ids=ends, pad_id=PAD
        )
    )(PARAMS, jax.random.key(0), PROMPTS, PROMPT_MASK)
    jax.block_until_ready(samples)
    jax.effects_barrier()
    # the prompt gives the first token; every further one takes a run of the model
    assert sorted(count) == [1] * (steps - 1) + [P]
    np.testing.assert_array_equal(np.asarray(samples.mask).sum(1), steps)
    np.testing.assert_array_equal(samples.ended, bool(ends))
    np.testing.assert_array_equal(np.asarray(samples.tokens)[:, steps:], PAD)


def test_what_stands_after_the_end_influences_nothing():
    samples = draw(key=1, eos_ids=MANY_EOS_IDS, temperature=2.0)
    assert samples.ended.any()
    evaluate = jax.jit(make_evaluate(MODEL, temperature=2.0))
    garbage = np.where(samples.mask, samples.tokens, RNG.integers(0, 37, samples.tokens.shape))
    results = [
        np.asarray(evaluate(PARAMS, as_rollout(s)).logprobs)[samples.mask]
        for s in (samples, samples._replace(tokens=garbage))
    ]
    np.testing.assert_array_equal(*results)
    np.testing.assert_allclose(results[0], samples.logprobs[samples.mask], atol=1e-5)


# token i writes LETTERS[i]: single letters, and some pairs
LETTERS = [bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz"] + [
    *(b"ab", b"ba", b"aa", b"bb", b"ca", b"cb", b"ac", b"bc", b"cc", b"dd")
]


def test_stop_strings_end_rows_and_their_tokens_stay():
    stops = ("b", "cd", "ac", "xa")
    table = stop_table(byte_level_tokenizer(LETTERS), stops, 37)
    compiled = jax.jit(
        functools.partial(
            sample, model=MODEL, max_new_tokens=N, temperature=2.0, pad_id=PAD, stops=table
        )
    )
    plain = jax.jit(
        functools.partial(sample, model=MODEL, max_new_tokens=N, temperature=2.0, pad_id=PAD)
    )
    lengths = set()
    for key in range(8):
        samples = compiled(PARAMS, jax.random.key(key), PROMPTS, PROMPT_MASK)
        unstopped = np.asarray(plain(PARAMS, jax.random.key(key), PROMPTS, PROMPT_MASK).tokens)
        for tokens, mask, ended, free in zip(
            *map(np.asarray, samples[:1] + samples[2:4]), unstopped
        ):
            texts = [
                b"".join(LETTERS[t] if t < 36 else b"" for t in free[: n + 1]) for n in range(N)
            ]
            hits = [any(s.encode() in text for s in stops) for text in texts]
            length = hits.index(True) + 1 if any(hits) else N
            assert mask.sum() == length
            assert ended == any(hits)
            np.testing.assert_array_equal(tokens[:length], free[:length])
            np.testing.assert_array_equal(tokens[length:], PAD)
            lengths.add(length)
    assert len(lengths) > 3


def test_the_smallest_sizes():
    one = functools.partial(sample, model=MODEL, max_new_tokens=1, eos_ids=EOS_IDS)
    prompt, mask = PROMPTS[:1, -1:], np.ones((1, 1), bool)
    samples = jax.jit(one)(PARAMS, jax.random.key(0), prompt, mask)
    assert [x.shape for x in samples[:4]] == [(1, 1), (1, 1), (1, 1), (1,)]
    assert samples.mask.all()
    logprobs = jax.nn.log_softmax(MODEL.logits(PARAMS, prompt)[0, -1])
    np.testing.assert_allclose(samples.logprobs[0, 0], logprobs[samples.tokens[0, 0]], atol=1e-5)
    assert samples.ended[0] == (samples.tokens[0, 0] in EOS_IDS)


def test_all_positions_can_be_used_and_not_one_more():
    model, params = tiny_model(positions=P + 3)
    run = functools.partial(sample, model=model, eos_ids=())
    samples = jax.jit(functools.partial(run, max_new_tokens=3))(
        params, jax.random.key(0), PROMPTS, PROMPT_MASK
    )
    assert np.isfinite(samples.logprobs).all()
    with pytest.raises(ValueError, match=r"prompt of 5 and a response of 4.*8 positions"):
        run(params, jax.random.key(0), PROMPTS, PROMPT_MASK, max_new_tokens=4)
    with pytest.raises(ValueError, match="padded on the left"):
        run(params, jax.random.key(0), PROMPTS, PROMPT_MASK[:, ::-1], max_new_tokens=3)


def test_samples_of_wide_and_narrow_parameters():
    with jax.enable_x64(True):
        params = random_params(MODEL, dtype=jnp.float64)
        samples = jax.jit(functools.partial(sample, model=MODEL, max_new_tokens=3))(
            params, jax.random.key(0), PROMPTS, PROMPT_MASK
        )
        assert samples.logprobs.dtype == jnp.float64
        assert samples.tokens.dtype == jnp.int32
    narrow = random_params(MODEL, dtype=jnp.bfloat16)
    samples = jax.jit(functools.partial(sample, model=MODEL, max_new_tokens=3))(
        narrow, jax.random.key(0), PROMPTS, PROMPT_MASK
    )
    assert samples.logprobs.dtype == jnp.float32
    assert np.isfinite(samples.logprobs).all()


def computations(text):
    """The computations of a compiled program's text, by name: a list of lines each."""
    found, lines = {}, []
    for line in text.splitlines():
        start = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if start and not line.startswith(" "):
            lines = found[start[1]] = []
        elif line.startswith(" "):
            lines.append(line.strip())
    return found


def test_a_decode_step_neither_copies_nor_doubles_the_cache():
    model = create_model({**MODEL.hf_config, "n_layer": 2, "n_positions": 2048})
    params = random_params(model)
    prompts, mask = np.zeros((3, 8), np.int32), np.ones((3, 8), bool)
    sizes = []
    for slots in (256, 512):
        compiled = (
            jax.jit(functools.partial(sample, model=model, max_new_tokens=slots - 7))
            .lower(params, jax.random.key(0), prompts, mask)
            .compile()
        )
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    # two layers of keys and values in float32; twice the slots, twice the memory, held once
    cache_bytes = 2 * 2 * (3 * 2 * 512 * 8) * 4
    assert sizes[1] < 1.2 * cache_bytes
    assert sizes[1] < 2.1 * sizes[0]

    # whatever the loop's body makes in the shape of a cache is an update in place of an old one
    parts = computations(compiled.as_text())
    loops = [line for lines in parts.values() for line in lines if " while(" in line]
    bodies = [re.search(r"body=%?([\w.\-]+)", line)[1] for line in loops if "3,2,512,8" in line]
    assert len(bodies) == 1
    updates = 0
    for line in parts[bodies[0]]:
        made = re.match(r"(?:ROOT )?%\S+ = f32\[3,2,512,8\]\S* ([\w\-]+)\(", line)
        if not made or made[1] in ("parameter", "get-tuple-element", "bitcast"):
            continue
        assert made[1] in ("fusion", "dynamic-update-slice"), line
        if made[1] == "fusion":
            inside = parts[re.search(r"calls=%?([\w.\-]+)", line)[1]]
            root = next(x for x in inside if x.startswith("ROOT"))
            assert re.search(r"dynamic-update-slice\(%?param", root), root
            assert not any(" copy(" in x and "3,2,512,8" in x for x in inside)
        updates += 1
    assert updates == 4
