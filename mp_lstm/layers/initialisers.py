"""How parameters are drawn where no other way is asked for: Glorot kernels, orthogonal recurrent ones, zero biases.

An initialiser is (key, shape, dtype) -> array, as in `jax.nn.initializers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Key

from mp_lstm.planning.checks import LEAST, MOST, within

Initialiser = Callable[..., Any]

default_kernel_init = jax.nn.initializers.glorot_uniform()
default_bias_init = jax.nn.initializers.zeros


def default_recurrent_init(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
    """Orthogonal, worked out in float32 at least: in narrower types JAX has no decomposition."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return jax.nn.initializers.orthogonal()(key, shape, wide).astype(dtype)


def symmetric_uniform(scale: Any) -> Initialiser:
    """Initialiser: uniform(-scale, scale), whose width must be held too."""
    most = within("init_scale", scale, "a positive number", least=LEAST, most=MOST / 2)

    def init(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
        return jax.random.uniform(key, shape, dtype, -most, most)

    return init


def forget_biased(hidden: int, forget_bias: float, init: Initialiser) -> Initialiser:
    """Initialiser of an LSTM's bias: `init`, plus `forget_bias` for the forget gates."""

    def biased(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
        return init(key, shape, dtype).at[hidden : 2 * hidden].add(forget_bias)

    return biased
