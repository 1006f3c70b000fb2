"""The LSTM by cuDNN's kernel, on NVIDIA GPUs in float32, through `jax.experimental.rnn`.

The kernel itself has not run yet: conversion, padding and choice are tested on CPUs against the reference that JAX
keeps beside the kernel, and the tests marked `gpu` wait for a GPU.

    ours      x [T, B, D]; kernel [D, 4H], recurrent kernel [H, 4H], one bias; gates i, f, g, o; a mask of real steps
    cuDNN's   x [B, T, D]; W_ih [4H, D], W_hh [4H, H], b_ih, b_hh in one vector; gates i, f, g, o; lengths of at least 1

A row without a real step is run for one step, of which nothing is kept and into which no gradient is sent. B of the
kernel ends with the weight gradients, so W is empty and the tapes of chunks are added ("sum"). The kernel rounds
products as `jax.default_matmul_precision` says, as XLA's do. Each call copies the lengths to the host, so its host
thread waits for what the device was given before; and it has no batching rule, so `jax.vmap` needs "xla".

"auto" has to know the device, and a layer knows none. A program pinned to devices is traced with arrays whose types
name the kind of device, so each phase looks there. `jax.lax.platform_dependent` decides later, when a program is
lowered, but both of its branches must return the same shapes, and what the two implementations save and tape differs.
A choice made with the layer would start JAX before the user has set it up, and depend on a default device. Where arrays
are pinned to no mesh, a layer is XLA's; `mp_lstm.lstm`, which returns the same from both, leaves the choice to the
lowering.

References:
  Appleyard, Kocisky and Blunsom 2016, https://arxiv.org/abs/1604.01946
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import rnn
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

from mp_lstm.errors import InputError
from mp_lstm.layers.base import Context, Layer, Params, State, infer_by_forward, mask_steps, zero_cotangent
from mp_lstm.layers.checks import described
from mp_lstm.planning.costs import Cost

IMPLEMENTATIONS = ("auto", "xla", "cudnn")


class Saved(NamedTuple):
    """What F keeps for B: inputs and outputs, the state before the first step, and the kernel's own reserve."""

    x: Float[Array, "T B D"]
    before: State
    y: Float[Array, "T B H"]
    reserve: Float[Array, " N"]


# Which implementation


def implemented(xla: Layer, implementation: str, *, dtype: DTypeLike, products: DTypeLike | None) -> Layer:
    """The LSTM layer in the implementation asked for.

    Args:
      xla: the layer by XLA; its params are `LSTMParams`, its state is `LSTMState`.
      implementation: "auto", "xla" or "cudnn".
      dtype, products: as `lstm_layer` takes them; the kernel has float32 alone.

    Raises:
      InputError: the implementation is none of these, or is "cudnn" and the types are not float32.
    """
    if implementation not in IMPLEMENTATIONS:
        raise InputError(
            f"{xla.name}: implementation is {implementation!r}, one of {', '.join(IMPLEMENTATIONS)} is wanted"
        )
    if implementation == "cudnn" and not all_float32(dtype, products):
        kinds = f"{jnp.dtype(dtype)}" + ("" if products is None else f" with products in {jnp.dtype(products)}")
        raise InputError(f"{xla.name}: implementation is 'cudnn' and the type is {kinds}: pass float32, or 'xla'")
    if implementation == "xla" or not all_float32(dtype, products):
        return xla
    return by_cudnn(xla) if implementation == "cudnn" else automatic(xla)


def all_float32(dtype: DTypeLike, products: DTypeLike | None) -> bool:
    """Whether parameters and products are float32, the only type the kernel has here."""
    return jnp.dtype(dtype) == jnp.float32 and (products is None or jnp.dtype(products) == jnp.float32)


def platform(params: Params) -> str | None:
    """The kind of device that arrays are pinned to, such as "cpu" or "gpu"; None where their types do not tell."""
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(params)]
    devices = [mesh.abstract_device for mesh in meshes if not mesh.empty and mesh.abstract_device is not None]
    return devices[0].platform if devices else None


