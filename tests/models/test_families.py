"""Every family against torch's numbers, and nothing in a config is overlooked."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make_models import CASES, GOLDEN, STEPS, padded, tokens, write_golden
from parity import measure
from safetensors.numpy import load_file

from jaxppo import create_model, load_pretrained, sample, save_pretrained
from jaxppo.models import ModelError, build_model
from jaxppo.models.experts import Experts, route
from jaxppo.models.families import FAMILIES
from jaxppo.models.layers import RMSNorm, alibi_slopes, attend
from jaxppo.models.rope import Rope, make_rope, rotate, rotation

TOLERANCE = 2e-4


ENCODERS = json.loads((GOLDEN.parent / "encoders.json").read_text())


def golden_config(case):
    return json.loads((GOLDEN / f"{case}.json").read_text())["model"]["config"]


def golden_configs(kind):
    """Every config of a family that there are numbers of torch's for."""
    if kind in ENCODERS:
        return [ENCODERS[kind]["config"]]
    return [golden_config(case) for case, (name, _, _) in CASES.items() if name == kind]


@pytest.mark.parametrize("case", CASES)
def test_a_family_computes_what_torch_does(case):
    d = measure(case)
    assert max(d.unpadded, d.right, d.left, d.packed, d.cached, d.scores) <= TOLERANCE
    assert d.greedy == 0
    assert d.loss <= 2e-5
    assert d.gradients <= 1e-3
    assert 1e-4 < d.bfloat16 <= 0.04  # it is another precision, and not far off


@pytest.mark.parametrize("case", CASES)
def test_the_export_is_the_import_run_backwards(case, tmp_path):
    for name in ("model", "classifier"):
        before, after = tmp_path / name, tmp_path / f"{name} again"
        before.mkdir()
        write_golden(before, case, classifier=name == "classifier")
        model, params, _ = load_pretrained(before)
        wanted = jax.eval_shape(model.init, jax.random.key(0))
        assert jax.tree.structure(wanted) == jax.tree.structure(params)
        assert jax.tree.map(lambda x: x.shape, wanted) == jax.tree.map(lambda x: x.shape, params)
        save_pretrained(after, model, params)
        old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
        assert set(old) == set(new)
        for tensor, value in old.items():
            np.testing.assert_array_equal(value, new[tensor])


def test_every_family_has_a_case():
    assert {kind for kind, _, _ in CASES.values()} | set(ENCODERS) == set(FAMILIES)


def test_unknown_families_are_refused_with_the_list_of_those_supported():
    with pytest.raises(ModelError, match=r"'gpt5' is not supported.*bloom.*llama.*smollm3"):
        create_model({"model_type": "gpt5"})


# options that say nothing about what a trained model computes
HARMLESS = {
    "_name_or_path", "architectures", "dtype", "model_type", "transformers_version",
    # tokens and labels
    "bos_token_id", "eos_token_id", "id2label", "label2id", "problem_type",
    # what is returned and kept
    "output_attentions", "output_hidden_states", "return_dict", "use_cache",
    "chunk_size_feed_forward", "output_router_logits",
    # only in training
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classifier_dropout",
    "dropout", "embd_pdrop", "embed_dropout", "hidden_dropout", "hidden_dropout_prob", "layerdrop", 
    "qa_dropout", "resid_dropout", "resid_pdrop", "seq_classif_dropout",
    "router_aux_loss_coef", "router_jitter_noise",
    # the order of additions, the precision of the softmax
    "pretraining_tp", "slow_but_exact", "reorder_and_upcast_attn", "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32",
    # another head of GPT-2; what follows from other options; what the family doesn't read
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "attention_layers", "is_decoder",
}  # fmt: skip
UNREAD = {  # by the family
    # as many heads of keys as of queries, whatever it says
    "gpt_neox": {"num_key_value_heads"},
    "gpt_bigcode": {"num_key_value_heads"},
    # the cases list their layers, so that how to count them off does not matter
    "smollm3": {"no_rope_layer_interval"},
    "qwen2": {"max_window_layers"},
    "qwen3": {"max_window_layers"},
    "gemma3_text": {"_sliding_window_pattern"},
    # a classifier has no head to tie
    "bert": {"tie_word_embeddings"},
    # how a table that is loaded would have been initialised
    "distilbert": {"tie_word_embeddings", "sinusoidal_pos_embds"},
    "roberta": {"tie_word_embeddings"},
}


