"""Value heads: shapes, the zero start, numbers against numpy, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import init_value_head
from jaxppo.models import apply_value_head


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_first_values_are_zero_but_can_learn(kind):
    head = init_value_head(jax.random.key(0), 6, kind)
    hidden = jax.random.normal(jax.random.key(1), (2, 3, 6))
    values = apply_value_head(head, hidden)
    assert values.shape == (2, 3)
    np.testing.assert_array_equal(values, 0.0)
    grads = jax.grad(lambda head: apply_value_head(head, hidden).sum())(head)
    assert jnp.abs(grads["out"]["kernel"]).min() > 0 or kind == "mlp"
    assert jnp.abs(grads["out"]["kernel"]).max() > 0.1


def test_mlp_is_trlx_shape_and_computes_what_it_says():
    head = init_value_head(jax.random.key(0), 5)
    assert jax.tree.map(jnp.shape, head) == {
        "up": {"kernel": (5, 10), "bias": (10,)},
        "out": {"kernel": (10, 1), "bias": (1,)},
    }
    assert jnp.abs(head["up"]["kernel"]).max() <= 5**-0.5
    rng = np.random.default_rng(0)
    head = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), head)
    hidden = rng.normal(size=(2, 4, 5)).astype(np.float32)
    inner = np.maximum(hidden @ head["up"]["kernel"] + head["up"]["bias"], 0)
    expected = (inner @ head["out"]["kernel"] + head["out"]["bias"])[..., 0]
    np.testing.assert_allclose(apply_value_head(head, hidden), expected, rtol=1e-5, atol=1e-5)


def test_linear_computes_what_it_says():
    head = init_value_head(jax.random.key(0), 3, "linear")
    assert list(head) == ["out"]
    head = {"out": {"kernel": jnp.array([[1.0], [-2.0], [0.5]]), "bias": jnp.array([3.0])}}
    values = apply_value_head(head, jnp.array([[1.0, 1.0, 2.0], [0.0, 1.0, 0.0]]))
    np.testing.assert_array_equal(values, [3.0, 1.0])


def test_values_of_narrow_heads_are_float32():
    head = jax.tree.map(lambda x: x.astype(jnp.bfloat16), init_value_head(jax.random.key(0), 4))
    assert apply_value_head(head, jnp.ones((1, 2, 4), jnp.bfloat16)).dtype == jnp.float32


def test_unknown_kinds_are_refused_with_the_list():
    with pytest.raises(ValueError, match=r"'conv'.*linear, mlp"):
        init_value_head(jax.random.key(0), 4, "conv")
