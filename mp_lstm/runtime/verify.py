"""The certificate of a user's own model: does the pipeline compute what JAX would differentiate?

Two comparisons a row, as exact as the narrowest type allows that the model computes in (of rounded products, say):

    pipeline   the gradient by placed stages, chunks and micro-batches; `jax.grad` of the plain forward on one device
    layer      the row's own B and W, fed what the reference feeds it; `jax.vjp` of the row's own forward

The layer of the second comparison is the lean variant of a row, where that is what the plan's rematerialisation runs.
What is wrong in a rule of `jax.custom_vjp` within a forward cannot be seen: JAX's derivative goes by it too.
A wrong backward spoils the pipeline's gradients of every row below it; the second comparison names the row it is in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, subjaxprs
from jaxtyping import Key

from mp_lstm.errors import InputError
from mp_lstm.layers.base import Context, Layer, Params, State, child_context, zero_cotangent, zero_gradient
from mp_lstm.layers.batch import Batch
from mp_lstm.layers.model import Model, lean_model, loss

TOLERANCE = {"float64": 1e-10, "float32": 2e-5}
"""Largest relative error that passes, by the narrowest type that the forward computes in."""
ROUNDINGS = 8
"""Largest relative error that passes in narrower types, in units of their rounding: an LSTM's backward rounds the
gradients of its gates once more than JAX's derivative does, and eight layers over 64 steps came to less than four."""
NOTHING = 0.05
"""Share of a row's gradient below which one of its leaves may be nothing but rounding: of a bias that the loss cannot
see, say. An error that hides below it is a twentieth of the tolerance of the row's whole gradient."""


class RowErrors(NamedTuple):
    """Relative errors of a row: of its gradient by the pipeline, and of its own backward."""

    name: str
    stage: int
    pipeline: float
    layer: float


class Certificate(NamedTuple):
    """Errors of every row, what is allowed, and the narrowest type computed in, by which it is."""

    rows: tuple[RowErrors, ...]
    loss: float
    tolerance: float
    narrowest: str

    @property
    def worst(self) -> float:
        """Largest relative error of all."""
        # numpy's, as Python's max may pass over what is not a number
        return float(np.max([self.loss, *(error for row in self.rows for error in (row.pipeline, row.layer))]))

    @property
    def passed(self) -> bool:
        """Whether every error is within the tolerance; an error that is not a number is not."""
        return self.worst <= self.tolerance

    @property
    def wrong(self) -> tuple[str, ...]:
        """Rows whose own backward disagrees with JAX's derivative of their forward."""
        return tuple(row.name for row in self.rows if not row.layer <= self.tolerance)

    def __str__(self) -> str:
        """A table and a verdict."""
        lines = ["row         stage  pipeline  layer"]
        lines += [f"{row.name:10}  {row.stage:5}  {row.pipeline:8.1e}  {row.layer:.1e}" for row in self.rows]
        found = f"largest relative error {self.worst:.1e}, {self.tolerance:.0e} allowed in {self.narrowest}"
        verdict = f"failed: {found}"
        if self.passed:
            verdict = f"passed: {found}"
        elif self.wrong:
            verdict = f"failed: the backward of {', '.join(self.wrong)} is not the derivative of its forward"
        else:
            verdict += "; every row's own backward is right: does a layer that looks across chunks say chunkable=False?"
        if not self.passed and self.narrowest not in TOLERANCE:
            verdict += f"; layers of few units may err by more in {self.narrowest}: verify them in float32 to tell"
        return "\n".join([*lines, verdict])


def relative_error(got: Any, wanted: Any) -> float:
    """Largest over leaves of ||got - wanted|| / ||wanted||; absolute where all of `wanted` is zero.

    A leaf is held to no less than `NOTHING` of the whole tree: where its terms cancel out, all that it has is rounding.
    """
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))
    norms = [float(np.linalg.norm(np.asarray(b, np.float64))) for _, b in pairs]
    least = NOTHING * float(np.linalg.norm(norms))
    differences = [np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)) for a, b in pairs]
    errors = [float(off / (max(norm, least) or 1.0)) for off, norm in zip(differences, norms, strict=True)]
    return float(np.max([0.0, *errors]))