def other(value):
    """A value of the same kind that is not the same."""
    match value:
        case bool():
            return not value
        case int():
            return 2 * value if value else 1
        case float():
            return 2 * value if value else 1.0
        case str():
            return f"{value}_of_some_other_kind"
        case list():
            return value[::-1] if value[::-1] != value else value[:-1]
        case dict():
            return {key: other(inner) for key, inner in value.items()} or {"0": 1}
    return 4  # null


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_option_is_honoured_or_refused(kind):
    """In some case of the family, that is: some options say nothing beside certain others."""

    def overlooked(hf):
        before = create_model(hf).config
        for key in set(hf) - HARMLESS - UNREAD.get(kind, set()):
            try:
                after = create_model(hf | {key: other(hf[key])}).config
            except ModelError:
                continue
            if after == before:
                yield key

    overlooked_by_all = set.intersection(*(set(overlooked(hf)) for hf in golden_configs(kind)))
    assert overlooked_by_all == set()


@pytest.mark.parametrize(
    ("case", "option", "value", "named"),
    [
        ("llama", "quantization_config", {"bits": 4}, "quantization_config="),
        ("llama", "rope_scaling", {"type": "su", "factor": 2.0}, "rope_type"),
        ("llama", "hidden_act", "relu2", "hidden_act=relu2"),
        ("llama_linear", "partial_rotary_factor", 0.5, "partial_rotary_factor=0.5"),
        ("qwen2", "layer_types", ["full_attention", "chunked_attention"], "chunked_attention"),
        ("gemma", "use_bidirectional_attention", True, "use_bidirectional_attention=True"),
        ("gemma3_text", "attn_logit_softcapping", 30.0, "attn_logit_softcapping=30.0"),
        ("bloom", "apply_residual_connection_post_layernorm", True, "apply_residual"),
        ("opt", "layer_norm_elementwise_affine", False, "layer_norm_elementwise_affine=False"),
        ("mistral", "layer_types", ["full_attention", "sliding_attention"], "layer_types="),
        ("gptj", "rotary_dim", None, "rotary_dim=None"),
        ("llama", "num_key_value_heads", 3, "4 heads.*3 of keys"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(case, option, value, named):
    with pytest.raises(ModelError, match=named):
        create_model(golden_config(case) | {option: value})


def test_unknown_options_of_a_scaling_are_refused():
    with pytest.raises(ValueError, match="rope_type=linear with mrope_section="):
        make_rope(8, 1e4, 32, {"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 1, 2]})


OLD = {  # what transformers 4 wrote, for the same models
    "llama": {
        "rope_theta": 100.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama_linear": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "qwen2": {
        "rope_theta": 1e6,
        "rope_scaling": {
            "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16,
        },
        "layer_types": None,
    },
    "mistral": {"rope_theta": 10000.0},
    "gpt_neox_sequential": {
        "rotary_emb_base": 10000, "rotary_pct": 1.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "gpt_neox": {"rotary_emb_base": 500.0, "rotary_pct": 0.5, "rope_scaling": None},
    "gemma": {"hidden_act": "gelu", "hidden_activation": None, "rope_theta": 10000.0},
    "gemma2": {"rope_theta": 10000.0, "layer_types": None},
    "gemma3_text": {
        "rope_theta": 5000.0, "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "phi3_longrope": {
        "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "rope_scaling": {
            "type": "su", "short_factor": [1.0, 1.5], "long_factor": [2.0, 8.0],
        },
    },
    "smollm3": {"rope_theta": 2e6, "rope_scaling": None, "layer_types": None},
}  # fmt: skip


@pytest.mark.parametrize("case", OLD)
def test_configs_of_transformers_4_mean_the_same(case):
    hf = golden_config(case)
    old = {k: v for k, v in hf.items() if k not in ("rope_parameters", "dtype")}
    assert create_model(old | OLD[case] | {"torch_dtype": "float32"}).config == (
        create_model(hf).config
    )


PUBLISHED = json.loads((GOLDEN.parent / "published.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_give_the_published_number_of_parameters(name):
    model = create_model(PUBLISHED[name]["config"])
    shapes = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    assert sum(math.prod(x.shape) for x in shapes) == PUBLISHED[name]["parameters"]


def test_windows_repeat_as_gemma_3_says():
    hf = golden_config("gemma3_text") | {"layer_types": None, "sliding_window_pattern": 2}
    assert create_model(hf).config.windows == (4, None, 4)
    hf = golden_config("gemma3_text") | {"layer_types": None, "num_hidden_layers": 7}
    assert create_model(hf).config.windows == (4, 4, 4, 4, 4, None, 4)


def test_scalings_that_change_with_the_length_are_kept_to_where_they_do_not():
    model = create_model(golden_config("phi3_longrope"))
    assert model.config.max_positions == 32
    params = jax.eval_shape(model.init, jax.random.key(0))
    with pytest.raises(ValueError, match="33 tokens are more than the 32 positions"):
        jax.eval_shape(model.logits, params, jnp.zeros((1, 33), int))
    assert create_model(golden_config("llama_dynamic")).config.max_positions == 32


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_turns_pairs_by_position_times_frequency(interleaved):
    rope = Rope((0.3, 0.02), scale=1.5, interleaved=interleaved)
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 6)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3], [5, 6, 40, 41]])
    turned = rotate(rope, x, *rotation(rope, jnp.asarray(positions), x.dtype))
    pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
    expected = x.copy()
    for b in range(2):
        for t in range(4):
            for (i, j), frequency in zip(pairs, rope.frequencies):
                z = (x[b, :, t, i] + 1j * x[b, :, t, j]) * 1.5
                z = z * np.exp(1j * positions[b, t] * frequency)
                expected[b, :, t, i], expected[b, :, t, j] = z.real, z.imag
    np.testing.assert_allclose(turned, expected, atol=1e-5)


def test_alibi_slopes_are_those_of_the_paper():
    np.testing.assert_allclose(alibi_slopes(8), 0.5 ** np.arange(1, 9))
    np.testing.assert_allclose(alibi_slopes(4), 0.25 ** np.arange(1, 5))
    # of eight heads, the first, third, ... fill up
    np.testing.assert_allclose(alibi_slopes(6), [*0.25 ** np.arange(1, 5), 0.5, 0.125])


def test_shared_keys_are_as_if_they_were_repeated():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, 5, 3))) for n in (6, 2, 2))
    allowed = jnp.tril(jnp.ones((5, 5), bool))[None, None]
    repeated = [jnp.repeat(x, 3, axis=1) for x in (k, v)]
    for options in ({}, {"scale": 0.2, "softcap": 0.5, "bias": q[:1, :, :, :1]}):
        np.testing.assert_allclose(
            attend(q, k, v, allowed, **options), attend(q, *repeated, allowed, **options), atol=1e-6
        )


