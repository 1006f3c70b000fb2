"""The LSTM by hand, in three phases.

The input products of all steps are one large product outside the scan, in both directions; inside the scan remains the
recurrent product alone. The backward scan only carries gradients down and back in time: weight gradients are products
over all rows at once, after the scan and off the critical path (W).

    F   z = x @ K                         one product over T*B rows
        scan: z_t + h @ R + b -> i f g o c h  saved as separate arrays (slicing a joined one costs 15% of the scan)
    B   scan in reverse: dz_t, dh = dz_t @ R^T, dc      as (R dz_t^T)^T: R is read as it lies
        dx = dz @ K^T                     one product
    W   dK = x^T dz, dR = h_prev^T dz, db = sum dz, begun in B      products over the joined chunks

A masked step keeps the state, outputs zero and passes gradients through; real steps come before padded ones in a row.

References:
  Hochreiter and Schmidhuber 1997; with the forget gate of Gers et al. 2000. Gate order i, f, g, o.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Key

from mp_lstm.errors import InputError
from mp_lstm.layers import cudnn
from mp_lstm.layers.arguments import check_one_type, check_types, checked_sizes, checked_unroll
from mp_lstm.layers.base import Context, Layer, apply, flat_rows, infer_by_forward, steps_mask
from mp_lstm.layers.checks import check_features, described
from mp_lstm.layers.initialisers import default_bias_init, default_kernel_init, default_recurrent_init
from mp_lstm.layers.products import (
    prepared_bytes,
    product,
    product_from_left,
    product_over_rows,
    product_transposed,
)
from mp_lstm.layers.results import difference
from mp_lstm.planning.costs import Cost


class LSTMParams(NamedTuple):
    """Parameters of one LSTM layer; gate columns in the order i, f, g, o."""

    kernel: Float[Array, "D 4H"]
    recurrent_kernel: Float[Array, "H 4H"]
    bias: Float[Array, " 4H"]


class LSTMState(NamedTuple):
    """State carried over time: hidden h and cell c."""

    h: Float[Array, "B H"]
    c: Float[Array, "B H"]


class Gates(NamedTuple):
    """Activations of the four gates, or their gradients."""

    i: Array
    f: Array
    g: Array
    o: Array


class Saved(NamedTuple):
    """What F keeps for B: inputs, gates, cells and outputs of every step, and the state before the first."""

    x: Float[Array, "T B D"]
    gates: Gates
    c: Float[Array, "T B H"]
    y: Float[Array, "T B H"]
    before: LSTMState


class Tape(NamedTuple):
    """What B keeps for W. `h_before` has one row of time a chunk; y shifted behind it is the previous hidden state.

    `dz_sum` has one a chunk too: the sum over its steps. Added up in B's scan, where dz is at hand, it saves W a pass
    over all of dz, in which XLA takes as long for the bias as for a product.
    """

    x: Float[Array, "T B D"]
    h_before: Float[Array, "C B H"]
    y: Float[Array, "T B H"]
    dz: Float[Array, "T B 4H"]
    dz_sum: Float[Array, "C B 4H"]


def lstm_init(
    key: Key[Array, ""],
    inputs: SupportsIndex,
    hidden: SupportsIndex,
    *,
    kernel_init: Any = default_kernel_init,
    recurrent_init: Any = default_recurrent_init,
    bias_init: Any = default_bias_init,
    dtype: DTypeLike = jnp.float32,
) -> LSTMParams:
    """Draws the parameters of one LSTM layer.

    Args:
      key: random key.
      inputs: size D of the input.
      hidden: size H of the hidden state.
      kernel_init, recurrent_init, bias_init: initialisers `(key, shape, dtype) -> array`, as in `jax.nn.initializers`.
      dtype: type of the parameters.

    Returns:
      LSTMParams(kernel [D, 4H], recurrent_kernel [H, 4H], bias [4H]).

    Raises:
      InputError: a size is no positive whole number, or the type no floating one.

    Example:
      >>> import jax, mp_lstm
      >>> mp_lstm.lstm_init(jax.random.key(0), 3, 5).kernel.shape
      (3, 20)
    """
    inputs, hidden = checked_sizes("lstm_init", inputs=inputs, hidden=hidden)
    check_types("lstm_init", dtype=dtype)
    kernel_key, recurrent_key, bias_key = jax.random.split(key, 3)
    return LSTMParams(
        kernel=kernel_init(kernel_key, (inputs, 4 * hidden), dtype),
        recurrent_kernel=recurrent_init(recurrent_key, (hidden, 4 * hidden), dtype),
        bias=bias_init(bias_key, (4 * hidden,), dtype),
    )


def forward(
    params: LSTMParams,
    x: Float[Array, "T B D"],
    state: LSTMState,
    mask: Bool[Array, "T B"] | None,
    *,
    unroll: int = 1,
    products: DTypeLike | None = None,
) -> tuple[LSTMState, Float[Array, "T B H"], Saved]:
    """F: runs the layer over a chunk and saves what B needs."""
    time, rows, _ = x.shape
    z = product(flat_rows(x), params.kernel, products).reshape((time, rows, params.kernel.shape[1]))
    recurrent = params.recurrent_kernel if products is None else params.recurrent_kernel.astype(products)

    def step(carry: LSTMState, inputs: tuple[Array, Array | None]) -> tuple[LSTMState, tuple[Gates, Array, Array]]:
        z_t, real = inputs
        z_t = z_t + product(carry.h, recurrent, products) + params.bias[None, :]
        i, f, g, o = jnp.split(z_t, 4, axis=-1)
        gates = Gates(jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o))
        c = gates.f * carry.c + gates.i * gates.g
        h = gates.o * jnp.tanh(c)
        if real is None:
            return LSTMState(h, c), (gates, c, h)
        real = real[:, None]
        kept = LSTMState(jnp.where(real, h, carry.h), jnp.where(real, c, carry.c))
        return kept, (gates, c, jnp.where(real, h, jnp.zeros_like(h)))

    after, (gates, c, y) = jax.lax.scan(step, state, (z, mask), unroll=unroll)
    return after, y, Saved(x, gates, c, y, state)


def backward(
    params: LSTMParams,
    saved: Saved,
    dy: Float[Array, "T B H"],
    dstate: LSTMState,
    mask: Bool[Array, "T B"] | None,
    *,
    unroll: int = 1,
    products: DTypeLike | None = None,
) -> tuple[Float[Array, "T B D"], LSTMState, Tape]:
    """B: gradients of input and state, and the gate gradients for W."""
    c_before = jnp.concatenate([saved.before.c[None], saved.c[:-1]])
    recurrent = params.recurrent_kernel if products is None else params.recurrent_kernel.astype(products)

    def step(carry: tuple[LSTMState, Array], inputs: Any) -> tuple[tuple[LSTMState, Array], Array]:
        after, dz_sum = carry
        dy_t, (i, f, g, o), c, c_prev, real = inputs
        tanh_c = jnp.tanh(c)
        dh = after.h + dy_t
        dc = after.c + dh * o * (1 - tanh_c * tanh_c)
        dz = jnp.concatenate(
            [dc * g * i * (1 - i), dc * c_prev * f * (1 - f), dc * i * (1 - g * g), dh * tanh_c * o * (1 - o)], axis=-1
        )
        if real is None:
            return (LSTMState(product_from_left(dz, recurrent, products, dz.dtype), dc * f), dz_sum + dz), dz
        real = real[:, None]
        dz = jnp.where(real, dz, jnp.zeros_like(dz))
        dh = jnp.where(real, product_from_left(dz, recurrent, products, dz.dtype), after.h)
        return (LSTMState(dh, jnp.where(real, dc * f, after.c)), dz_sum + dz), dz

    inputs = (dy, saved.gates, saved.c, c_before, mask)
    nothing = jnp.zeros((dy.shape[1], recurrent.shape[1]), dy.dtype)
    (dstate, dz_sum), dz = jax.lax.scan(step, (dstate, nothing), inputs, reverse=True, unroll=unroll)
    dx = product_transposed(flat_rows(dz), params.kernel, products).reshape(saved.x.shape)
    return dx, dstate, Tape(saved.x, saved.before.h[None], saved.y, dz, dz_sum[None])


def weight_gradient(tape: Tape, *, products: DTypeLike | None = None) -> LSTMParams:
    """W: the weight gradients of a micro-batch, its chunks joined, as products over all T*B rows.

    y serves as the hidden state before each next step: where y is zeroed (padding), dz is zero too.
    """
    dz = flat_rows(tape.dz)
    h_before = jnp.concatenate([tape.h_before[:1], tape.y[:-1]])
    return LSTMParams(
        kernel=product_over_rows(flat_rows(tape.x), dz, products),
        recurrent_kernel=product_over_rows(flat_rows(h_before), dz, products),
        bias=tape.dz_sum.sum(axis=(0, 1)),
    )


def lstm_layer(
    inputs: SupportsIndex,
    hidden: SupportsIndex,
    *,
    name: str = "lstm",
    kernel_init: Any = default_kernel_init,
    recurrent_init: Any = default_recurrent_init,
    bias_init: Any = default_bias_init,
    unroll: int = 1,
    products: DTypeLike | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
) -> Layer:
    """An LSTM layer with hand-written phases.

    Args:
      inputs: size D of the input.
      hidden: size H of the hidden state and the output.
      name: for tables and messages.
      kernel_init, recurrent_init, bias_init: as `lstm_init` takes them.
      unroll: steps of the scan written out at once, 1 to 16.
      products: type to which the operands of matrix products are rounded, such as jnp.bfloat16; None: as they are.
      dtype: type of parameters and state.
      implementation: "xla": the phases above; "cudnn": NVIDIA's kernel, float32 alone; "auto": cuDNN's where the
        parameters are pinned to an NVIDIA GPU and all is float32, XLA's elsewhere.

    Returns:
      The layer: x [T, B, D] -> y [T, B, H], state LSTMState(h, c).

    Raises:
      InputError: a size or the unroll is out of range; a type is no floating one; the implementation is unknown, or
        "cudnn" and not float32. When first run: "cudnn" and no NVIDIA GPU.

    Example:
      >>> import mp_lstm
      >>> mp_lstm.lstm_layer(3, 5).cost(batch_size=2, time=4).parameters
      180
    """
    inputs, hidden = checked_sizes(name, inputs=inputs, hidden=hidden)
    check_types(name, products=products, dtype=dtype)
    options = {"unroll": checked_unroll(unroll), "products": products}

    def init(key: Key[Array, ""]) -> LSTMParams:
        initialisers = {"kernel_init": kernel_init, "recurrent_init": recurrent_init, "bias_init": bias_init}
        return lstm_init(key, inputs, hidden, **initialisers, dtype=dtype)

    def init_state(batch_size: int) -> LSTMState:
        return LSTMState(jnp.zeros((batch_size, hidden), dtype), jnp.zeros((batch_size, hidden), dtype))

    def run_forward(params: LSTMParams, x: Array, state: LSTMState, ctx: Context) -> tuple[LSTMState, Array, Saved]:
        check_features(name, x, inputs)
        check_one_type(name, x, params.kernel, state.h)
        return forward(params, x, state, ctx.mask, **options)

    def run_backward(
        params: LSTMParams, saved: Saved, dy: Array, dstate: LSTMState, ctx: Context
    ) -> tuple[Array, LSTMState, Tape]:
        return backward(params, saved, dy, dstate, ctx.mask, **options)

    def run_weight_gradient(params: LSTMParams, tape: Tape, ctx: Context) -> LSTMParams:
        return weight_gradient(tape, products=products)

    def prepare(params: LSTMParams) -> LSTMParams:
        kernel, recurrent = (weight.astype(products) for weight in (params.kernel, params.recurrent_kernel))
        return params._replace(kernel=kernel, recurrent_kernel=recurrent)

    def cost(batch_size: int, time: int) -> Cost:
        found = lstm_cost(inputs, hidden, batch_size, time, jnp.dtype(dtype).itemsize)
        return found._replace(prepared_bytes=prepared_bytes((inputs + hidden) * 4 * hidden, products))

    layer = Layer(
        name=name,
        kind="lstm",
        init=init,
        init_state=init_state,
        forward=run_forward,
        backward=run_backward,
        weight_gradient=run_weight_gradient,
        infer=infer_by_forward(run_forward),
        cost=cost,
        prepare=None if products is None else prepare,
    )
    return cudnn.implemented(layer, implementation, dtype=dtype, products=products)


def lstm_cost(inputs: int, hidden: int, batch_size: int, time: int, itemsize: int) -> Cost:
    """Cost of an LSTM layer: 2 B (D+H) 4H operations a step and phase, plus the elementwise ones."""
    rows, gates = batch_size * time, 4 * hidden
    products = 2.0 * rows * (inputs + hidden) * gates
    parameters = (inputs + hidden + 1) * gates
    return Cost(
        forward=products + 30.0 * rows * hidden,
        backward=products + 40.0 * rows * hidden,
        weight=products + rows * gates,
        parameters=parameters,
        parameter_bytes=parameters * itemsize,
        saved_bytes=rows * (gates + hidden) * itemsize,  # gates and cells
        transfer_bytes=rows * hidden * itemsize,
        kept_bytes=rows * hidden * itemsize,  # y
        tape_bytes=rows * gates * itemsize,  # dz
        input_bytes=rows * inputs * itemsize,
        step_bytes=hidden * gates * itemsize,
        scratch_bytes=rows * gates * itemsize,  # z, made ahead of the scan
    )


def lstm(
    params: LSTMParams,
    x: Float[Array, "T B D"],
    state: LSTMState | None = None,
    *,
    lengths: Array | None = None,
    unroll: int = 1,
    products: DTypeLike | None = None,
    implementation: str = "auto",
) -> tuple[LSTMState, Float[Array, "T B H"]]:
    """Runs one LSTM layer; its gradient is the hand-written backward.

    Args:
      params: LSTMParams(kernel [D, 4H], recurrent_kernel [H, 4H], bias [4H]).
      x: [T, B, D] inputs, time-major.
      state: LSTMState(h [B, H], c [B, H]) before the first step; zeros by default.
      lengths: [B] real steps of each row, 0 to T. A finished row keeps its state and outputs zero.
      unroll: steps of the scan written out at once, 1 to 16.
      products: type to which the operands of matrix products are rounded; None: as they are.
      implementation: "xla"; "cudnn": NVIDIA's kernel, float32 alone, not under `jax.vmap`; "auto": cuDNN's on NVIDIA
        GPUs in float32, XLA's elsewhere.

    Returns:
      The state after each row's last real step, and outputs y [T, B, H].

    Raises:
      InputError: x or the state does not fit the parameters, or these each other; the unroll is out of range, or the
        lengths are no whole numbers [B];
        products is no floating type; the implementation is unknown, or "cudnn" and there is no NVIDIA GPU or not all
        is float32.

    References:
      Hochreiter and Schmidhuber 1997, https://doi.org/10.1162/neco.1997.9.8.1735

    Example:
      >>> import jax, jax.numpy as jnp, mp_lstm
      >>> params = mp_lstm.lstm_init(jax.random.key(0), inputs=3, hidden=5)
      >>> state, y = mp_lstm.lstm(params, jnp.ones((4, 2, 3)), lengths=jnp.array([4, 1]))
      >>> y.shape, bool((y[1:, 1] == 0).all())
      ((4, 2, 5), True)
    """
    check_features("lstm", x, params.kernel.shape[0])
    time, rows, inputs = x.shape
    lengths = lengths if lengths is None else jnp.asarray(lengths)
    if lengths is not None and (lengths.shape != (rows,) or not jnp.issubdtype(lengths.dtype, jnp.integer)):
        raise InputError(f"lstm: lengths are {described(lengths)}, whole numbers of steps [{rows}] are wanted")
    hidden, dtype = params.recurrent_kernel.shape[0], params.kernel.dtype
    shapes, wanted = [jnp.shape(leaf) for leaf in params], [(inputs, 4 * hidden), (hidden, 4 * hidden), (4 * hidden,)]
    if shapes != wanted:
        raise InputError(f"lstm: the parameters have shapes {shapes}, {wanted} are wanted")
    options = {"unroll": unroll, "products": products, "dtype": dtype, "implementation": implementation}
    layer = lstm_layer(inputs, hidden, **options)
    initial = layer.init_state(rows)
    state = initial if state is None else state
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise InputError(f"lstm: the state is {described(state)}, a pair (h, c) is wanted")
    state = LSTMState(*state)
    if wrong := difference(state, initial):
        raise InputError(f"lstm: the state {wrong}: pass h and c for each of {rows} rows")
    mask = steps_mask(lengths, 0, time)
    if implementation == "auto" and cudnn.undecided(params, dtype=dtype, products=products):
        return _lstm_by_platform(params, x, state, mask, unroll=unroll)
    return apply(layer, params, x, state, Context(mask=mask))


@functools.partial(jax.jit, static_argnames="unroll")
def _lstm_by_platform(
    params: LSTMParams, x: Array, state: LSTMState, mask: Array | None, *, unroll: int
) -> tuple[LSTMState, Array]:
    """The LSTM by cuDNN where the program is lowered for an NVIDIA GPU. Compiled: run op by op, it would not be."""

    def run(implementation: str) -> Callable[..., tuple[LSTMState, Array]]:
        layer = lstm_layer(x.shape[-1], state.h.shape[-1], unroll=unroll, implementation=implementation)
        return lambda params, x, state, mask: apply(layer, params, x, state, Context(mask=mask))

    return jax.lax.platform_dependent(params, x, state, mask, cuda=run("cudnn"), default=run("xla"))
