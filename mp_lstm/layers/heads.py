"""Heads: layers whose y is the summed loss.

    words, tags      softmax_head                               a target for each step
    labels           softmax_head, and last_step_only(batch)    a target for each sequence
    numbers          sequential(..., loss=squared_error)
    anything else    sequential(..., loss=f), or from_function(..., with_context=True) with parameters of its own

The softmax head computes the gradient of its logits in F, in the pass over the logits that the loss needs anyway: one
exponential each, and what is saved replaces the logits (`decoder`).

    F   logits = x @ K + b; errors and scale, whose product is the gradient of the logits; loss
        saved: x, errors, scale
        errors only serve products from here on, so they are kept in the type to which products round
    B   dx = scale (errors @ K^T) dy
    W   dK = (scale dy x)^T errors, db = sum scale dy errors

Its lean variant keeps no errors (`lean_head`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, DTypeLike, Float, Key

from mp_lstm.errors import InputError
from mp_lstm.layers import decoder
from mp_lstm.layers.arguments import check_types, checked_sizes
from mp_lstm.layers.base import Context, Layer, flat_rows
from mp_lstm.layers.checks import check_features, described
from mp_lstm.layers.decoder import HeadParams, TiedHeadParams
from mp_lstm.layers.lean_head import lean_head
from mp_lstm.layers.products import prepared_bytes
from mp_lstm.layers.results import check_number
from mp_lstm.layers.vocabulary import sum_of_parts
from mp_lstm.planning.costs import Cost


class Saved(NamedTuple):
    """What F keeps for B: inputs, and the gradients of the logits as errors times scale."""

    x: Float[Array, "T B H"]
    errors: Float[Array, "T B V"]
    scale: Float[Array, "T B"]


class Tape(NamedTuple):
    """Inputs scaled, the scale of each step, and the errors of the logits."""

    x: Float[Array, "T B H"]
    scale: Float[Array, "T B"]
    errors: Float[Array, "T B V"]


def softmax_head(
    inputs: SupportsIndex,
    vocab: SupportsIndex,
    *,
    tied: bool = False,
    name: str = "head",
    kernel_init: Any = jax.nn.initializers.glorot_uniform(),
    bias_init: Any = jax.nn.initializers.zeros,
    products: DTypeLike | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Layer:
    """Decoder and summed cross-entropy.

    Args:
      inputs: size H of the input.
      vocab: number V of classes.
      tied: borrow an embedding's table [V, H] as the kernel (Press and Wolf 2017, https://arxiv.org/abs/1608.05859).
      name: for tables and messages.
      kernel_init, bias_init: initialisers `(key, shape, dtype) -> array`.
      products: type to which the operands of matrix products are rounded; None: as they are.
      dtype: type of the parameters.

    Returns:
      The layer: x [T, B, H] -> y [], the sum over steps of weight times negative log-likelihood of the target;
      `infer` gives the logits [T, B, V].

    Raises:
      InputError: a size is no positive whole number, or a type no floating one.

    Example:
      >>> import jax, jax.numpy as jnp, mp_lstm
      >>> from mp_lstm.layers.base import Context
      >>> head = mp_lstm.softmax_head(3, 50, kernel_init=jax.nn.initializers.zeros)
      >>> ctx = Context(targets=jnp.zeros((2, 1), int), weights=jnp.ones((2, 1)))
      >>> _, loss, _ = head.forward(head.init(jax.random.key(0)), jnp.ones((2, 1, 3)), (), ctx)
      >>> round(float(jnp.exp(loss / 2)), 3)
      50.0
    """
    inputs, vocab = checked_sizes(name, inputs=inputs, vocab=vocab)
    check_types(name, products=products, dtype=dtype)
    itemsize = jnp.dtype(dtype).itemsize

    def init(key: Key[Array, ""]) -> HeadParams | TiedHeadParams:
        kernel_key, bias_key = jax.random.split(key)
        bias = bias_init(bias_key, (vocab,), dtype)
        return TiedHeadParams(bias) if tied else HeadParams(kernel_init(kernel_key, (inputs, vocab), dtype), bias)

    def logits_of(params: Any, x: Array) -> Array:
        check_features(name, x, inputs)
        return decoder.logits_of(params, flat_rows(x), products)

    def forward(params: Any, x: Array, state: tuple[()], ctx: Context) -> tuple[tuple[()], Array, Saved]:
        weights = jnp.ones(x.shape[:2], x.dtype) if ctx.weights is None else ctx.weights
        logits = logits_of(params, x)
        size = logits.shape[1]
        of_logits = decoder.cross_entropy if size == vocab else decoder.cross_entropy_of_parts
        found = of_logits(logits, ctx.targets.reshape(-1), weights.reshape(-1))
        errors = found.errors if products is None else found.errors.astype(products)
        return state, found.loss, Saved(x, errors.reshape((*x.shape[:2], size)), found.scale.reshape(x.shape[:2]))

    def backward(
        params: Any, saved: Saved, dy: Array, dstate: tuple[()], ctx: Context
    ) -> tuple[Array, tuple[()], Tape]:
        scale = saved.scale * dy
        dx = decoder.input_gradient(params, flat_rows(saved.errors), products, scale.dtype)
        dx = dx if saved.errors.shape[2] == vocab else sum_of_parts(dx)
        dx = dx.reshape(saved.x.shape) * scale[:, :, None]
        return dx, dstate, Tape(saved.x * scale[:, :, None], scale, saved.errors)

    def weight_gradient(params: Any, tape: Tape, ctx: Context) -> Any:
        x, errors = flat_rows(tape.x), flat_rows(tape.errors)
        return decoder.gradient_of(params, x, tape.scale.reshape(-1), errors, products)

    def infer(params: Any, x: Array, state: tuple[()], ctx: Context) -> tuple[tuple[()], Array]:
        return state, logits_of(params, x).reshape((*x.shape[:2], vocab))

    def cost(batch_size: int, time: int) -> Cost:
        rows = batch_size * time
        flops = 2.0 * rows * inputs * vocab
        return Cost(
            forward=flops + 8.0 * rows * vocab,
            backward=flops,
            weight=flops + rows * vocab,
            parameters=vocab if tied else (inputs + 1) * vocab,
            parameter_bytes=(inputs + 1) * vocab * itemsize,
            saved_bytes=0,
            transfer_bytes=itemsize,
            kept_bytes=rows * vocab * (itemsize if products is None else jnp.dtype(products).itemsize),  # errors
            tape_bytes=rows * inputs * itemsize,  # x scaled
            input_bytes=rows * inputs * itemsize,
            scratch_bytes=rows * vocab * itemsize,  # logits
            prepared_bytes=prepared_bytes(inputs * vocab, products),
        )

    head = Layer(
        name=name,
        kind="head",
        init=init,
        init_state=lambda batch_size: (),
        forward=forward,
        backward=backward,
        weight_gradient=weight_gradient,
        infer=infer,
        cost=cost,
        borrows=tied,
        prepare=None if products is None else lambda params: decoder.rounded(params, products),
        target_ids=vocab,
    )
    return head._replace(lean=lean_head(head, inputs=inputs, vocab=vocab, products=products))


def softmax_cross_entropy(
    predictions: Float[Array, "T B V"], targets: Any, weights: Float[Array, "T B"]
) -> Float[Array, ""]:
    """Weighted sum of the cross-entropy of each step, for `sequential(..., loss=...)`.

    Args:
      predictions: logits.
      targets: classes [T, B]; one out of range makes the loss not a number.
      weights: of each step.

    Raises:
      InputError: the targets are no whole numbers, or not one for each step.
    """
    shape = getattr(targets, "shape", None)
    if shape != predictions.shape[:-1] or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise InputError(
            f"softmax_cross_entropy: the targets are {described(targets)}, a whole number for each of the steps "
            f"{list(predictions.shape[:-1])} is wanted: pass classes, and neither one-hot vectors nor floats"
        )
    # Left as it is, -1 would stand for the last class.
    classes = jnp.where(targets < 0, predictions.shape[-1], targets)
    return (weights * optax.softmax_cross_entropy_with_integer_labels(predictions, classes)).sum()


def squared_error(predictions: Float[Array, "T B D"], targets: Any, weights: Float[Array, "T B"]) -> Float[Array, ""]:
    """Weighted sum of the mean squared error of each step, for `sequential(..., loss=...)`.

    Args:
      predictions, targets: [T, B, D].
      weights: of each step.

    Raises:
      InputError: the targets have another shape than the predictions.
    """
    if getattr(targets, "shape", None) != predictions.shape:
        raise InputError(
            f"squared_error: the targets are {described(targets)}, the predictions {described(predictions)}: pass "
            "targets of the predictions' shape"
        )
    return (weights * jnp.square(predictions - targets).mean(axis=-1)).sum()


def loss_head(loss: Callable[[Any, Any, Any], Array], *, name: str = "loss") -> Layer:
    """A head without parameters from a loss function, differentiated by JAX.

    Args:
      loss: (predictions [T, B, ...], targets, weights [T, B]) -> the weighted sum over steps.
      name: for tables and messages.

    Returns:
      The layer; `infer` gives the predictions.

    Raises:
      InputError: (when first run) a batch has no targets, or the loss is not one floating number.

    Example:
      >>> import jax.numpy as jnp, mp_lstm
      >>> from mp_lstm.layers.base import Context
      >>> head = mp_lstm.loss_head(mp_lstm.squared_error)
      >>> ctx = Context(targets=jnp.ones((2, 1, 3)), weights=jnp.ones((2, 1)))
      >>> float(head.forward((), jnp.zeros((2, 1, 3)), (), ctx)[1])
      2.0
    """

    def of(x: Any, ctx: Context) -> Array:
        if ctx.targets is None:
            raise InputError(f"{name}: the batch has no targets: pass Batch(inputs, targets=...)")
        found = loss(x, ctx.targets, ctx.weights)
        check_number(f"{name}: its function", found, "the weighted sum over steps, as (weights * losses).sum() is")
        return found

    def backward(
        params: tuple[()], saved: Any, dy: Array, dstate: tuple[()], ctx: Context
    ) -> tuple[Any, tuple[()], tuple[()]]:
        _, pull = jax.vjp(lambda x: of(x, ctx), saved)
        return pull(dy)[0], dstate, ()

    return Layer(
        name=name,
        kind="head",
        init=lambda key: (),
        init_state=lambda batch_size: (),
        forward=lambda params, x, state, ctx: (state, of(x, ctx), x),
        backward=backward,
        weight_gradient=lambda params, tape, ctx: (),
        infer=lambda params, x, state, ctx: (state, x),
        cost=lambda batch_size, time: Cost(0, 0, 0, 0, 0, 0, 0),
    )
