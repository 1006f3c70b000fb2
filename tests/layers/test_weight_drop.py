"""Weight drop: which recurrent weights are dropped, for how long, and what that does to gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.layers.base import Context, apply
from mp_lstm.layers.dropout import keep_probability
from reference import assert_close

KEY = jax.random.key(0)
ONES = mp_lstm.LSTMParams(jnp.ones((3, 64)), jnp.ones((16, 64)), jnp.ones((64,)))


def seen_by(phase: str, *, rate: float = 0.5, **place: Any) -> mp_lstm.LSTMParams:
    """The parameters that a phase of the layer inside is given, of ones."""
    seen: dict[str, mp_lstm.LSTMParams] = {}
    x = jnp.ones((1, 1, 3))

    def look(phase: str, result: Any) -> Any:
        def run(params: mp_lstm.LSTMParams, *args: Any) -> Any:
            seen[phase] = params
            return result

        return run

    phases = {"forward": ((), x, ()), "backward": (x, (), ()), "weight_gradient": ONES}
    layer = mp_lstm.lstm_layer(3, 16)._replace(**{name: look(name, result) for name, result in phases.items()})
    layer = mp_lstm.weight_drop(layer, rate)
    ctx = Context(**{"key": KEY, "counter": 4, "train": True} | place)
    layer.forward(ONES, x, (), ctx)
    layer.backward(ONES, (), x, (), ctx)
    layer.weight_gradient(ONES, (), ctx)
    return seen[phase]


def test_as_many_recurrent_weights_as_stated_and_no_others() -> None:
    params = seen_by("forward", rate=0.3)
    kept = np.asarray(params.recurrent_kernel != 0)
    assert set(np.unique(params.recurrent_kernel)) == {0, np.float32(1 / keep_probability(0.3))}
    for axis in (None, 0, 1):
        drawn = kept.size if axis is None else kept.shape[axis]
        assert (abs(kept.mean(axis=axis) - 0.7) < 5 * np.sqrt(0.3 * 0.7 / drawn)).all()
    assert (params.kernel == 1).all()
    assert (params.bias == 1).all()


def test_one_mask_for_all_phases_and_units_of_a_batch() -> None:
    masked = seen_by("forward").recurrent_kernel
    for phase in ("forward", "backward", "weight_gradient"):
        assert (seen_by(phase, start=5, row=2).recurrent_kernel == masked).all()
    assert (seen_by("forward", counter=5).recurrent_kernel != masked).any()
    assert (seen_by("forward", key=jax.random.key(1)).recurrent_kernel != masked).any()


def test_the_gradient_is_that_of_the_masked_product(x64: None) -> None:
    """JAX's derivative of the plain layer by the weights before the mask: zero for those that are dropped."""
    plain = mp_lstm.lstm_layer(3, 16, dtype=jnp.float64)
    layer, ctx = mp_lstm.weight_drop(plain, 0.5), Context(key=KEY, counter=4, train=True)
    params, x = plain.init(jax.random.key(1)), jax.random.normal(jax.random.key(2), (4, 2, 3))
    factor = seen_by("forward").recurrent_kernel.astype(jnp.float64)

    def by_hand(params: Any) -> Any:
        masked = params._replace(recurrent_kernel=params.recurrent_kernel * factor)
        return jnp.square(plain.forward(masked, x, plain.init_state(2), Context())[1]).sum()

    def dropping(params: Any) -> Any:
        return jnp.square(apply(layer, params, x, plain.init_state(2), ctx)[1]).sum()

    gradients = jax.jit(jax.grad(dropping))(params)
    assert_close(gradients, jax.jit(jax.grad(by_hand))(params), 1e-12)
    assert ((gradients.recurrent_kernel == 0) == (factor == 0)).all()


def test_all_weights_outside_training() -> None:
    assert (seen_by("forward", train=False).recurrent_kernel == 1).all()
    plain = mp_lstm.lstm_layer(3, 16)
    layer = mp_lstm.weight_drop(plain, 0.9)
    assert layer.infer is plain.infer


def test_drawing_is_counted_work() -> None:
    plain = mp_lstm.lstm_layer(3, 16)
    costs = [mp_lstm.weight_drop(plain, rate).cost(2, 4) for rate in (0.5, 0.0)]
    assert costs[0].flops > costs[1].flops == plain.cost(2, 4).flops


def test_refuses_what_it_cannot_drop() -> None:
    with pytest.raises(InputError, match=r"weight_drop of lstm: the rate is 1\.0, a number in \[0, 1\) is wanted"):
        mp_lstm.weight_drop(mp_lstm.lstm_layer(3, 5), 1.0)
    with pytest.raises(InputError, match=r"weight_drop of lstm: the rate is 0\.999999, .* at most 0\.99998474"):
        mp_lstm.weight_drop(mp_lstm.lstm_layer(3, 5), 0.999999)  # would keep none of 65,536
    message = "weight_drop: dense has no recurrent_kernel among its parameters: wrap an lstm_layer"
    with pytest.raises(InputError, match=message):
        mp_lstm.weight_drop(mp_lstm.dense(3, 5), 0.5)
    with pytest.raises(InputError, match="lstm: training with dropout needs a key"):
        seen_by("forward", key=None)
