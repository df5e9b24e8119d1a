"""GPT-2 against torch's numbers, and what must not change them: padding, packing, caches."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import GOLDEN_MODELS, tiny_config, tiny_model

from jaxppo import create_model, load_pretrained, sample
from jaxppo.models import ModelError
from jaxppo.models.layers import ACTIVATIONS

TOLERANCE = 2e-4


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_logits_are_those_of_torch(golden_gpt2, side):
    model, params, io = golden_gpt2
    mask = io[f"attention_mask_{side}"].astype(bool)
    logits = jax.jit(model.logits)(params, io[f"input_ids_{side}"], mask)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(
        np.asarray(logits)[mask], io[f"logits_{side}"][mask], atol=TOLERANCE, rtol=0
    )


def test_unpadded_logits_are_those_of_torch(golden_gpt2):
    model, params, io = golden_gpt2
    lengths = io["attention_mask_right"].sum(1)
    assert len(set(lengths)) == 3
    for row, length in enumerate(lengths):
        tokens = io["input_ids_right"][row : row + 1, :length]
        np.testing.assert_allclose(
            jax.jit(model.logits)(params, tokens)[0],
            io[f"logits_row{row}_unpadded"],
            atol=TOLERANCE,
            rtol=0,
        )


def test_greedy_tokens_are_those_of_torch(golden_gpt2):
    model, params, io = golden_gpt2
    assert io["greedy_margin_unpadded"].min() > 50 * TOLERANCE  # else a tie could decide
    samples = jax.jit(
        functools.partial(
            sample, model=model, max_new_tokens=8, temperature=0, eos_ids=(2,), min_new_tokens=8
        )
    )(params, jax.random.key(0), io["input_ids_left"], io["attention_mask_left"].astype(bool))
    np.testing.assert_array_equal(samples.tokens, io["greedy_left"])
    np.testing.assert_array_equal(samples.logprobs, 0.0)
    assert samples.mask.all()
    assert not samples.ended.any()


def test_gradients_have_the_norms_of_torch(golden_gpt2):
    model, params, io = golden_gpt2
    tokens = io["input_ids_right"][:1, : io["attention_mask_right"][0].sum()]

    def loss(params):
        logprobs = jax.nn.log_softmax(model.logits(params, tokens)[0, :-1])
        return -jnp.mean(jnp.take_along_axis(logprobs, tokens[0, 1:, None], axis=1))

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, io["row0_ce_loss"], rtol=1e-5)

    expected = json.loads((GOLDEN_MODELS / "gpt2" / "row0_grad_norms.json").read_text())
    parts = {"weight": "kernel", "bias": "bias"}
    norms = {"weight": "scale", "bias": "bias"}

    def leaves(name):
        """Our gradients of the tensor that Hugging Face calls `name`."""
        _, *path, kind = name.split(".")
        if path == ["wte"]:
            return [grads["tokens"]]
        if path == ["wpe"]:
            return [grads["positions"]]
        if path == ["ln_f"]:
            return [grads["norm"][norms[kind]]]
        block = grads[f"block_{path[1]}"]
        match path[2:]:
            case ["ln_1"]:
                return [block["norm_1"][norms[kind]]]
            case ["ln_2"]:
                return [block["norm_2"][norms[kind]]]
            case ["attn", "c_attn"]:
                return [block["attention"][x][parts[kind]] for x in ("query", "key", "value")]
            case ["attn", "c_proj"]:
                return [block["attention"]["out"][parts[kind]]]
            case ["mlp", "c_fc"]:
                return [block["up"][parts[kind]]]
            case ["mlp", "c_proj"]:
                return [block["down"][parts[kind]]]
        raise AssertionError(name)

    count = 0
    for name, norm in expected.items():
        if name == "lm_head.weight":  # the same tensor as wte
            continue
        ours = leaves(name)
        count += len(ours)
        total = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in ours))
        np.testing.assert_allclose(total, norm, rtol=1e-3, err_msg=name)
    assert count == len(jax.tree.leaves(grads))


def test_classifier_scores_are_those_of_torch():
    folder = GOLDEN_MODELS / "gpt2_seqcls"
    model, params, tokenizer = load_pretrained(folder)
    assert tokenizer is None
    io = np.load(folder / "io.npz")
    tokens, mask = io["input_ids_right"], io["attention_mask_right"].astype(bool)
    scores = jax.jit(model.score)(params, tokens, mask)
    np.testing.assert_allclose(scores, io["logits_right"], atol=TOLERANCE, rtol=0)
    # padding on the left, and none at all, give the same
    lengths = mask.sum(1)
    left = np.stack([np.roll(row, -n) for row, n in zip(tokens, lengths)])
    left_mask = np.arange(tokens.shape[1]) >= (tokens.shape[1] - lengths)[:, None]
    np.testing.assert_allclose(
        jax.jit(model.score)(params, left, left_mask), io["logits_right"], atol=TOLERANCE, rtol=0
    )
    np.testing.assert_allclose(
        jax.jit(model.score)(params, tokens[:1]), io["logits_right"][:1], atol=TOLERANCE, rtol=0
    )


def test_language_models_give_no_score():
    assert create_model(tiny_config()).score is None


@pytest.fixture(scope="module")
def double():
    """A tiny model in float64 and three rows of 7, 4 and 1 tokens."""
    with jax.enable_x64(True):
        model, params = tiny_model(dtype=jnp.float64)
    rng = np.random.default_rng(1)
    return model, params, [rng.integers(0, 37, n) for n in (7, 4, 1)]


def padded(rows, left, right, filling):
    """The rows in one grid, each with so many masked tokens on its left; then `right` columns."""
    length = max(n + len(row) for n, row in zip(left, rows)) + right
    tokens = np.full((len(rows), length), filling)
    mask = np.zeros((len(rows), length), bool)
    for i, (row, start) in enumerate(zip(rows, left)):
        tokens[i, start : start + len(row)] = row
        mask[i, start : start + len(row)] = True
    return tokens, mask


def test_padding_changes_nothing(double):
    model, params, rows = double
    logits = jax.jit(model.logits)
    with jax.enable_x64(True):
        alone = np.concatenate([logits(params, row[None])[0] for row in rows])
        assert alone.dtype == np.float64
        for left, right, filling in [
            ((0, 0, 0), 0, 0),
            ((0, 3, 6), 0, 36),
            ((0, 3, 6), 0, 5),
            ((2, 0, 5), 3, 11),
            ((20, 31, 9), 8, 0),
        ]:
            tokens, mask = padded(rows, left, right, filling)
            result = np.asarray(logits(params, tokens, mask))[mask]
            np.testing.assert_allclose(result, alone, atol=1e-10, rtol=0)


def test_no_mask_is_a_mask_of_true(double):
    model, params, rows = double
    tokens = np.stack([rows[0], rows[0][::-1]])
    with jax.enable_x64(True):
        np.testing.assert_allclose(
            jax.jit(model.logits)(params, tokens),
            jax.jit(model.logits)(params, tokens, np.ones(tokens.shape, bool)),
            atol=1e-10,
            rtol=0,
        )
        cache = model.init_cache(2, 9, jnp.float64)
        for mask in (None, np.ones(tokens.shape, bool)):
            hidden, after = jax.jit(model.apply)(params, tokens, mask=mask, cache=cache)
            np.testing.assert_array_equal(after.valid, np.arange(9)[None] < [[7], [7]])
            np.testing.assert_allclose(
                hidden, jax.jit(model.apply)(params, tokens)[0], atol=1e-10, rtol=0
            )


def test_tokens_see_nothing_to_their_right(double):
    model, params, rows = double
    changed = rows[0].copy()
    changed[4] = (changed[4] + 1) % 37
    with jax.enable_x64(True):
        one, two = (
            np.asarray(jax.jit(model.logits)(params, x[None]))[0] for x in (rows[0], changed)
        )
    np.testing.assert_array_equal(one[:4], two[:4])
    assert (np.abs(one[4:] - two[4:]).max(-1) > 1e-3).all()  # and everything to their left


def test_packed_samples_are_as_in_rows_of_their_own(double):
    model, params, rows = double
    tokens = np.concatenate([rows[0], rows[1], [3, 3], rows[2]])[None]
    segments = np.repeat([1, 2, 0, 3], [7, 4, 2, 1])[None]
    positions = np.concatenate([np.arange(n) for n in (7, 4, 2, 1)])[None]
    with jax.enable_x64(True):
        alone = np.concatenate([jax.jit(model.apply)(params, row[None])[0][0] for row in rows])
        hidden, cache = jax.jit(model.apply)(
            params, tokens, positions=positions, mask=segments > 0, segment_ids=segments
        )
        assert cache is None
        np.testing.assert_allclose(hidden[segments > 0], alone, atol=1e-10, rtol=0)
        # without the segments, what is packed second does read what is packed first
        together, _ = jax.jit(model.apply)(params, tokens, positions=positions)
        assert np.abs(together[0, 7:11] - alone[7:11]).max() > 1e-3


def test_positions_given_by_hand_replace_the_count(double):
    model, params, rows = double
    apply = jax.jit(model.apply)
    with jax.enable_x64(True):
        counted, _ = apply(params, rows[0][None])
        given, _ = apply(params, rows[0][None], positions=np.arange(7)[None])
        moved, _ = apply(params, rows[0][None], positions=np.arange(7)[None] + 5)
        np.testing.assert_array_equal(counted, given)
        assert np.abs(counted - moved).max() > 1e-3
        shifted = dict(params, positions=jnp.roll(params["positions"], -5, axis=0))
        np.testing.assert_allclose(apply(shifted, rows[0][None])[0], moved, atol=1e-12, rtol=0)


@pytest.mark.parametrize("pieces", [(7,), (1,) * 7, (3, 1, 1, 2)])
def test_decoding_with_a_cache_is_the_full_forward(double, pieces):
    model, params, rows = double
    tokens, mask = padded(rows, (0, 3, 6), 0, 8)
    mask[0, 2] = False  # a hole, as of a row that skips a slot
    apply = jax.jit(model.apply)
    with jax.enable_x64(True):
        full = np.asarray(apply(params, tokens, mask=mask)[0])
        cache = model.init_cache(3, 7, jnp.float64)
        hidden, start = [], 0
        for n in pieces:
            cut = slice(start, start + n)
            part, cache = apply(params, tokens[:, cut], mask=mask[:, cut], cache=cache)
            hidden.append(part)
            start += n
            assert cache.index == start
        np.testing.assert_array_equal(cache.valid, mask)
        np.testing.assert_allclose(
            np.concatenate(hidden, axis=1)[mask], full[mask], atol=1e-10, rtol=0
        )


def test_a_grown_cache_goes_on_where_it_was(double):
    model, params, rows = double
    tokens, mask = padded(rows, (0, 3, 6), 0, 8)
    apply = jax.jit(model.apply)
    with jax.enable_x64(True):
        full = np.asarray(apply(params, tokens, mask=mask)[0])
        cache = model.init_cache(3, 5, jnp.float64)
        _, cache = apply(params, tokens[:, :5], mask=mask[:, :5], cache=cache)
        cache = cache.grown(12)
        assert cache.valid.shape == (3, 12)
        assert {x.shape for x in cache.keys + cache.values} == {(3, 2, 12, 8)}
        hidden, cache = apply(params, tokens[:, 5:], mask=mask[:, 5:], cache=cache)
        np.testing.assert_allclose(hidden[mask[:, 5:]], full[:, 5:][mask[:, 5:]], atol=1e-10)
        np.testing.assert_array_equal(cache.valid[:, :7], mask)
        assert not cache.valid[:, 7:].any()


def test_padding_sends_back_no_gradient(double):
    model, params, rows = double

    def loss(params, tokens, mask):
        return jnp.sum(jnp.where(mask[..., None], model.logits(params, tokens, mask), 0.0) ** 2)

    with jax.enable_x64(True):
        grad = jax.jit(jax.grad(loss))
        left = grad(params, *padded(rows, (0, 3, 6), 0, 0))
        right = grad(params, *padded(rows, (0, 0, 0), 4, 11))
        scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(left))
        assert scale > 1
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10 * scale, rtol=0), left, right
        )


def test_bfloat16_parameters_give_float32_logits():
    model, params = tiny_model(dtype=jnp.bfloat16)
    hidden, _ = jax.jit(model.apply)(params, jnp.arange(5)[None])
    assert hidden.dtype == jnp.bfloat16
    logits = jax.jit(model.logits)(params, jnp.arange(5)[None])
    assert logits.dtype == jnp.float32
    _, exact = tiny_model()
    np.testing.assert_allclose(
        logits, jax.jit(model.logits)(exact, jnp.arange(5)[None]), atol=0.5, rtol=0.1
    )


def test_init_makes_the_declared_parameters():
    model = create_model(tiny_config(initializer_range=0.1))
    params = jax.jit(model.init)(jax.random.key(0))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    assert 0.09 < params["tokens"].std() < 0.11
    # GPT-2 scales what is added to the residual stream down, by the root of the additions
    assert 0.04 < params["block_1"]["down"]["kernel"].std() < 0.06
    np.testing.assert_array_equal(params["norm"]["scale"], 1.0)
    other = jax.jit(model.init)(jax.random.key(1))
    assert (params["tokens"] != other["tokens"]).mean() > 0.99


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"])
def test_activations_are_what_their_names_say(activation):
    x = np.linspace(-4, 4, 33)
    cubic = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    erf = np.vectorize(math.erf)
    expected = {
        "gelu": x * 0.5 * (1 + erf(x / np.sqrt(2))),
        "gelu_new": 0.5 * x * (1 + np.tanh(cubic)),
        "gelu_pytorch_tanh": 0.5 * x * (1 + np.tanh(cubic)),
        "relu": np.maximum(x, 0),
        "silu": x / (1 + np.exp(-x)),
    }[activation]
    model, _ = tiny_model(activation_function=activation)
    with jax.enable_x64(True):
        result = ACTIVATIONS[model.config.activation](jnp.asarray(x))
    np.testing.assert_allclose(result, expected, atol=1e-7)


def test_too_many_tokens_are_refused():
    model, params = tiny_model(positions=8)
    with pytest.raises(ValueError, match=r"9 tokens.*8 positions"):
        model.logits(params, np.zeros((1, 9), int))


def test_segments_without_positions_are_refused():
    model, params = tiny_model()
    with pytest.raises(ValueError, match="explicit positions"):
        model.apply(params, np.zeros((1, 4), int), segment_ids=np.ones((1, 4), int))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
        ("scale_attn_weights", False),
        ("activation_function", "mish"),
    ],
)
def test_options_that_would_change_the_numbers_are_refused_by_name(option, value):
    with pytest.raises(ModelError, match=f"{option}={value}.*not supported"):
        create_model(tiny_config(**{option: value}))


def test_all_refused_options_are_named():
    refused = {"add_cross_attention": True, "scale_attn_weights": False}
    with pytest.raises(ModelError, match=r"add_cross_attention=True, scale_attn_weights=False"):
        create_model(tiny_config(**refused))


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(ModelError, match=r"width of 16.*3 heads"):
        create_model(tiny_config(heads=3))


def test_a_config_that_lacks_a_size_is_refused():
    config = tiny_config()
    del config["n_layer"]
    with pytest.raises(ModelError, match="lacks 'n_layer'"):
        create_model(config)


def test_the_inner_width_is_read():
    assert create_model(tiny_config()).config.mlp_width == 64
    model, params = tiny_model(n_inner=24)
    assert params["block_0"]["up"]["kernel"].shape == (16, 24)
    assert model.config.mlp_width == 24


@pytest.mark.parametrize(
    ("options", "labels"),
    [({}, 2), ({"num_labels": 3}, 3), ({"id2label": {"0": "a"}}, 1)],
)
def test_classifiers_have_as_many_labels_as_the_config_says(options, labels):
    model = create_model(tiny_config(architectures=["GPT2ForSequenceClassification"], **options))
    assert model.config.num_labels == labels
    assert jax.eval_shape(model.init, jax.random.key(0))["score"].shape == (16, labels)
