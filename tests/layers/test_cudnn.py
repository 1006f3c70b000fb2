"""cuDNN's LSTM: conversion, padding and choice on CPUs, JAX's own reference standing in for the kernel.

The stand-in is as hostile as the kernel may be: it answers a length of 0, or an output that was not saved, with NaN,
and fills dx on padding. The kernel itself is run by the tests marked `gpu` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import rnn
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

import examples
import mp_lstm
import reference
from mp_lstm.errors import InputError
from mp_lstm.layers import cudnn
from mp_lstm.layers.base import Context
from mp_lstm.runtime import single
from mp_lstm.runtime.placement import put, stage_sharding
from reference import assert_close

TIME, ROWS, INPUTS, HIDDEN = 7, 4, 3, 5
LENGTHS = np.array([7, 0, 3, 1], np.int32)
MARK = "cos"  # an operation of the stand-in that no LSTM has


class StandIn:
    """`rnn.lstm_fwd` and `rnn.lstm_bwd` by `rnn.lstm_ref`, and how often each was traced."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0

    @staticmethod
    def run(sizes: dict[str, Any], x: Any, h: Any, c: Any, weights: Any, lengths: Any) -> Any:
        inputs, hidden, layers = sizes["input_size"], sizes["hidden_size"], sizes["num_layers"]
        unpacked = rnn.unpack_lstm_weights(weights, inputs, hidden, layers, sizes["bidirectional"])
        right = (lengths >= 1).all() & (jnp.cos(0.0) == 1)
        rest = (lengths, inputs, hidden, layers, sizes["dropout"], sizes["bidirectional"])
        y, h, c = rnn.lstm_ref(x, h, c, *unpacked, *rest)
        return jnp.where(right, y, jnp.nan), h, c

    def forward(self, *args: Any, **sizes: Any) -> Any:
        self.forwards += 1
        assert {arg.dtype.name for arg in args} == {"float32", "int32"}
        y, h, c = self.run(sizes, *args)
        return (y, h, c), (*args, y, jnp.zeros(9))

    def backward(self, *, residuals: Any, gradients: Any, **sizes: Any) -> Any:
        self.backwards += 1
        *differentiable, lengths, saved, reserve = residuals
        (y, _, _), pull = jax.vjp(lambda *args: self.run(sizes, *args, lengths), *differentiable)
        dx, dh, dc, dweights = pull(gradients)
        steps = jnp.arange(y.shape[1])[None, :, None]
        read_again = steps < lengths[:, None, None] - 1
        right = jnp.where(read_again, jnp.abs(saved - y) < 1e-6, True).all() & (reserve.shape == (9,))
        dx = jnp.where(steps < lengths[:, None, None], dx, 1e3)
        return jnp.where(right, dx, jnp.nan), dh, dc, dweights, jnp.zeros_like(lengths)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in, and a GPU that it seems to run on."""
    found = StandIn()
    monkeypatch.setattr(rnn, "lstm_fwd", found.forward)
    monkeypatch.setattr(rnn, "lstm_bwd", found.backward)
    monkeypatch.setattr(cudnn, "nvidia_gpus", jax.devices)
    return found


@pytest.fixture
def pinned_to_gpu(kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """CPUs that are taken for GPUs where arrays are pinned to them."""
    real = cudnn.platform
    monkeypatch.setattr(cudnn, "platform", lambda params: "gpu" if real(params) == "cpu" else real(params))
    return kernel


def example(seed: int = 0) -> tuple[mp_lstm.LSTMParams, jax.Array, mp_lstm.LSTMState]:
    """Parameters, inputs and a state, all random."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * 0.5, jnp.float32)

    params = mp_lstm.LSTMParams(draw(INPUTS, 4 * HIDDEN), draw(HIDDEN, 4 * HIDDEN), draw(4 * HIDDEN))
    return params, draw(TIME, ROWS, INPUTS), mp_lstm.LSTMState(draw(ROWS, HIDDEN), draw(ROWS, HIDDEN))


def outputs_and_gradients(lengths: np.ndarray | None, implementation: str, args: Any = None) -> Any:
    """What `mp_lstm.lstm` returns, and the gradients of a projection of all of it."""
    lengths = None if lengths is None else jnp.asarray(lengths)

    @jax.jit
    def both(args: Any) -> Any:
        run = partial(mp_lstm.lstm, lengths=lengths, implementation=implementation)
        outputs, pull = jax.vjp(run, *args)
        return outputs, pull(jax.tree.map(lambda y: jnp.arange(1, y.size + 1.0).reshape(y.shape) / y.size, outputs))

    return both(example() if args is None else args)


# Conversion


def test_parameters_are_laid_out_as_jax_unpacks_them() -> None:
    params, _, _ = example()
    vector = cudnn.packed(params)
    assert vector.shape == (rnn.get_num_params_in_lstm(INPUTS, HIDDEN, 1, False),)
    w_ih, w_hh, b_ih, b_hh = rnn.unpack_lstm_weights(vector, INPUTS, HIDDEN, 1, False)
    assert_close((w_ih[0].T, w_hh[0].T, b_ih[0], b_hh[0]), (*params, jnp.zeros(4 * HIDDEN)), 0.0)
    assert_close(cudnn.unpacked(params, vector), params, 0.0)


