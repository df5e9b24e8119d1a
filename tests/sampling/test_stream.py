"""Continuous batching: the samples of `sample`, whatever the slots; few steps and programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import random_params, tiny_model

from jaxppo import create_model, sample
from jaxppo.sampling import Options, make_stream, sample_stream

R, N, W, PAD = 61, 24, 8, 36
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 36, n).astype(np.int32) for n in RNG.integers(1, W + 1, R)]
for first in (20, 25, 30):  # groups of five
    PROMPTS[first : first + 5] = [PROMPTS[first]] * 5


def padded(prompts):
    tokens, mask = np.full((len(prompts), W), PAD, np.int32), np.zeros((len(prompts), W), bool)
    for row, prompt in enumerate(prompts):
        tokens[row, W - len(prompt) :], mask[row, W - len(prompt) :] = prompt, True
    return tokens, mask


@pytest.fixture(scope="module")
def double():
    with jax.enable_x64(True):
        yield tiny_model(layers=2, dtype=jnp.float64)


@pytest.fixture(scope="module")
def streams(double):
    """One stream a set of options, so that its programs are compiled once."""
    return functools.cache(lambda **options: make_stream(double[0], Options(N, **options)))


@pytest.mark.parametrize("slots", [7, 100])
def test_a_stream_draws_what_sample_draws(double, streams, slots):
    with jax.enable_x64(True):
        check(double, streams, slots, {"eos_ids": (3, 30), "pad_id": PAD, "top_p": 0.95})


def test_a_stream_draws_what_sample_draws_when_rows_end_at_once_or_never(double, streams):
    with jax.enable_x64(True):
        check(double, streams, 16, {"eos_ids": tuple(range(0, 36, 2)), "pad_id": PAD})
        check(double, streams, 1, {"eos_ids": tuple(range(0, 36, 2)), "pad_id": PAD})


def test_a_stream_draws_what_sample_draws_with_windows_and_grouped_queries():
    config = {"model_type": "mistral", "vocab_size": 37, "hidden_size": 16, "sliding_window": 5}
    config |= {"intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
    model = create_model(config | {"architectures": ["MistralForCausalLM"]})
    options = {"eos_ids": (3, 30), "pad_id": PAD}
    with jax.enable_x64(True):
        params = random_params(model, dtype=jnp.float64)
        check((model, params), lambda **o: make_stream(model, Options(N, **o)), 16, options)


def check(double, streams, slots, options):
    model, params = double
    key, row_ids = jax.random.key(3), np.arange(R) + 100
    run = jax.jit(functools.partial(sample, model=model, max_new_tokens=N, **options))
    expected = run(params, key, *padded(PROMPTS), row_ids=row_ids)
    seen = []
    result = sample_stream(
        params, key, PROMPTS, stream=streams(**options), slots=slots, row_ids=row_ids,
        on_rows=lambda rows, samples: seen.append((rows, samples)),
    )  # fmt: skip
    for name, x in expected._asdict().items():
        if x is not None:
            np.testing.assert_allclose(getattr(result.samples, name), x, atol=1e-10, err_msg=name)
    rows = np.concatenate([rows for rows, _ in seen])
    assert sorted(rows) == list(range(R))
    tokens = np.concatenate([part.tokens for _, part in seen])
    np.testing.assert_array_equal(tokens, result.samples.tokens[rows])
    assert result.slot_steps >= result.samples.mask.sum() - R


def test_finished_rows_are_hardly_paid_for(double, streams):
    """Lengths vary between 1 and 24; in chunks, over half of all steps would be useless."""
    with jax.enable_x64(True):
        stream = streams(eos_ids=tuple(range(6)), pad_id=PAD)
        prompts = PROMPTS * 8
        result = sample_stream(double[1], jax.random.key(0), prompts, stream=stream, slots=32)
    useful = result.samples.mask.sum() - len(prompts)  # the first tokens come with the prompt
    assert result.samples.mask.sum(1).min() <= 2
    assert result.samples.mask.sum(1).max() > 16
    assert useful / result.slot_steps >= 0.9


def test_equal_neighbours_are_prefilled_once(double, streams):
    with jax.enable_x64(True):
        stream = streams(eos_ids=(3, 30), pad_id=PAD, top_p=0.95)
        prompts = [prompt for prompt in PROMPTS[:8] for _ in range(8)]
        result = sample_stream(double[1], jax.random.key(0), prompts, stream=stream, slots=8)
    longest = max(map(len, prompts))
    assert result.prefilled == 8 * longest  # one batch of eight, padded to the longest


def test_many_ragged_calls_compile_few_programs(double):
    """Of decode at most one a number of slots and cache length, whatever lengths come."""
    with jax.enable_x64(True):
        stream = make_stream(double[0], Options(N, eos_ids=tuple(range(4)), pad_id=PAD))
        for seed in range(6):
            order = np.random.default_rng(seed).permutation(R)
            prompts = [PROMPTS[i] for i in order] + [np.zeros(W, np.int32)]
            sample_stream(double[1], jax.random.key(seed), prompts, stream=stream, slots=16)
    sizes = 3  # 16, 8 and 4 slots
    assert stream.decode._cache_size() == sizes
    assert stream.insert._cache_size() <= 2 * 3  # lengths of the call times widths of prompts
    assert stream.prefill._cache_size() <= 3
    assert stream.resize._cache_size() <= sizes
    assert stream.empty._cache_size() == 1


def test_the_cache_grows_with_the_responses():
    """Responses longer than the shortest cache are those of one that is long from the start."""
    model, params = tiny_model(layers=1, positions=512)
    prompts = [np.asarray([1, 2, 3], np.int32)] * 5
    options = Options(300, eos_ids=(), pad_id=PAD)
    result = sample_stream(
        params, jax.random.key(0), prompts, stream=make_stream(model, options), slots=4
    )
    tokens, mask = padded(prompts)
    run = jax.jit(functools.partial(sample, model=model, max_new_tokens=300))
    whole = run(params, jax.random.key(0), tokens, mask)
    assert result.samples.mask.all()
    differ = (result.samples.tokens != np.asarray(whole.tokens)).any(1)
    assert differ.sum() <= 1  # float32: a draw at the edge between two tokens may fall either way


def test_what_does_not_fit_the_models_positions_is_refused():
    model, params = tiny_model(layers=1, positions=12)
    stream = make_stream(model, Options(8))
    with pytest.raises(ValueError, match="12 positions"):
        sample_stream(params, jax.random.key(0), [np.zeros(5, np.int32)], stream=stream, slots=1)