def narrowest(jaxpr: Jaxpr) -> jnp.dtype:
    """The floating type with the fewest digits that a program computes in, in its loops too.

    Example:
      >>> narrowest(jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16) @ x)(jnp.ones((2, 2))).jaxpr)
      dtype(bfloat16)
    """
    types: list[Any] = [getattr(var.aval, "dtype", None) for eqn in jaxpr.eqns for var in eqn.outvars]
    types += [narrowest(inner) for inner in subjaxprs(jaxpr)]
    floating = [dtype for dtype in types if dtype is not None and jnp.issubdtype(dtype, jnp.floating)]
    return max(floating, key=lambda dtype: jnp.finfo(dtype).eps, default=jnp.dtype(jnp.float64))


def allowed(dtype: jnp.dtype) -> float:
    """The largest relative error that passes where this is the narrowest type.

    Example:
      >>> allowed(jnp.dtype(jnp.float32)), allowed(jnp.dtype(jnp.bfloat16))
      (2e-05, 0.03125)
    """
    return TOLERANCE.get(str(dtype), ROUNDINGS * float(jnp.finfo(dtype).eps) / 2)


def plain(layer: Layer, params: Params, x: Any, state: State, ctx: Context) -> tuple[State, Any]:
    """A layer's forward as JAX sees it, to be differentiated by JAX and not by the layer."""
    state, y, _ = layer.forward(params, x, state, ctx)
    return state, y


def reference(
    model: Model, params: Params, batches: list[Batch], *, key: Key[jax.Array, ""], counter: int, carry: State | None
) -> tuple[jax.Array, Params]:
    """Mean loss of a window and its gradient on one device, differentiated by JAX alone.

    Sums are differentiated and divided afterwards, as a pipeline does: terms that layers add to the gradient belong to
    the sum.
    """

    def total(params: Params) -> tuple[jax.Array, jax.Array]:
        state, loss_sum, weight_sum = carry, jnp.zeros(()), jnp.zeros(())
        for i, batch in enumerate(batches):
            options: dict[str, Any] = {"key": key, "counter": counter + i, "carry": state}
            _, aux = loss(model, params, batch, run=plain, **options)
            state = aux.carry if batch.resets is not None else state
            state = jax.lax.stop_gradient(state)
            loss_sum, weight_sum = loss_sum + aux.loss_sum, weight_sum + aux.weight_sum
        return loss_sum, jnp.where(weight_sum == 0, 1, weight_sum)

    def mean(params: Params) -> tuple[jax.Array, Params]:
        (loss_sum, weight), gradients = jax.value_and_grad(total, has_aux=True)(params)
        return loss_sum / weight, jax.tree.map(lambda leaf: leaf / weight.astype(leaf.dtype), gradients)

    return jax.jit(mean)(params)


def layer_errors(model: Model, params: Params, batch: Batch, *, key: Key[jax.Array, ""], counter: int) -> list[float]:
    """Error of each row's own backward, on one batch from the initial state."""
    errors: list[float] = []

    def run(layers: Layer, params: Params, x: Any, state: State, ctx: Context) -> tuple[State, Any]:
        errors.extend(jax.jit(lambda params, x, state, ctx: _rows(model, params, x, state, ctx))(params, x, state, ctx))
        return plain(layers, params, x, state, ctx)

    loss(model, params, batch, run=run, key=key, counter=counter, carry=None)
    return [float(error) for error in errors]