def experts_by_hand(params, x, count, normalize):
    """One token and one expert after the other."""
    y = np.zeros_like(x)
    for n, token in enumerate(x):
        logits = token @ params["router"]
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        chosen = np.argsort(-probs)[:count]
        weights = probs[chosen] / (probs[chosen].sum() if normalize else 1.0)
        for weight, e in zip(weights, chosen):
            inner = np.tanh(token @ params["gate"][e]) * (token @ params["up"][e])
            y[n] += weight * (inner @ params["down"][e])
    return y


@pytest.mark.parametrize("normalize", [True, False])
def test_experts_against_a_loop(normalize):
    rng = np.random.default_rng(0)
    shapes = {"router": (6, 5), "gate": (5, 6, 7), "up": (5, 6, 7), "down": (5, 7, 6)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    x = rng.normal(size=(9, 6))
    module = Experts(5, 2, 7, normalize, jnp.tanh, 0.02)
    with jax.enable_x64(True):
        apply = jax.jit(lambda x: module.apply({"params": params}, x))
        y = np.asarray(apply(x))
        np.testing.assert_allclose(y, experts_by_hand(params, x, 2, normalize), atol=1e-12)
        # a token is not affected by what comes with it, even if all crowd to one expert
        crowd = np.concatenate([x[:1], np.repeat(x[1:2], 8, axis=0)])
        np.testing.assert_allclose(apply(crowd)[0], y[0], atol=1e-12)


def test_routing_picks_the_most_probable():
    weights, chosen = route(jnp.log(jnp.asarray([[0.1, 0.4, 0.2, 0.3]])), 2, True)
    np.testing.assert_array_equal(chosen, [[1, 3]])
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7]], rtol=1e-6)
    np.testing.assert_allclose(
        route(jnp.log(jnp.asarray([[0.1, 0.4, 0.2, 0.3]])), 2, False)[0], [[0.4, 0.3]], rtol=1e-6
    )


