"""The softmax head that keeps no gradients of its logits, but computes them again, block by block.

The loss is linear in dy, its own gradient, so F can find dx up to that factor while the errors of a block of rows are
there. W finds them again, from what F keeps of each row: the maximum and the sum of the softmax. So no array is as
large as [T, B, V] in any program or between two. The names are those of `decoder`.

    F   each block of rows: logits = x @ K + b, loss, errors, dx = scale (errors @ K^T)
        saved: x, dx, scale, top, total
    B   dx dy, and scale dy
    W   as many blocks, of columns of the vocabulary: logits and errors once more; the columns of dK and db

With top and total known a column needs no other, so W goes by columns: each of dK is written once, where sums over
blocks of rows would read and write all of dK for each, and hold a second one. Those are four products for the three of
the head that keeps its errors, and F does half of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Integer

from mp_lstm.layers import decoder
from mp_lstm.layers.base import Context, Layer, flat_rows
from mp_lstm.layers.checks import check_features
from mp_lstm.layers.vocabulary import local_ids, sum_of_parts
from mp_lstm.planning.costs import Cost

BLOCK_ROWS = 160
"""Rows of a block at least. With fewer the products read their weights too often: at a vocabulary of 200,000 they took
35 to 50% more time."""


class Saved(NamedTuple):
    """What F keeps for B: inputs, their gradients but for dy, and of each step scale, maximum and sum of the softmax.

    On a part of the vocabulary `dx` is this part's share of it.
    """

    x: Float[Array, "T B H"]
    dx: Float[Array, "T B H"]
    scale: Float[Array, "T B"]
    top: Float[Array, "T B"]
    total: Float[Array, "T B"]


class Tape(NamedTuple):
    """All that makes the errors of the logits once more; W's context has the targets of a first chunk alone."""

    x: Float[Array, "T B H"]
    scale: Float[Array, "T B"]
    top: Float[Array, "T B"]
    total: Float[Array, "T B"]
    targets: Integer[Array, "T B"]


def lean_head(head: Layer, *, inputs: int, vocab: int, products: DTypeLike | None) -> Layer:
    """The lean variant of a softmax head.

    Args:
      head: that keeps its errors; parameters, results, name and all else are the same.
      inputs, vocab, products: as given to it.

    Returns:
      The layer.
    """

    def is_whole(params: Any) -> bool:
        return decoder.kernel_and_bias(params)[1].shape[0] == vocab

    def forward(params: Any, x: Array, state: tuple[()], ctx: Context) -> tuple[tuple[()], Array, Saved]:
        check_features(head.name, x, inputs)
        weights = jnp.ones(x.shape[:2], x.dtype) if ctx.weights is None else ctx.weights
        of_logits = decoder.cross_entropy if is_whole(params) else decoder.cross_entropy_of_parts
        given = params if products is None else decoder.rounded(params, products)  # once, and not in each block

        def of_block(rows: tuple[Array, Array, Array]) -> tuple[Array, Array, Array, Array, Array]:
            x, targets, weights = rows
            found = of_logits(decoder.logits_of(given, x, products), targets, weights)
            dx = decoder.input_gradient(given, found.errors, products, found.scale.dtype) * found.scale[:, None]
            return found.loss, dx, found.scale, found.top, found.total

        losses, *of_rows = jax.lax.map(of_block, tuple(map(in_blocks, (x, ctx.targets, weights))))
        return state, losses.sum(), Saved(x, *(out_of_blocks(leaf, *x.shape[:2]) for leaf in of_rows))

    def backward(
        params: Any, saved: Saved, dy: Array, dstate: tuple[()], ctx: Context
    ) -> tuple[Array, tuple[()], Tape]:
        dx = saved.dx if is_whole(params) else sum_of_parts(saved.dx)
        return dx * dy, dstate, Tape(saved.x, saved.scale * dy, saved.top, saved.total, ctx.targets)

    def weight_gradient(params: Any, tape: Tape, ctx: Context) -> Any:
        x, (scale, top, total, targets) = flat_rows(tape.x), (leaf.reshape(-1) for leaf in tape[1:])
        scaled, width = x * scale[:, None], decoder.kernel_and_bias(params)[1].shape[0]
        ids = targets if width == vocab else local_ids(targets, width)
        size = -(-width // blocks(len(x))[0])

        def of_columns(so_far: Any, first: Array) -> tuple[Any, None]:
            part = decoder.columns(params, first, size)
            errors = decoder.errors_again(decoder.logits_of(part, x, products), ids - first, top, total)
            errors = errors if products is None else errors.astype(products)
            found = decoder.gradient_of(part, scaled, scale, errors, products)
            return decoder.with_columns(so_far, found, first), None

        # The last block begins where it ends with the vocabulary: some columns are found twice, and are the same.
        firsts = jnp.minimum(jnp.arange(0, width, size, dtype=jnp.int32), width - size)
        return jax.lax.scan(of_columns, jax.tree.map(jnp.zeros_like, params), firsts)[0]

    def cost(batch_size: int, time: int) -> Cost:
        plain, rows = head.cost(batch_size, time), batch_size * time
        product, number = plain.backward, plain.transfer_bytes  # the loss is one number
        count, size = blocks(rows)
        block = size * vocab
        rounded = 0 if products is None else block * jnp.dtype(products).itemsize  # errors, rounded
        return plain._replace(
            forward=2 * product + 8.0 * rows * vocab,
            backward=rows * inputs,
            weight=2 * product + 6.0 * rows * vocab,
            saved_bytes=rows * (inputs + 1) * number,  # dx and scale
            kept_bytes=2 * rows * number,  # top and total
            tape_bytes=rows * number,  # scale dy
            scratch_bytes=2 * block * number + rounded,  # logits and exponentials
            # Logits, columns of K, x scaled.
            scratch_weight_bytes=block * number + rounded + plain.parameter_bytes // count + plain.input_bytes,
        )

    return head._replace(forward=forward, backward=backward, weight_gradient=weight_gradient, cost=cost)


def blocks(rows: int) -> tuple[int, int]:
    """How many blocks so many rows make, and the rows of each; the last one may have fewer.

    Example:
      >>> blocks(640), blocks(500), blocks(100)
      ((4, 160), (3, 167), (1, 100))
    """
    count = max(1, rows // BLOCK_ROWS)
    return count, -(-rows // count)


def in_blocks(x: Array) -> Array:
    """An array [T, B, ...] as [blocks, rows, ...]. What fills the last block is zero, and so a row of no weight."""
    rows = x.shape[0] * x.shape[1]
    count, size = blocks(rows)
    filled = jnp.pad(x.reshape((rows, *x.shape[2:])), [(0, count * size - rows)] + [(0, 0)] * (x.ndim - 2))
    return filled.reshape((count, size, *x.shape[2:]))


def out_of_blocks(x: Array, time: int, batch_size: int) -> Array:
    """The inverse of `in_blocks`."""
    flat = x.reshape((-1, *x.shape[2:]))
    return flat[: time * batch_size].reshape((time, batch_size, *x.shape[2:]))
