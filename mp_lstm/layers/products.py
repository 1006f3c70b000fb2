"""Matrix products of layers: operands rounded where asked, and laid out for the library that multiplies them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float


def product(a: Float[Array, "N K"], b: Float[Array, "K M"], dtype: DTypeLike | None) -> Float[Array, "N M"]:
    """The product a @ b, operands rounded to `dtype` where one is given; the result keeps a's type."""
    if dtype is None:
        return a @ b
    return jnp.matmul(a.astype(dtype), b.astype(dtype), preferred_element_type=a.dtype)


def product_transposed(a: Float[Array, "N M"], b: Float[Array, "K M"], dtype: DTypeLike | None) -> Float[Array, "N K"]:
    """The product a @ b^T, as `product`: contracted where b lies, since b.T would be laid out anew outside a loop."""
    kept = a.dtype
    if dtype is not None:
        a, b = a.astype(dtype), b.astype(dtype)
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=kept)


def product_from_left(a: Float[Array, "N M"], b: Float[Array, "K M"], dtype: DTypeLike | None) -> Float[Array, "N K"]:
    """The product a @ b^T as (b a^T)^T, for few rows a and a large b.

    Matrix libraries lay the operand on the right out anew before they multiply. In a scan these would be the weights,
    at every step; on the left they are read as they lie. The barriers keep the compiler from turning it round again.
    """
    kept, barrier = a.dtype, jax.lax.optimization_barrier
    if dtype is not None:
        a, b = a.astype(dtype), b.astype(dtype)
    found = jax.lax.dot_general(b, barrier(a), (((1,), (1,)), ((), ())), preferred_element_type=kept)
    return barrier(found).T
