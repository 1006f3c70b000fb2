"""The original example's numbers, and its model in this package's terms.

The example this project succeeds wrote down one training run of a small model: three LSTM layers over two devices, five
steps of SGD with clipping (`fixtures/mxnet_parity.npz`). Its conventions, translated here:

* weights are [4H, inputs], here [inputs, 4H]; its gates come in the order i, g, f, o, here i, f, g, o;
* each LSTM has two biases, whose gradients are equal and both count in the norm: `two_biases` wraps our layer so;
* the loss is summed over rows, and gradients are divided by the number of rows before their norm is clipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import mp_lstm

FIXTURE = Path(__file__).parent / "fixtures" / "mxnet_parity.npz"
STEPS = 5


class TwoBiasParams(NamedTuple):
    """An LSTM's parameters with one bias for the input products and one for the recurrent ones."""

    kernel: Any
    recurrent_kernel: Any
    bias: Any
    recurrent_bias: Any

    def summed(self) -> mp_lstm.LSTMParams:
        """The parameters of the same layer with one bias."""
        return mp_lstm.LSTMParams(self.kernel, self.recurrent_kernel, self.bias + self.recurrent_bias)


class Run(NamedTuple):
    """The recorded run.

    Args:
      model: the model, its parameters laid out as `initial`.
      batch: the one batch that every step sees.
      learning_rate, max_norm: of SGD and of the clipping.
      initial, final: parameters before the first and after the last step.
      gradients: of the first step, summed over rows and steps.
      losses: [steps, T], the loss of each step by time step, summed over rows.
      norms: [steps], global norms of the gradients divided by the number of rows.
      states: (h, c) of each LSTM layer after the first pass.
    """

    model: mp_lstm.Model
    batch: mp_lstm.Batch
    learning_rate: float
    max_norm: float
    initial: Any
    final: Any
    gradients: Any
    losses: np.ndarray
    norms: np.ndarray
    states: tuple[tuple[np.ndarray, np.ndarray], ...]


def load() -> Run:
    """Reads the recorded run."""
    with np.load(FIXTURE) as file:
        arrays = dict(file)
    layers, hidden, embed, vocab = (int(arrays[name]) for name in "LHEV")
    inputs = [embed] + [hidden] * (layers - 1)
    lstms = [two_biases(mp_lstm.lstm_layer(inputs[i], hidden, name=f"lstm {i + 1}")) for i in range(layers)]
    rows = (mp_lstm.embedding(vocab, embed), *lstms, mp_lstm.softmax_head(hidden, vocab))
    return Run(
        model=mp_lstm.Model(rows),
        batch=mp_lstm.Batch(arrays["data"].astype(np.int32), arrays["label"].astype(np.int32)),
        learning_rate=float(arrays["lr"]),
        max_norm=float(arrays["clip"]),
        initial=_params(arrays, "w0", layers),
        final=_params(arrays, "w5", layers),
        gradients=_params(arrays, "g0", layers),
        losses=np.stack([arrays[f"loss{step}"] for step in range(STEPS)]),
        norms=np.stack([arrays[f"norm{step}"] for step in range(STEPS)]),
        states=tuple((arrays[f"last_h{i}"], arrays[f"last_c{i}"]) for i in range(layers)),
    )


def two_biases(layer: mp_lstm.Layer) -> mp_lstm.Layer:
    """An LSTM layer whose bias is the sum of two parameters."""

    def init(key: jax.Array) -> TwoBiasParams:
        params = layer.init(key)
        return TwoBiasParams(*params, recurrent_bias=jax.numpy.zeros_like(params.bias))

    def weight_gradient(params: TwoBiasParams, tape: Any, ctx: Any) -> TwoBiasParams:
        gradients = layer.weight_gradient(params.summed(), tape, ctx)
        return TwoBiasParams(*gradients, recurrent_bias=gradients.bias)

    return layer._replace(
        init=init,
        forward=lambda params, *args: layer.forward(params.summed(), *args),
        backward=lambda params, *args: layer.backward(params.summed(), *args),
        weight_gradient=weight_gradient,
        infer=lambda params, *args: layer.infer(params.summed(), *args),
    )


def _params(arrays: dict[str, np.ndarray], prefix: str, layers: int) -> tuple[Any, ...]:
    """Weights or gradients as a tuple, one entry a row."""
    lstms = []
    for i in range(layers):
        kernel, bias, recurrent_kernel, recurrent_bias = (
            _gates(arrays[f"{prefix}/l{i}_{product}_{kind}"])
            for product in ("i2h", "h2h")
            for kind in ("weight", "bias")
        )
        lstms.append(TwoBiasParams(kernel, recurrent_kernel, bias, recurrent_bias))
    embedding = mp_lstm.EmbeddingParams(arrays[f"{prefix}/embed_weight"])
    head = mp_lstm.HeadParams(arrays[f"{prefix}/cls_weight"].T, arrays[f"{prefix}/cls_bias"])
    return (embedding, *lstms, head)


def _gates(array: np.ndarray) -> np.ndarray:
    """[4H, ...] with gates i, g, f, o as [..., 4H] with gates i, f, g, o."""
    i, g, f, o = np.split(array, 4)
    return np.concatenate([i, f, g, o]).T