@pytest.mark.parametrize("lengths", [None, LENGTHS, np.zeros(ROWS, np.int32)])
def test_outputs_and_gradients_are_xlas(kernel: StandIn, lengths: np.ndarray | None) -> None:
    actual = outputs_and_gradients(lengths, "cudnn")
    assert (kernel.forwards, kernel.backwards) == (1, 1)
    assert_close(actual, outputs_and_gradients(lengths, "xla"), 2e-5)


def test_a_row_without_steps_passes_state_and_gradient_through(kernel: StandIn) -> None:
    params, x, state = example()
    layer = mp_lstm.lstm_layer(INPUTS, HIDDEN, implementation="cudnn")
    ctx = Context(mask=jnp.arange(TIME)[:, None] < LENGTHS[None, :])
    after, y, saved = layer.forward(params, x, state, ctx)
    dx, dstate, _ = layer.backward(params, saved, jnp.ones_like(y), state, ctx)
    assert_close(
        jax.tree.map(lambda leaf: leaf[1], (after, dstate)), jax.tree.map(lambda leaf: leaf[1], (state,) * 2), 0
    )
    padding = ~np.asarray(ctx.mask)
    assert not np.asarray(y)[padding].any()
    assert not np.asarray(dx)[padding].any()


def test_forward_is_differentiable_as_verify_wants_it(kernel: StandIn) -> None:
    params, x, state = example()
    layer = mp_lstm.lstm_layer(INPUTS, HIDDEN, implementation="cudnn")

    def loss(*args: Any) -> jax.Array:
        return jnp.square(layer.infer(*args, Context())[1]).sum()

    _, y, saved = layer.forward(params, x, state, Context())
    dx, dstate, tape = layer.backward(params, saved, 2 * y, jax.tree.map(jnp.zeros_like, state), Context())
    assert_close(jax.grad(loss, argnums=(0, 1, 2))(params, x, state), (tape, dx, dstate), 1e-6)


def test_w_costs_nothing_and_b_its_work() -> None:
    xla, by_cudnn = (mp_lstm.lstm_layer(3, 5, implementation=name).cost(2, 4) for name in ("xla", "cudnn"))
    assert (by_cudnn.weight, by_cudnn.flops, by_cudnn.tape_bytes) == (0, xla.flops, 0)
    assert by_cudnn.activation_bytes == xla.activation_bytes


# Transparency


@pytest.mark.parametrize("implementation", [pytest.param("cudnn", marks=pytest.mark.slow), "auto"])
def test_a_pipeline_equals_the_reference(pinned_to_gpu: StandIn, implementation: str) -> None:
    model = mp_lstm.language_model(**examples.SIZES, dropout=0.4, implementation=implementation)
    planned = {"partition": (2, 2), "chunk": 3, "microbatches": 2}
    pipe = examples.pipeline(model, batch_size=5, lengths=(6,), **planned)
    batch = examples.random_batch(np.random.default_rng(0), 6, 5, lengths=[6, 0, 3, 1, 4], weighted=True)
    params, key = examples.random_params(model), jax.random.key(3)
    loss, gradients = pipe.value_and_grad(pipe.load(params, key=key), batch)
    assert pinned_to_gpu.backwards > 0
    expected = reference.run(reference.Spec(layers=2, dropout=0.4), params, [batch], key=key)
    assert_close((loss, gradients), expected.mean(), 2e-5)


# The choice


def test_the_platform_is_read_from_what_arrays_are_pinned_to() -> None:
    """The kind of device that a GPU has is written here by hand: none is at hand."""
    gpu = AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("data",), abstract_device=gpu)
    struct = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    pinned = jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    seen = []
    jax.eval_shape(lambda params: seen.append(cudnn.platform(params)), [struct, pinned])
    jax.eval_shape(lambda params: seen.append(cudnn.platform(params)), [struct, struct])
    assert seen == ["gpu", None]
    assert cudnn.platform(put([np.ones(3)], stage_sharding(jax.devices()[1]))) == "cpu"


@pytest.mark.parametrize(("found", "gpus", "chosen"), [("gpu", 1, 1), ("gpu", 0, 0), ("cpu", 1, 0), (None, 1, 0)])
def test_auto_takes_cudnn_on_nvidia_gpus_only(
    kernel: StandIn, monkeypatch: pytest.MonkeyPatch, found: str | None, gpus: int, chosen: int
) -> None:
    monkeypatch.setattr(cudnn, "platform", lambda params: found)
    monkeypatch.setattr(cudnn, "nvidia_gpus", lambda: jax.devices()[:gpus])
    params, x, state = example()
    layer = mp_lstm.lstm_layer(INPUTS, HIDDEN)
    _, y, saved = layer.forward(params, x, state, Context())
    _, _, tape = layer.backward(params, saved, y, state, Context())
    assert [part is not None for part in tape] == [not chosen, bool(chosen)]
    assert (kernel.forwards, kernel.backwards) == (chosen, chosen)


