"""The matrix products of a training step and nothing else: the time that no step can beat with these products.

A product of a recurrence is timed as a loop over its steps, in the two ways there are (a b, and b^T a^T with the rows
along the columns), and the faster one counts. It is no training step: what `step` returns is the seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mp_lstm.launch import set_allocator
from peers.problem import Peer, Product, Shape, products


def make(shape: Shape) -> Peer:
    """All products of one step.

    Args:
      shape: model and batch.
    """
    set_allocator()
    calls = [(product, runners(product)) for product in products(shape)]

    def step() -> float:
        return sum(product.number * min(seconds(run) for run in runs) for product, runs in calls)

    return Peer(step, dict)


def runners(product: Product) -> list[Callable[[], Any]]:
    """The ways to run a product, compiled."""
    draw = np.random.default_rng(0)
    size = (product.repeats, product.rows, product.inner)
    a = draw.random(size, np.float32)
    b = draw.random((product.inner, product.columns), np.float32)
    if product.repeats == 1:
        return [compiled(jnp.matmul, a[0], b)]
    plain = compiled(each_step, a, b)
    across = compiled(each_step_across, np.swapaxes(a, 1, 2), b.T)
    return [plain, across]


def each_step(a: jax.Array, b: jax.Array) -> jax.Array:
    """a_t b for every t, one after the other."""
    return jax.lax.scan(lambda carry, a_t: (carry, a_t @ b), None, a)[1]


def each_step_across(a: jax.Array, b: jax.Array) -> jax.Array:
    """b a_t for every t."""
    return jax.lax.scan(lambda carry, a_t: (carry, b @ a_t), None, a)[1]


def compiled(function: Callable[..., jax.Array], *arrays: np.ndarray) -> Callable[[], Any]:
    """A call of the function on these arrays."""
    held = [jnp.asarray(np.ascontiguousarray(array)) for array in arrays]
    program = jax.jit(function).lower(*held).compile()
    return lambda: jax.block_until_ready(program(*held))


def seconds(run: Callable[[], Any]) -> float:
    """How long a call takes, once its arrays are in the cache as in a step: the second of two."""
    run()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
