"""Layers from a user's own functions, differentiated by JAX.

B recomputes the function from its saved input and state and pulls gradients back through `jax.vjp`; parameter gradients
come with it, so W has nothing left to do and the tapes of chunks are added ("sum"). A vjp object returned from a
compiled program would instead carry a copy of the weights for every unit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from mp_lstm.errors import InputError
from mp_lstm.layers.arguments import checked_sizes
from mp_lstm.layers.base import Context, Layer, Params, State, infer_by_forward, mask_steps, zero_gradient
from mp_lstm.layers.checks import check_features, described
from mp_lstm.layers.results import check_kept, pair
from mp_lstm.planning.costs import Cost


def from_function(
    init: Callable[[Key[Array, ""]], Params],
    f: Callable[..., tuple[State, Any]],
    *,
    init_state: Callable[[int], State] = lambda batch_size: (),
    with_context: bool = False,
    chunkable: bool = True,
    cost: Callable[[int, int], Cost] | None = None,
    name: str = "function",
    kind: str = "function",
) -> Layer:
    """Makes a layer of any differentiable function of a chunk.

    Args:
      init: key -> params.
      f: (params, x, state) -> (state, y), x and y pytrees of [T, B, ...]; padded steps of y are zeroed for it. Run on
        consecutive chunks, state handed on, it must give what it gives on all of them at once.
      init_state: batch size -> state.
      with_context: f takes a fourth argument, the `Context`, and sees to padding itself; so a head finds its targets.
        A head gives the summed loss, and its predictions where there are no targets (None), as in `Pipeline.infer`.
      chunkable: False where f needs all of time at once.
      cost: (batch size, time steps) -> Cost; by default from the number of parameters.
      name, kind: for tables and messages.

    Returns:
      The layer.

    Raises:
      InputError: f takes other arguments. When first run: f gives no pair, or a state of another structure, shape or
        type than it was given; f carries a state, the batch is padded and f does not take the context.

    Example:
      >>> import jax, jax.numpy as jnp, mp_lstm
      >>> from mp_lstm.layers.base import Context
      >>> scale = mp_lstm.from_function(lambda key: jnp.ones(()), lambda p, x, state: (state, p * x))
      >>> scale.infer(jnp.float32(3), jnp.ones((2, 1, 1)), (), Context())[1].ravel().tolist()
      [3.0, 3.0]
    """
    _check_takes(name, f, 4 if with_context else 3, "(params, x, state, ctx)" if with_context else "(params, x, state)")

    def checked(result: Any, before: State) -> tuple[State, Any]:
        state, y = pair(f"{name}: its function", result, "(state, y)")
        check_kept(f"{name}: its function", state, before)
        return state, y

    def run(params: Params, x: Any, state: State, ctx: Context) -> tuple[State, Any]:
        if with_context:
            return checked(f(params, x, state, ctx), state)
        if ctx.mask is not None and jax.tree.leaves(state):
            raise InputError(
                f"{name}: its function carries a state and cannot see which steps are padding: make it with "
                "recurrent(cell) or with_context=True, or pass batches with lengths=None"
            )
        state, y = checked(f(params, x, state), state)
        return state, jax.tree.map(lambda leaf: mask_steps(ctx.mask, leaf), y)

    def forward(params: Params, x: Any, state: State, ctx: Context) -> tuple[State, Any, Any]:
        new_state, y = run(params, x, state, ctx)
        return new_state, y, (x, state)

    def backward(params: Params, saved: Any, dy: Any, dstate: State, ctx: Context) -> tuple[Any, State, Params]:
        x, state = saved
        _, pull = jax.vjp(lambda params, x, state: run(params, x, state, ctx), params, x, state)
        dparams, dx, dbefore = pull((jax.tree.map(_cotangent, state, dstate), dy))
        dstate = jax.tree.map(_gradient, zero_gradient(state), dbefore)
        floating = all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(x))
        return (dx if floating else None), dstate, dparams

    return Layer(
        name=name,
        kind=kind,
        init=init,
        init_state=init_state,
        forward=forward,
        backward=backward,
        weight_gradient=lambda params, tape, ctx: tape,
        infer=infer_by_forward(forward),
        cost=cost or (lambda batch_size, time: cost_by_parameters(init, batch_size, time)),
        join="sum",
        chunkable=chunkable,
    )


def recurrent(
    cell: Any,
    inputs: SupportsIndex | None = None,
    *,
    init: Callable[[Key[Array, ""]], Params] | None = None,
    init_state: Callable[[int], State] | None = None,
    unroll: int = 1,
    cost: Callable[[int, int], Cost] | None = None,
    name: str = "recurrent",
) -> Layer:
    """Makes a layer of any cell (carry, x) -> (carry, y), scanned over time; padded steps keep the carry.

    Args:
      cell: a flax linen cell, such as `flax.linen.GRUCell(features=5)`; or a function (params, carry, x [B, D]) ->
        (carry, y [B, H]), with `init` and `init_state`.
      inputs: size D of the input, for a flax cell.
      init: key -> params, for a function.
      init_state: batch size -> carry, for a function.
      unroll: steps of the scan written out at once.
      cost: (batch size, time steps) -> Cost; by default from the number of parameters.
      name: for tables and messages.

    Returns:
      The layer: x [T, B, D] -> y [T, B, H], state the carry.

    Raises:
      InputError: what a flax cell or a function needs is missing, or a size is no positive whole number. When first
        run: an input of another size; the cell gives no pair, or a carry of another structure, shape or type than it
        was given.

    Example:
      >>> import flax.linen, jax, jax.numpy as jnp, mp_lstm
      >>> from mp_lstm.layers.base import Context
      >>> layer = mp_lstm.recurrent(flax.linen.GRUCell(features=5), inputs=3)
      >>> layer.infer(layer.init(jax.random.key(0)), jnp.ones((4, 2, 3)), layer.init_state(2), Context())[1].shape
      (4, 2, 5)
    """
    step = cell
    if isinstance(cell, type):
        raise InputError(f"{name}: the cell is the class {cell.__name__}: pass one of it, {cell.__name__}(...)")
    size = None
    if hasattr(cell, "initialize_carry"):
        if inputs is None:
            raise InputError(f"{name}: the size of the cell's input is missing: pass recurrent(cell, inputs=D)")
        (size,) = checked_sizes(name, inputs=inputs)
        init, init_state, step = _of_flax(cell, size)
    (unroll,) = checked_sizes(name, unroll=unroll)
    if init is None or init_state is None:
        raise InputError(f"{name}: a cell that is a function needs init=... and init_state=...")

    def run(params: Params, x: Any, state: State, ctx: Context) -> tuple[State, Any]:
        if size is not None:
            check_features(name, x, size)
        if ctx.mask is not None:
            _check_rows(name, state, ctx.mask.shape[1])

        def advance(carry: State, inputs: tuple[Any, Array | None]) -> tuple[State, Any]:
            x_t, real = inputs
            after, y = pair(f"{name}: its cell", step(params, carry, x_t), "(carry, y)")
            check_kept(f"{name}: its cell", after, carry)
            if real is None:
                return after, y
            return _where(real, after, carry), _where(real, y, jax.tree.map(jnp.zeros_like, y))

        return jax.lax.scan(advance, state, (x, ctx.mask), unroll=unroll)

    return from_function(
        init, run, init_state=init_state, with_context=True, cost=cost, name=name, kind=type(cell).__name__
    )


def _cotangent(leaf: Any, gradient: Any) -> Any:
    """The gradient of a state's array as JAX takes it: for what has none, such as a counter, zeros of its own kind."""
    return gradient if jnp.issubdtype(leaf.dtype, jnp.inexact) else np.zeros(np.shape(leaf), jax.dtypes.float0)


