"""A model: placement rows in order, and ties between them.

A *row* is a layer with everything that has no parameters of its own to place (dropout, activation): what can be put
on a device. A *tie* lets one row use another's parameters: the tied decoder. `lend` and `settle` are all there is to
it: one puts the lent parameters beside the borrower's own, the other adds the borrower's gradients to the owner's.
Both work for any consecutive rows, so for a whole model and for a stage of it alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, Key

from mp_lstm.errors import InputError
from mp_lstm.layers.base import (
    Borrowed,
    Context,
    Layer,
    Params,
    State,
    apply,
    chain,
    dropout_key,
    leaner,
    mask_steps,
    steps_mask,
)
from mp_lstm.layers.batch import Batch
from mp_lstm.layers.checks import checked, described, step_shape
from mp_lstm.layers.heads import loss_head
from mp_lstm.layers.results import difference


class Tie(NamedTuple):
    """Row `borrower` uses the parameters of row `owner`."""

    owner: int
    borrower: int


class Aux(NamedTuple):
    """What `Model.loss` returns beside the mean loss."""

    loss_sum: Float[Array, ""]
    weight_sum: Float[Array, ""]
    carry: State


class Model(NamedTuple):
    """Rows and ties. Parameters are a tuple, one entry a row.

    Args:
      rows: the placement rows; the last one's y is the summed loss.
      ties: which rows borrow whose parameters.
    """

    rows: tuple[Layer, ...]
    ties: tuple[Tie, ...] = ()

    def init(self, key: Key[Array, ""]) -> Params:
        """Draws the parameters of all rows, on the default device.

        Example:
          >>> import jax, mp_lstm
          >>> model = mp_lstm.language_model(vocab=50, embed=4, hidden=8, layers=2)
          >>> [len(jax.tree.leaves(row)) for row in model.init(jax.random.key(0))]
          [1, 3, 3, 2]
        """
        return chain(self.rows).init(key)

    def loss(
        self,
        params: Params,
        batch: Batch,
        *,
        key: Key[Array, ""] | None = None,
        counter: Integer[Array, ""] | int = 0,
        carry: State | None = None,
    ) -> tuple[Float[Array, ""], Aux]:
        """Mean loss of a batch on one device, differentiable in params.

        Args:
          params: a tuple, one entry a row.
          batch: the batch; padding never counts.
          key: training's key, as given to a pipeline's `init`; None: no dropout, and no other regulariser.
          counter: number of the batch, on which dropout masks depend.
          carry: state before the first step, where `batch.resets` is given; by default the initial one.

        Returns:
          The loss per unit of weight, 0 where no step has a weight, and Aux(loss_sum, weight_sum, carry). Regularised
          activations add to its gradient, as in a pipeline, and not to its value.

        Raises:
          InputError: shapes or types that do not agree; in host arrays also lengths, weights or ids out of range; the
            model has no loss, or the carry is none of its.

        Example:
          >>> import jax, mp_lstm, numpy as np
          >>> model = mp_lstm.language_model(vocab=50, embed=4, hidden=8, layers=2)
          >>> batch = mp_lstm.Batch(np.zeros((3, 2), int), np.ones((3, 2), int), lengths=np.array([3, 1]))
          >>> params = model.init(jax.random.key(0))
          >>> (loss, aux), grads = jax.value_and_grad(model.loss, has_aux=True)(params, batch)
          >>> float(aux.weight_sum)
          4.0
        """
        return loss(self, params, batch, run=apply, key=key, counter=counter, carry=carry)


def loss(
    model: Model,
    params: Params,
    batch: Batch,
    *,
    run: Callable[[Layer, Params, Any, State, Context], tuple[State, Any]],
    key: Key[Array, ""] | None,
    counter: Integer[Array, ""] | int,
    carry: State | None,
) -> tuple[Float[Array, ""], Aux]:
    """`Model.loss`, each row run by `run`: `apply`, or a plain forward that JAX differentiates itself."""
    layers = chain(model.rows)
    batch = checked(model.rows, batch)
    params = jax.tree.map(jnp.asarray, params)
    time, rows = step_shape(batch)
    mask = steps_mask(None if batch.lengths is None else jnp.asarray(batch.lengths), 0, time)
    dtype = jnp.result_type(*(leaf for leaf in jax.tree.leaves(params)))
    weights = loss_weights(batch, mask, (time, rows), dtype)
    counted = None if mask is None and batch.weights is None else weights != 0
    initial = layers.init_state(rows)
    if carry is None or batch.resets is None:
        carry = initial
    elif wrong := difference(carry, initial):
        raise InputError(f"carry {wrong}: pass what the loss before returned for as many rows, or None to begin anew")
    else:
        carry = reset_rows(jnp.asarray(batch.resets), initial, carry)
    context = Context(
        key=None if key is None else dropout_key(key),
        counter=counter,
        mask=mask,
        # Whatever stands where nothing counts (NaN is zero times NaN) must not reach a product.
        targets=jax.tree.map(lambda leaf: mask_steps(counted, jnp.asarray(leaf)), batch.targets),
        weights=weights,
        train=key is not None,
    )
    borrowed = lend(model, range(len(model.rows)), params, ())
    inputs = jax.tree.map(lambda leaf: mask_steps(mask, jnp.asarray(leaf)), batch.inputs)
    carry, loss_sum = run(layers, borrowed, inputs, carry, context)
    check_loss(model.rows[-1].name, loss_sum)
    weight_sum = weights.sum()
    return loss_sum / jnp.where(weight_sum == 0, 1, weight_sum), Aux(loss_sum, weight_sum, carry)


def check_loss(name: str, y: Any) -> None:
    """Raises InputError where what the last row of a model gives is no loss."""
    if np.shape(y) == ():
        return
    raise InputError(
        f"the model ends with {name}, which gives {described(y)}, wanted is the summed loss, one number: pass "
        "sequential(..., loss=...), or end with a head"
    )


def loss_weights(batch: Batch, mask: Array | None, shape: tuple[int, int], dtype: Any) -> Float[Array, "T B"]:
    """Weights of the loss: the batch's or one, and zero on padding."""
    weights = jnp.ones(shape, dtype) if batch.weights is None else jnp.asarray(batch.weights, dtype)
    return weights if mask is None else jnp.where(mask, weights, 0)


