"""Matrix products of layers: operands rounded where asked, and laid out for the library that multiplies them.

XLA's newer library for CPUs multiplies bfloat16 in the processor's matrix units, where there are any, as long as the
left operand lies row by row: otherwise the product is left to the older library, which converts to float32 first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, DTypeLike, Float


def product(a: Float[Array, "N K"], b: Float[Array, "K M"], dtype: DTypeLike | None) -> Float[Array, "N M"]:
    """The product a @ b, operands rounded to `dtype` where one is given; the result has the higher of their types."""
    if dtype is None:
        return a @ b
    return jnp.matmul(a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.promote_types(a.dtype, b.dtype))


def product_transposed(a: Float[Array, "N M"], b: Float[Array, "K M"], dtype: DTypeLike | None) -> Float[Array, "N K"]:
    """The product a @ b^T, as `product`: contracted where b lies, since b.T would be laid out anew outside a loop."""
    kept = jnp.promote_types(a.dtype, b.dtype)
    if dtype is not None:
        a, b = a.astype(dtype), b.astype(dtype)
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=kept)


def product_over_rows(a: Float[Array, "N K"], b: Float[Array, "N M"], dtype: DTypeLike | None) -> Float[Array, "K M"]:
    """The product a^T @ b, as `product`: a weight's gradient. A rounded a is laid out anew, transposed."""
    if dtype is None:
        return a.T @ b
    left = with_layout_constraint(a.astype(dtype).T, Layout(major_to_minor=(0, 1)))
    return jnp.matmul(left, b.astype(dtype), preferred_element_type=jnp.promote_types(a.dtype, b.dtype))


def product_from_left(
    a: Float[Array, "N M"], b: Float[Array, "K M"], dtype: DTypeLike | None, result: DTypeLike
) -> Float[Array, "N K"]:
    """The product a @ b^T as (b a^T)^T in the type `result`, for few rows a and a large b.

    Matrix libraries lay the operand on the right out anew before they multiply. In a scan these would be the weights,
    at every step; on the left they are read as they lie. The barriers keep the compiler from turning it round again.
    """
    barrier = jax.lax.optimization_barrier
    if dtype is not None:
        a, b = a.astype(dtype), b.astype(dtype)
    found = jax.lax.dot_general(b, barrier(a), (((1,), (1,)), ((), ())), preferred_element_type=result)
    return barrier(found).T


def weighted_sum(weights: Float[Array, " N"], rows: Float[Array, "N M"]) -> Float[Array, " M"]:
    """The product weights @ rows in the weights' type.

    Rows of a lower type are multiplied as they are, by each weight's leading digits and by what these leave over: read
    once, and never written down in the weights' type.
    """
    if rows.dtype == weights.dtype:
        return weights @ rows
    leading = weights.astype(rows.dtype)
    rest = (weights - leading.astype(weights.dtype)).astype(rows.dtype)
    return jnp.matmul(jnp.stack([leading, rest]), rows, preferred_element_type=weights.dtype).sum(axis=0)


def prepared_bytes(weights: int, dtype: DTypeLike | None) -> int:
    """Bytes of so many weights rounded ahead of their products."""
    return 0 if dtype is None else weights * jnp.dtype(dtype).itemsize