def _rows(model: Model, params: Params, x: Any, states: State, ctx: Context) -> list[jax.Array]:
    """Up through the rows by their plain forward, down by its derivative, each row's own backward beside it."""
    pulls, saved, after = [], [], []
    for i, row in enumerate(model.rows):
        place = child_context(ctx, i)

        def forward(
            params: Params, x: Any, state: State, row: Layer = row, place: Context = place
        ) -> tuple[State, Any]:
            return plain(row, params, x, state, place)

        saved.append(row.forward(params[i], x, states[i], place)[2])
        (state, x), pull = jax.vjp(forward, params[i], x, states[i])
        pulls.append(pull)
        after.append(state)
    errors, dy = [], jnp.ones_like(x)
    for i, row in reversed(list(enumerate(model.rows))):
        wanted = pulls[i]((zero_cotangent(after[i]), dy))
        dx, dbefore, tape = row.backward(params[i], saved[i], dy, zero_gradient(after[i]), child_context(ctx, i))
        dparams = row.weight_gradient(params[i], tape, child_context(ctx, i))
        dy = wanted[1]
        _check_alike(f"{row.name}: its weight_gradient", dparams, wanted[0])
        _check_alike(f"{row.name}: its backward's dstate", dbefore, wanted[2])
        errors.append(_error((dparams, dbefore), (wanted[0], wanted[2])))
        if dx is not None:
            _check_alike(f"{row.name}: its backward's dx", dx, dy)
            errors[-1] = jnp.maximum(errors[-1], _error(dx, dy))
    return errors[::-1]


def _check_alike(what: str, got: Any, wanted: Any) -> None:
    """Raises InputError for a gradient of another shape than what it is the gradient of."""
    shapes, right = ([jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (got, wanted))
    if shapes != right:
        raise InputError(f"{what} has arrays of shapes {shapes}, {right} are wanted: the shapes of what it is of")


def _error(got: Any, wanted: Any) -> jax.Array:
    """`relative_error`, traced; integers have no gradient to compare."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    pairs = [(a.ravel(), b.ravel()) for a, b in pairs if b.dtype != jax.dtypes.float0]
    norms = [jnp.linalg.norm(b) for _, b in pairs]
    least = NOTHING * jnp.linalg.norm(jnp.array([0.0, *norms]))
    worst = jnp.zeros(())
    for (a, b), norm in zip(pairs, norms, strict=True):
        size = jnp.maximum(norm, least)
        worst = jnp.maximum(worst, jnp.linalg.norm(a - b) / jnp.where(size == 0, 1, size))
    return worst


def certify(
    model: Model,
    params: Params,
    batches: list[Batch],
    pipeline: Callable[[], tuple[Any, Params]],
    *,
    stages: list[int],
    key: Key[jax.Array, ""],
    counter: int,
    carry: State | None,
    remat: str,
) -> Certificate:
    """Compares what a pipeline computed with JAX's derivative on one device, the default one.

    Args:
      model: the model.
      params: its parameters, host arrays.
      batches: the window.
      pipeline: () -> loss and gradient by the pipeline. Called last: there, a gradient of a wrong shape is an error
        that names no row.
      stages: stage of each row.
      key, counter, carry: training's key, the number of the first batch, the state carried into it.
      remat: the plan's.
    """
    params = jax.tree.map(jnp.asarray, params)
    options: dict[str, Any] = {"key": key, "counter": counter, "carry": carry}
    forward = jax.make_jaxpr(lambda params: loss(model, params, batches[0], run=plain, **options)[0])(params)
    least = narrowest(forward.jaxpr)
    wanted = reference(model, params, batches, **options)
    own = layer_errors(model if remat == "none" else lean_model(model), params, batches[0], key=key, counter=counter)
    got = pipeline()
    rows = tuple(
        RowErrors(row.name, stages[i], relative_error(got[1][i], wanted[1][i]), own[i])
        for i, row in enumerate(model.rows)
    )
    return Certificate(rows, relative_error(got[0], wanted[0]), allowed(least), str(least))