def _gradient(zero: Array, cotangent: Any) -> Any:
    """JAX's gradient of a state's array as layers hand it on: zeros of JAX's own kind lie on no device."""
    return zero if cotangent.dtype == jax.dtypes.float0 else cotangent


def _check_takes(name: str, f: Callable[..., Any], count: int, wanted: str) -> None:
    """Raises InputError for a function that cannot be called with so many arguments, as far as it tells."""
    try:
        inspect.signature(f).bind(*[None] * count)
    except ValueError:  # it does not tell
        return
    except TypeError as error:
        raise InputError(f"{name}: its function is called with {wanted} ({error}): let it take these") from error


def _of_flax(cell: Any, inputs: int) -> tuple[Any, Any, Any]:
    """init, init_state and step of a flax linen cell."""

    def init_state(batch_size: int) -> State:
        return cell.initialize_carry(jax.random.key(0), (batch_size, inputs))

    def init(key: Key[Array, ""]) -> Params:
        return cell.init(key, init_state(1), jnp.zeros((1, inputs)))

    return init, init_state, cell.apply


def _check_rows(name: str, carry: State, rows: int) -> None:
    """Raises InputError for a carry that not each row of a batch has its own of."""
    for leaf in jax.tree.leaves(carry):
        if jnp.shape(leaf)[:1] != (rows,):
            raise InputError(
                f"{name}: its carry has {described(leaf)}, wanted [{rows}, ...]: let init_state give an entry for each "
                "row, since padded steps keep a row's own"
            )


def _where(real: Array, chosen: Any, other: Any) -> Any:
    """Rows of `chosen` where `real` [B], of `other` elsewhere, in trees of [B, ...]."""
    return jax.tree.map(lambda a, b: jnp.where(real.reshape((-1,) + (1,) * (a.ndim - 1)), a, b), chosen, other)


def cost_by_parameters(init: Callable[[Any], Params], batch_size: int, time: int) -> Cost:
    """Cost of a layer known only by its parameters: each is used once a step, and B does F's work again."""
    leaves = jax.tree.leaves(jax.eval_shape(init, jax.random.key(0)))
    parameters = sum(leaf.size for leaf in leaves)
    flops = 2.0 * parameters * batch_size * time
    return Cost(
        forward=flops,
        backward=3 * flops,
        weight=0,
        parameters=parameters,
        parameter_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
        saved_bytes=0,
        transfer_bytes=0,
    )
