"""The decoder of a softmax head: its parameters, and the cross-entropy with its gradient by the logits.

Here are the steps that `heads.softmax_head` does for all rows at once and `lean_head` block by block. Steps and batch
rows are flattened to rows N. The gradient of the logits is kept as errors times scale:

    logits = x @ K + b    e = exp(logits - top), top = max logits, total = sum e
    errors = e - total onehot    scale = w / total    loss = sum w (log total + top - logits[target])

The softmax is never divided by its sum: like dy, the gradient of the loss, this scales small arrays, never [N, V].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Integer

from mp_lstm.layers.base import Borrowed
from mp_lstm.layers.embedding import EmbeddingParams
from mp_lstm.layers.products import product, product_from_left, product_over_rows, product_transposed, weighted_sum
from mp_lstm.layers.vocabulary import largest_of_parts, local_ids, sum_of_parts


class HeadParams(NamedTuple):
    """The decoder: logits = x @ kernel + bias."""

    kernel: Float[Array, "H V"]
    bias: Float[Array, " V"]


class TiedHeadParams(NamedTuple):
    """What a tied decoder owns; its kernel is the embedding's table, transposed."""

    bias: Float[Array, " V"]


class CrossEntropy(NamedTuple):
    """The loss of some rows, its gradient by their logits as errors times scale, and what the errors are made of."""

    loss: Float[Array, ""]
    errors: Float[Array, "N V"]
    scale: Float[Array, " N"]
    top: Float[Array, " N"]
    total: Float[Array, " N"]


def kernel_and_bias(params: Any) -> tuple[Array, Array]:
    """K [H, V] and b [V] of a decoder's parameters; those of a tied one are `Borrowed`."""
    return (params.lent.table.T, params.own.bias) if isinstance(params, Borrowed) else params


def rounded(params: Any, products: DTypeLike) -> Any:
    """The same parameters with a kernel that is rounded ahead of its products."""
    if isinstance(params, Borrowed):
        return Borrowed(params.own, EmbeddingParams(params.lent.table.astype(products)))
    return params._replace(kernel=params.kernel.astype(products))


def logits_of(params: Any, x: Float[Array, "N H"], products: DTypeLike | None) -> Float[Array, "N V"]:
    """The logits of rows."""
    if _is_rounded_table(params, products):
        return product_transposed(x, params.lent.table, products) + params.own.bias[None, :]
    kernel, bias = kernel_and_bias(params)
    return product(x, kernel, products) + bias[None, :]


def input_gradient(
    params: Any, errors: Float[Array, "N V"], products: DTypeLike | None, result: DTypeLike
) -> Float[Array, "N H"]:
    """The gradient of rows by their errors, in a type; the errors' scale is left to the caller."""
    if _is_rounded_table(params, products):
        return jnp.matmul(errors.astype(products), params.lent.table.astype(products), preferred_element_type=result)
    kernel, _ = kernel_and_bias(params)
    return product_from_left(errors, kernel, products, result)


def _is_rounded_table(params: Any, products: DTypeLike | None) -> bool:
    """Whether products take an embedding's table where it lies, where its transpose would be laid out anew.

    Rounded, that took longer than the product: logits and dx of 160 rows of 650 and 10,000 words 23 and 30 ms, 9 and 9
    so. In float32 the library that multiplies it in F is the faster one with the transpose, for layers of up to 400.
    """
    return products is not None and isinstance(params, Borrowed)


def gradient_of(
    params: Any,
    x: Float[Array, "N H"],
    scale: Float[Array, " N"],
    errors: Float[Array, "N V"],
    products: DTypeLike | None,
) -> Any:
    """The gradient of a decoder's parameters, from inputs that are scaled already, scale and errors of rows."""
    bias = weighted_sum(scale, errors)
    if isinstance(params, Borrowed):
        return Borrowed(TiedHeadParams(bias), EmbeddingParams(product_over_rows(errors, x, products)))
    return HeadParams(product_over_rows(x, errors, products), bias)


def columns(params: Any, first: Integer[Array, ""], size: int) -> Any:
    """The decoder of `size` columns of the vocabulary, from the first of them."""

    def cut(axis: int, leaf: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(leaf, first, size, axis)

    return _over_vocabulary(cut, params)


def with_columns(params: Any, part: Any, first: Integer[Array, ""]) -> Any:
    """Parameters, or their gradients, with `part` in the place of as many columns, from the first of them."""

    def put(axis: int, leaf: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(leaf, new, first, axis)

    return _over_vocabulary(put, params, part)


def _over_vocabulary(function: Callable[..., Array], *trees: Any) -> Any:
    """Maps (the vocabulary's axis, leaves) over the parameters of decoders."""
    if isinstance(trees[0], Borrowed):
        bias = function(0, *(tree.own.bias for tree in trees))
        return Borrowed(TiedHeadParams(bias), EmbeddingParams(function(0, *(tree.lent.table for tree in trees))))
    kernel = function(1, *(tree.kernel for tree in trees))
    return HeadParams(kernel, function(0, *(tree.bias for tree in trees)))


def cross_entropy(
    logits: Float[Array, "N V"], targets: Integer[Array, " N"], weights: Float[Array, " N"]
) -> CrossEntropy:
    """Weighted sum of the negative log-likelihoods; its gradient by the logits is errors times scale.

    The barrier keeps XLA from computing the exponentials twice, once to sum them and once to return them.
    """
    weights = weights.astype(logits.dtype)
    top = logits.max(axis=-1)
    picked = jnp.take_along_axis(logits, targets[:, None], axis=-1, mode="clip")[:, 0]
    exponentials = jax.lax.optimization_barrier(jnp.exp(logits - top[:, None]))
    total = exponentials.sum(axis=-1)
    losses = jnp.where(weights == 0, 0, weights * (jnp.log(total) + (top - picked)))
    errors = exponentials.at[jnp.arange(len(targets)), targets].add(-total, mode="clip", unique_indices=True)
    return CrossEntropy(losses.sum(), errors, weights / total, top, total)


def cross_entropy_of_parts(
    logits: Float[Array, "N V"], targets: Integer[Array, " N"], weights: Float[Array, " N"]
) -> CrossEntropy:
    """`cross_entropy` where the logits are those of a part of the vocabulary (`layers.vocabulary`)."""
    weights = weights.astype(logits.dtype)
    hit = local_ids(targets, logits.shape[1])[:, None] == jnp.arange(logits.shape[1])[None, :]
    top = largest_of_parts(logits.max(axis=-1))
    exponentials = jax.lax.optimization_barrier(jnp.exp(logits - top[:, None]))
    total, picked = sum_of_parts((exponentials.sum(axis=-1), jnp.where(hit, logits, 0).sum(axis=-1)))
    losses = jnp.where(weights == 0, 0, weights * (jnp.log(total) + (top - picked)))
    errors = jnp.where(hit, exponentials - total[:, None], exponentials)
    return CrossEntropy(losses.sum(), errors, weights / total, top, total)


def errors_again(
    logits: Float[Array, "N V"], ids: Integer[Array, " N"], top: Float[Array, " N"], total: Float[Array, " N"]
) -> Float[Array, "N V"]:
    """The errors that were found of the same logits once before, with the `top` and `total` that were found then.

    Args:
      logits: as then.
      ids: the targets, counted from the first of the logits' columns; what is no column is none's target.
      top, total: of all columns, also where the logits are those of a part of the vocabulary.
    """
    hit = ids[:, None] == jnp.arange(logits.shape[1])[None, :]
    exponentials = jnp.exp(logits - top[:, None])
    return jnp.where(hit, exponentials - total[:, None], exponentials)