def reset_rows(resets: Array, initial: State, carry: State) -> State:
    """The carried state, with the initial one in the rows where `resets` [B] is true."""

    def choose(fresh: Array, old: Any) -> Array:  # the old one may be a host array
        return jnp.where(resets.reshape((-1,) + (1,) * (old.ndim - 1)), fresh, old)

    return jax.tree.map(choose, initial, carry)


def lean_model(model: Model) -> Model:
    """The model with each row in its lean variant, where it has one."""
    return model._replace(rows=tuple(map(leaner, model.rows)))


def ties_from_below(model: Model, rows: range) -> tuple[Tie, ...]:
    """Ties whose borrower is among `rows` and whose owner is not: what those rows must be lent."""
    return tuple(tie for tie in model.ties if tie.borrower in rows and tie.owner not in rows)


def lend(model: Model, rows: range, own: Params, lent: Sequence[Params]) -> Params:
    """Parameters of consecutive rows as their layers take them.

    Args:
      own: one entry for each of `rows`.
      lent: one entry for each of `ties_from_below`.
    """
    params = list(own)
    outside = dict(zip(ties_from_below(model, rows), lent, strict=True))
    for tie in model.ties:
        if tie.borrower in rows:
            source = own[tie.owner - rows.start] if tie.owner in rows else outside[tie]
            params[tie.borrower - rows.start] = Borrowed(own[tie.borrower - rows.start], source)
    return tuple(params)


def settle(model: Model, rows: range, gradients: Params) -> tuple[Params, tuple[Params, ...]]:
    """Gradients of `lend`'s result as those of its arguments: a borrower's are added to its owner's if that is here."""
    own, lent = list(gradients), []
    for tie in model.ties:
        if tie.borrower not in rows:
            continue
        own[tie.borrower - rows.start], debt = gradients[tie.borrower - rows.start]
        if tie.owner in rows:
            own[tie.owner - rows.start] = jax.tree.map(jnp.add, own[tie.owner - rows.start], debt)
        else:
            lent.append(debt)
    return tuple(own), tuple(lent)


def sequential(layers: Sequence[Layer], *, loss: Callable[[Any, Any, Any], Array] | None = None) -> Model:
    """Makes a model of layers in order.

    Args:
      layers: at least one layer. Those without parameters join the row of the next layer that has some, at the end
        the last.
      loss: (predictions, targets, weights [T, B]) -> weighted sum, such as `softmax_cross_entropy`; None where the last
        layer is a head already.

    Returns:
      The model.

    Raises:
      InputError: there is no layer with parameters, or a loss and a head.

    Example:
      >>> import mp_lstm
      >>> layers = [mp_lstm.lstm_layer(3, 8), mp_lstm.dropout(0.5), mp_lstm.dense(8, 2)]
      >>> model = mp_lstm.sequential(layers, loss=mp_lstm.squared_error)
      >>> [row.name for row in model.rows]
      ['lstm', 'dense']
    """
    if loss is not None and layers and layers[-1].kind == "head":
        raise InputError(f"sequential: the last layer, {layers[-1].name}, is a head already: leave loss out")
    layers = [*layers, loss_head(loss)] if loss is not None else list(layers)
    placed = [i for i, layer in enumerate(layers) if layer.cost(1, 1).parameters]
    if not placed:
        raise InputError("sequential: no layer has parameters: there is nothing to place or train")
    ends = [i + 1 for i in placed[:-1]] + [len(layers)]
    return Model(tuple(row(layers[start:end]) for start, end in zip([0, *ends], ends, strict=False)))


def row(layers: Sequence[Layer]) -> Layer:
    """One placement row of several layers, named after the one with parameters."""
    if len(layers) == 1:
        return layers[0]
    named = max(layers, key=lambda layer: layer.cost(1, 1).parameters)
    return chain(layers, name=named.name)