def undecided(params: Params, *, dtype: DTypeLike, products: DTypeLike | None) -> bool:
    """Whether cuDNN could run these parameters, and only the lowering of a program can tell."""
    return all_float32(dtype, products) and platform(params) is None and bool(nvidia_gpus())


def nvidia_gpus() -> list[Any]:
    """This process's NVIDIA GPUs. The abstract device above does not tell them from others."""
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def automatic(xla: Layer) -> Layer:
    """The layer by cuDNN where its parameters are pinned to an NVIDIA GPU, by XLA elsewhere.

    A tape is a pair, (XLA's, None) or (None, cuDNN's): the first is joined over time, the second is added up.
    """
    cudnn = by_cudnn(xla)

    def chosen(params: Params) -> Layer:
        return cudnn if platform(params) == "gpu" and nvidia_gpus() else xla

    def forward_chosen(params: Params, x: Array, state: State, ctx: Context) -> tuple[State, Array, Any]:
        return chosen(params).forward(params, x, state, ctx)

    def backward_chosen(params: Params, saved: Any, dy: Array, dstate: State, ctx: Context) -> tuple[Array, State, Any]:
        layer = chosen(params)
        dx, dstate, tape = layer.backward(params, saved, dy, dstate, ctx)
        return dx, dstate, (tape, None) if layer is xla else (None, tape)

    def weight_gradient(params: Params, tape: Any, ctx: Context) -> Params:
        timed, summed = tape
        return xla.weight_gradient(params, timed, ctx) if summed is None else summed

    return xla._replace(
        forward=forward_chosen,
        backward=backward_chosen,
        weight_gradient=weight_gradient,
        infer=infer_by_forward(forward_chosen),
        join=("time", "sum"),
    )


def by_cudnn(xla: Layer) -> Layer:
    """The same LSTM layer, run by the kernel."""
    name = xla.name

    def run_forward(params: Params, x: Array, state: State, ctx: Context) -> tuple[State, Array, Saved]:
        check_device(name, params)
        check_type(name, x)
        return forward(params, x, state, ctx.mask)

    def run_backward(params: Params, saved: Saved, dy: Array, dstate: State, ctx: Context) -> tuple[Array, State, Any]:
        return backward(params, saved, dy, dstate, ctx.mask)

    return xla._replace(
        forward=run_forward,
        backward=run_backward,
        weight_gradient=lambda params, tape, ctx: tape,
        infer=infer_by_forward(run_forward),
        cost=lambda batch_size, time: cudnn_cost(xla.cost(batch_size, time)),
        join="sum",
    )


def cudnn_cost(xla: Cost) -> Cost:
    """The layer's cost where B does W's work and reads y last; the reserve is taken to hold gates and cells."""
    return xla._replace(
        backward=xla.backward + xla.weight,
        weight=0,
        saved_bytes=xla.saved_bytes + xla.kept_bytes,
        kept_bytes=0,
        tape_bytes=0,
    )


def check_device(name: str, params: Params) -> None:
    """Raises InputError unless there is an NVIDIA GPU, and the parameters are pinned to no other kind of device."""
    pinned = platform(params)
    if pinned in (None, "gpu") and nvidia_gpus():
        return
    where = f"its device is of kind {pinned!r}, an NVIDIA GPU is wanted" if pinned else "JAX has no NVIDIA GPU"
    raise InputError(f"{name}: implementation is 'cudnn' and {where}: pass 'auto' or 'xla'")


def check_type(name: str, x: Array) -> None:
    """Raises InputError for inputs that are not float32."""
    if x.dtype != jnp.float32:
        raise InputError(f"{name}: implementation is 'cudnn' and x is {described(x)}: pass float32, or 'xla'")


# The phases


@jax.custom_vjp
def run_kernel(
    params: Params, x: Float[Array, "T B D"], state: State, mask: Bool[Array, "T B"] | None
) -> tuple[State, Float[Array, "T B H"], Float[Array, " N"]]:
    """The state after a chunk, its outputs, and the reserve; differentiable, so that `Pipeline.verify` can."""
    arguments = (_swapped(x), state.h[None], state.c[None], packed(params), kernel_lengths(mask, x))
    (y, h, c), (*_, reserve) = rnn.lstm_fwd(*arguments, **_options(params))
    after = _where_real(mask, state._replace(h=h[0], c=c[0]), state)
    return after, mask_steps(mask, _swapped(y)), reserve