def test_a_classifier_without_an_output_projection_says_so():
    hf = golden_config("llama") | {"architectures": ["LlamaForSequenceClassification"]}
    model = create_model(hf | {"num_labels": 1})
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert "head" not in params
    with pytest.raises(ValueError, match="no output projection"):
        model.unembed(params, jnp.zeros((1, 1, 32)))


def test_norms_around_one_start_at_one():
    x = jnp.asarray([[3.0, 4.0]])
    for offset in (0.0, 1.0):
        params = RMSNorm(0.0, offset).init(jax.random.key(0), x)
        np.testing.assert_array_equal(params["params"]["scale"], 1.0 - offset)
        y = RMSNorm(0.0, offset).apply(params, x)
        np.testing.assert_allclose(y, x / 12.5**0.5, rtol=1e-6)


def test_the_sampler_chooses_as_torch_does_where_windows_are_short(tmp_path):
    golden = write_golden(tmp_path, "gemma3_text")
    model, params, _ = load_pretrained(tmp_path)
    prompts, mask = padded(tokens(golden["seed"]), "left")
    options = {"model": model, "max_new_tokens": STEPS, "temperature": 0}
    samples = jax.jit(functools.partial(sample, **options))(
        params, jax.random.key(0), prompts, mask
    )
    np.testing.assert_array_equal(samples.tokens, golden["greedy"])


def test_a_cache_does_not_widen_the_compute_dtype(tmp_path):
    golden = write_golden(tmp_path, "llama")
    model, params, _ = load_pretrained(tmp_path)
    config = dataclasses.replace(model.config, compute_dtype="bfloat16")
    model = build_model(config, model.hf_config, {})
    grid, mask = padded(tokens(golden["seed"]))
    whole, _ = model.apply(params, grid, mask=mask)
    cached, _ = model.apply(params, grid, mask=mask, cache=model.init_cache(3, grid.shape[1]))
    assert whole.dtype == cached.dtype == jnp.bfloat16
    np.testing.assert_array_equal(whole[mask].astype(float), cached[mask].astype(float))


def test_caches_hold_the_heads_of_keys_only():
    cache = create_model(golden_config("llama_linear")).init_cache(3, 7)
    assert cache.keys[0].shape == (3, 2, 7, 12)
    assert cache.positions is None
    assert create_model(golden_config("mistral")).init_cache(3, 7).positions.shape == (3, 7)
