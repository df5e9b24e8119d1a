"""Adapters change nothing at first, and are what their formula says afterwards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import tiny_model

from jaxppo.models import add_lora, merge, merge_lora, split, with_options
from jaxppo.models.trainable import adapters, first_trained_block, top_layers

MODEL, PARAMS = tiny_model(layers=3)
TOKENS = np.arange(12).reshape(2, 6)


def adapted(targets="all-linear", rank=2):
    return add_lora(jax.random.key(0), PARAMS, rank=rank, targets=targets)


def test_new_adapters_change_nothing():
    np.testing.assert_array_equal(MODEL.logits(adapted(), TOKENS), MODEL.logits(PARAMS, TOKENS))


def test_an_adapter_adds_its_scaled_product_to_the_kernel():
    params = adapted(rank=3)
    filled = jax.tree_util.tree_map_with_path(
        lambda path, x: x if path[-1].key != "lora_b" else jnp.full(x.shape, 0.1), params
    )
    model = with_options(MODEL, lora_scale=0.5)
    merged = merge_lora(filled, 0.5)
    assert jax.tree.structure(merged) == jax.tree.structure(PARAMS)
    layer, plain = filled["block_1"]["up"], PARAMS["block_1"]["up"]["kernel"]
    expected = np.float64(plain) + 0.5 * np.float64(layer["lora_a"]) @ np.float64(layer["lora_b"])
    np.testing.assert_allclose(merged["block_1"]["up"]["kernel"], expected, rtol=1e-6, atol=1e-6)
    difference = model.logits(filled, TOKENS) - MODEL.logits(merged, TOKENS)
    assert jnp.abs(difference).max() < 2e-4
    assert jnp.abs(MODEL.logits(merged, TOKENS) - MODEL.logits(PARAMS, TOKENS)).max() > 0.1


@pytest.mark.parametrize(
    ("targets", "per_block"),
    [("all-linear", 6), ("query", 1), (["c_attn"], 3), (["q_proj", "down"], 2)],
)
def test_targets_name_layers(targets, per_block):
    leaves = [path for path in flatten_dict(adapted(targets), sep="/") if path.endswith("lora_a")]
    assert len(leaves) == 3 * per_block


def test_targets_may_choose_blocks():
    leaves = flatten_dict(adapted("block_[12]/attention/value"), sep="/")
    found = sorted(path for path in leaves if path.endswith("lora_a"))
    assert found == [f"block_{i}/attention/value/lora_a" for i in (1, 2)]


def test_a_target_without_a_layer_is_refused():
    with pytest.raises(ValueError, match="'wq' matches none of the layers; they are attention/key"):
        adapted("wq")
    with pytest.raises(ValueError, match="no regular expression"):
        adapted("(")


def test_split_and_merge_are_inverse():
    params = adapted("query")
    for trains in (adapters, top_layers(3, 1), top_layers(3, -1), top_layers(3, 0)):
        trained, frozen = split(params, trains)
        again = merge(trained, frozen)
        assert jax.tree.structure(again) == jax.tree.structure(params)
        jax.tree.map(np.testing.assert_array_equal, again, params)
        assert len(jax.tree.leaves(trained)) + len(jax.tree.leaves(frozen)) == len(
            jax.tree.leaves(params)
        )


def test_the_first_trained_block_is_where_gradients_begin():
    first = lambda params, trains: first_trained_block(split(params, trains)[0], 3)  # noqa: E731
    assert first(PARAMS, top_layers(3, -1)) == 0
    assert first(PARAMS, top_layers(3, 3)) == 0
    assert first(PARAMS, top_layers(3, 1)) == 2
    assert first(PARAMS, top_layers(3, 0)) == 3
    assert first(adapted("block_[12]/up"), adapters) == 1
