"""A vocabulary over several devices: each has an equal range of ids, and its layers add up what the others have.

A layer that is given fewer columns or rows than its vocabulary has ids is one such part. It runs inside a program over
the named axis `AXIS`, along which ranges follow one another:

    ids 0 .. V-1     | 0 ... n-1 | n ... 2n-1 | ...        part k has those from k n
    local id         | 0 ... n-1 | 0 ... n-1  | ...        n: another part's

What a part sends the others is one number a step (a maximum, a sum) or one vector of H, never one for each id.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Integer

AXIS = "model"


def local_ids(ids: Integer[Array, "*N"], size: int) -> Integer[Array, "*N"]:
    """Ids counted from the first of this part's `size` ids; `size` itself stands for all that are not among them."""
    local = ids - jax.lax.axis_index(AXIS).astype(ids.dtype) * size
    return jnp.where((local >= 0) & (local < size), local, size)


def sum_of_parts(tree: Any) -> Any:
    """The sums over all parts, which each of them gets."""
    return jax.lax.psum(tree, AXIS)


def largest_of_parts(x: Array) -> Array:
    """The maximum over all parts."""
    return jax.lax.pmax(x, AXIS)