@pytest.mark.parametrize("options", [{"dtype": jnp.bfloat16}, {"products": jnp.bfloat16}])
def test_auto_takes_xla_unless_all_is_float32(pinned_to_gpu: StandIn, options: dict[str, Any]) -> None:
    assert mp_lstm.lstm_layer(INPUTS, HIDDEN, **options).join == "time"
    assert mp_lstm.lstm_layer(INPUTS, HIDDEN, products=jnp.float32).join == ("time", "sum")


def test_lstm_leaves_the_choice_to_the_lowering(kernel: StandIn) -> None:
    """One traced function, lowered for a CPU and for a GPU that is not here; run on the CPU, it is XLA's."""
    traced = jax.jit(partial(mp_lstm.lstm, lengths=jnp.asarray(LENGTHS))).trace(*example())
    assert kernel.forwards == 1
    text = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda")}
    assert {name: "stablehlo.cosine" in lines for name, lines in text.items()} == {"cpu": False, "cuda": True}
    assert_close(outputs_and_gradients(LENGTHS, "auto"), outputs_and_gradients(LENGTHS, "xla"), 0)


def test_costs_are_measured_of_what_the_device_runs(pinned_to_gpu: StandIn) -> None:
    """Rows are traced outside a pipeline there: unpinned, their F and B would not be those that a pipeline compiles."""
    model = mp_lstm.language_model(**examples.SIZES)
    row = list(single.isolate(model, 3, optax.sgd(0.1), single.tokens(), jax.devices()[0]))[1]
    works = (single.forward(row, 3, 4), *single.backward_and_weight(row, 3, 4, add=False))
    assert [f" {MARK} " in single.trace(work) for work in works] == [True, True, False]


# Messages


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "cuda"}, "top: implementation is 'cuda', one of auto, xla, cudnn is wanted"),
        ({"dtype": jnp.bfloat16}, "top: implementation is 'cudnn' and the type is bfloat16: pass float32, or 'xla'"),
        ({"products": jnp.bfloat16}, "'cudnn' and the type is float32 with products in bfloat16: pass float32"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        mp_lstm.lstm_layer(3, 5, name="top", **{"implementation": "cudnn"} | options)


def test_cudnn_needs_an_nvidia_gpu() -> None:
    params, x, _ = example()
    with pytest.raises(InputError, match="lstm: implementation is 'cudnn' and JAX has no NVIDIA GPU: pass 'auto' or"):
        mp_lstm.lstm(params, x, implementation="cudnn")


def test_cudnn_refuses_other_devices(kernel: StandIn) -> None:
    params, x, state = put(example(), stage_sharding(jax.devices()[0]))
    with pytest.raises(InputError, match="lstm: implementation is 'cudnn' and its device is of kind 'cpu', an NVIDIA"):
        mp_lstm.lstm(params, x, state, implementation="cudnn")


def test_cudnn_refuses_inputs_of_other_types(kernel: StandIn) -> None:
    params, x, _ = example()
    with pytest.raises(
        InputError, match=r"lstm: implementation is 'cudnn' and x is bfloat16 \[7, 4, 3\]: pass float32"
    ):
        mp_lstm.lstm(params, x.astype(jnp.bfloat16), implementation="cudnn")


# The kernel itself


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["cudnn", "auto"])
@pytest.mark.parametrize("lengths", [None, LENGTHS, np.zeros(ROWS, np.int32)])
def test_the_kernel_equals_xla(lengths: np.ndarray | None, implementation: str) -> None:
    args = jax.device_put(example(), jax.devices("cuda")[0])
    with jax.default_matmul_precision("highest"):
        actual = outputs_and_gradients(lengths, implementation, args)
        assert_close(actual, outputs_and_gradients(lengths, "xla", args), 2e-5)


@pytest.mark.gpu
def test_a_pipeline_on_a_gpu_runs_the_kernel() -> None:
    model = mp_lstm.language_model(**examples.SIZES, dropout=0.4)
    planned = {"partition": (2, 2), "chunk": 3, "microbatches": 2}
    devices = jax.devices("cuda")[:1] * 2
    with jax.default_matmul_precision("highest"):
        pipe = examples.pipeline(model, batch_size=5, lengths=(6,), devices=devices, **planned)
        batch = examples.random_batch(np.random.default_rng(0), 6, 5, lengths=[6, 0, 3, 1, 4], weighted=True)
        params, key = examples.random_params(model), jax.random.key(3)
        loss, gradients = pipe.value_and_grad(pipe.load(params, key=key), batch)
        expected = reference.run(reference.Spec(layers=2, dropout=0.4), params, [batch], key=key)
    assert any("dnn_rnn" in program.executable.as_text() for program in pipe.programs[6].values())
    assert_close((loss, gradients), expected.mean(), 2e-5)
