"""The count of compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxppo.tracking import count_compiles


def test_programs_are_counted_from_the_call_on_and_once_a_shape():
    a, b, c = (jnp.asarray(np.ones(shape)) for shape in (5, 6, (2, 3)))
    jax.jit(lambda x: x * 3.25 + 1)(a).block_until_ready()
    compiles = count_compiles()
    assert compiles() == 0
    program = jax.jit(lambda x: x * 2.75 - 1)
    for x, count in ((a, 1), (a, 1), (b, 2), (a, 2)):
        program(x).block_until_ready()
        assert compiles() == count
    later = count_compiles()
    program(c).block_until_ready()
    assert (compiles(), later()) == (3, 1)
