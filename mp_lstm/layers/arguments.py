"""What a layer may be made with: sizes, steps written out, and types of numbers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from mp_lstm.errors import InputError
from mp_lstm.planning.checks import positive, shown, whole

UNROLL_LIMIT = 16
"""Largest accepted unroll: compile time grows with it, speed does not."""

TYPES = ("float16", "bfloat16", "float32", "float64")
"""Floating types of any two of which JAX knows the higher one, as products need it."""


def checked_sizes(name: str, **sizes: Any) -> tuple[int, ...]:
    """The sizes as Python's whole numbers: numpy's own would overflow in costs.

    Args:
      name: of the layer.
      sizes: by the names of its arguments.

    Raises:
      InputError: one is no whole number of at least 1.

    Example:
      >>> checked_sizes("dense", inputs=3, outputs=2)
      (3, 2)
    """
    return tuple(positive(f"{name}: {field}", size) for field, size in sizes.items())


def checked_unroll(unroll: Any) -> int:
    """An unroll as Python's number; raises InputError for one that only costs compile time."""
    count = whole(unroll)
    if count is None or not 1 <= count <= UNROLL_LIMIT:
        raise InputError(
            f"unroll is {shown(unroll)}, 1 to {UNROLL_LIMIT} is wanted: compile time grows with it and speed does not"
        )
    return count


def check_types(name: str, **types: Any) -> None:
    """Raises InputError for a type that parameters or products cannot have.

    Args:
      name: of the layer.
      types: by the names of its arguments; None is left to it.

    Example:
      >>> check_types("dense", products="bfloat16", dtype=jnp.float32)
    """
    for field, given in types.items():
        if given is None:
            continue
        try:
            found = jnp.dtype(given).name
        except (TypeError, ValueError):
            found = None
        if found not in TYPES:
            raise InputError(
                f"{name}: {field} is {shown(given) if found is None else found}, one of {', '.join(TYPES)} is wanted: "
                "pass e.g. jnp.float32"
            )


def check_one_type(name: str, x: Array, kernel: Array, state: Array) -> None:
    """Raises InputError where a step of a recurrent layer would give a state of another type than it was given."""
    if jnp.result_type(x, kernel) != state.dtype:
        raise InputError(
            f"{name}: its input is {x.dtype}, its parameters {kernel.dtype} and its state {state.dtype}: convert the "
            f"input, as by x.astype({str(kernel.dtype)!r}), or make the layer with that dtype"
        )