def _kernel_forward(params: Params, x: Array, state: State, mask: Array | None) -> tuple[Any, Any]:
    after, y, reserve = run_kernel(params, x, state, mask)
    return (after, y, reserve), (params, Saved(x, state, y, reserve), mask)


def _kernel_backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
    params, saved, mask = kept
    dstate, dy, _ = cotangents
    dx, dbefore, dparams = backward(params, saved, dy, dstate, mask)
    return dparams, dx, dbefore, zero_cotangent(mask)


run_kernel.defvjp(_kernel_forward, _kernel_backward)


def forward(
    params: Params, x: Float[Array, "T B D"], state: State, mask: Bool[Array, "T B"] | None
) -> tuple[State, Float[Array, "T B H"], Saved]:
    """F: runs the kernel over a chunk and saves what it needs for B."""
    after, y, reserve = run_kernel(params, x, state, mask)
    return after, y, Saved(x, state, y, reserve)


def backward(
    params: Params, saved: Saved, dy: Float[Array, "T B H"], dstate: State, mask: Bool[Array, "T B"] | None
) -> tuple[Float[Array, "T B D"], State, Params]:
    """B and W: gradients of input, state and parameters."""
    x, before, y, reserve = saved
    residuals = (_swapped(x), before.h[None], before.c[None], packed(params), kernel_lengths(mask, x), _swapped(y))
    entering = _where_real(mask, dstate, jax.tree.map(jnp.zeros_like, dstate))
    gradients = (_swapped(mask_steps(mask, dy)), entering.h[None], entering.c[None])
    dx, dh, dc, dweights, _ = rnn.lstm_bwd(**_options(params), residuals=(*residuals, reserve), gradients=gradients)
    dbefore = _where_real(mask, dstate._replace(h=dh[0], c=dc[0]), dstate)
    return mask_steps(mask, _swapped(dx)), dbefore, unpacked(params, dweights)


def packed(params: Params) -> Float[Array, " N"]:
    """The parameters as cuDNN's vector: W_ih, W_hh, b_ih, b_hh. Our one bias is its first."""
    kernel, recurrent_kernel, bias = params
    return jnp.concatenate([kernel.T.ravel(), recurrent_kernel.T.ravel(), bias, jnp.zeros_like(bias)])


def unpacked(params: Params, weights: Float[Array, " N"]) -> Params:
    """What lies in cuDNN's vector, laid out as the parameters; its second bias is left out."""
    inputs, gates = params.kernel.shape
    w_ih, w_hh, b_ih, _ = rnn.unpack_lstm_weights(weights, inputs, gates // 4, num_layers=1, bidirectional=False)
    return params._replace(kernel=w_ih[0].T, recurrent_kernel=w_hh[0].T, bias=b_ih[0])


def kernel_lengths(mask: Bool[Array, "T B"] | None, x: Float[Array, "T B D"]) -> Int32[Array, " B"]:
    """Steps of each row that the kernel is to run: the real ones, but at least one."""
    time, rows, _ = x.shape
    if mask is None:
        return jnp.full((rows,), time, jnp.int32)
    return jnp.maximum(mask.sum(axis=0, dtype=jnp.int32), 1)


def _options(params: Params) -> dict[str, Any]:
    """The kernel's static arguments."""
    inputs, gates = params.kernel.shape
    sizes = {"input_size": inputs, "hidden_size": gates // 4, "num_layers": 1}
    return sizes | {"dropout": 0.0, "bidirectional": False, "precision": None}


def _swapped(x: Array) -> Array:
    """Batch-major from time-major, and back."""
    return x.swapaxes(0, 1)


def _where_real(mask: Bool[Array, "T B"] | None, chosen: State, other: State) -> State:
    """Rows of `chosen` where a row has a real step, of `other` elsewhere."""
    if mask is None:
        return chosen
    real = mask.any(axis=0)[:, None]
    return jax.tree.map(lambda a, b: jnp.where(real, a, b), chosen, other)
