"""A dense layer over the features of every step."""

from __future__ import annotations

from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Key

from mp_lstm.layers.arguments import check_types, checked_sizes
from mp_lstm.layers.base import Context, Layer, flat_rows, infer_by_forward, mask_steps
from mp_lstm.layers.checks import check_features
from mp_lstm.layers.products import prepared_bytes, product, product_over_rows, product_transposed
from mp_lstm.planning.costs import Cost


class DenseParams(NamedTuple):
    """y = x @ kernel + bias."""

    kernel: Float[Array, "D H"]
    bias: Float[Array, " H"]


class Tape(NamedTuple):
    """Inputs and output gradients."""

    x: Float[Array, "T B D"]
    dy: Float[Array, "T B H"]


def dense(
    inputs: SupportsIndex,
    outputs: SupportsIndex,
    *,
    name: str = "dense",
    kernel_init: Any = jax.nn.initializers.glorot_uniform(),
    bias_init: Any = jax.nn.initializers.zeros,
    products: DTypeLike | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Layer:
    """A linear map of each step's features; padded steps give zero.

    Args:
      inputs, outputs: sizes D and H.
      name: for tables and messages.
      kernel_init, bias_init: initialisers `(key, shape, dtype) -> array`.
      products: type to which the operands of matrix products are rounded; None: as they are.
      dtype: type of the parameters.

    Returns:
      The layer: x [T, B, D] -> y [T, B, H].

    Raises:
      InputError: a size is no positive whole number, or a type no floating one.

    Example:
      >>> import jax, jax.numpy as jnp, mp_lstm
      >>> from mp_lstm.layers.base import Context
      >>> layer = mp_lstm.dense(3, 2)
      >>> layer.infer(layer.init(jax.random.key(0)), jnp.ones((4, 1, 3)), (), Context())[1].shape
      (4, 1, 2)
    """
    inputs, outputs = checked_sizes(name, inputs=inputs, outputs=outputs)
    check_types(name, products=products, dtype=dtype)
    itemsize = jnp.dtype(dtype).itemsize

    def init(key: Key[Array, ""]) -> DenseParams:
        kernel_key, bias_key = jax.random.split(key)
        return DenseParams(kernel_init(kernel_key, (inputs, outputs), dtype), bias_init(bias_key, (outputs,), dtype))

    def forward(params: DenseParams, x: Array, state: tuple[()], ctx: Context) -> tuple[tuple[()], Array, Array]:
        check_features(name, x, inputs)
        y = product(flat_rows(x), params.kernel, products) + params.bias[None, :]
        return state, mask_steps(ctx.mask, y.reshape((*x.shape[:2], outputs))), x

    def backward(
        params: DenseParams, saved: Array, dy: Array, dstate: tuple[()], ctx: Context
    ) -> tuple[Array, tuple[()], Tape]:
        dy = mask_steps(ctx.mask, dy)
        dx = product_transposed(flat_rows(dy), params.kernel, products).reshape(saved.shape)
        return dx, dstate, Tape(saved, dy)

    def weight_gradient(params: DenseParams, tape: Tape, ctx: Context) -> DenseParams:
        dy = flat_rows(tape.dy)
        return DenseParams(product_over_rows(flat_rows(tape.x), dy, products), dy.sum(axis=0))

    def cost(batch_size: int, time: int) -> Cost:
        rows, parameters = batch_size * time, (inputs + 1) * outputs
        flops = 2.0 * rows * inputs * outputs
        return Cost(
            forward=flops,
            backward=flops,
            weight=flops,
            parameters=parameters,
            parameter_bytes=parameters * itemsize,
            saved_bytes=0,
            transfer_bytes=rows * outputs * itemsize,
            tape_bytes=rows * outputs * itemsize,  # dy
            input_bytes=rows * inputs * itemsize,
            prepared_bytes=prepared_bytes(inputs * outputs, products),
        )

    return Layer(
        name=name,
        kind="dense",
        init=init,
        init_state=lambda batch_size: (),
        forward=forward,
        backward=backward,
        weight_gradient=weight_gradient,
        infer=infer_by_forward(forward),
        cost=cost,
        prepare=None if products is None else lambda params: params._replace(kernel=params.kernel.astype(products)),
    )
