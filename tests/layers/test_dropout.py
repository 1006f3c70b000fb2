"""Dropout: masks of the right rate that no cut can change."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.layers.base import Context
from mp_lstm.layers.dropout import MOST_RATE, keep_mask, keep_probability, threefry

KEY = jax.random.key(0)
TIME, ROWS, SIZE = 9, 7, 6


@pytest.mark.parametrize("steps", [(0, TIME), (0, 1), (3, 7), (TIME - 1, TIME)])
@pytest.mark.parametrize("rows", [(0, ROWS), (2, 3), (4, ROWS)])
def test_a_part_of_a_batch_draws_its_part_of_the_mask(steps: tuple[int, int], rows: tuple[int, int]) -> None:
    whole = keep_mask(KEY, 5, 0, 0, (TIME, ROWS, SIZE), 0.4)
    shape = (steps[1] - steps[0], rows[1] - rows[0], SIZE)
    part = keep_mask(KEY, 5, jnp.int32(steps[0]), jnp.int32(rows[0]), shape, 0.4)
    assert (part == whole[slice(*steps), slice(*rows)]).all()


def test_the_cipher_is_jaxs_to_the_last_bit() -> None:
    words = jax.random.bits(KEY, (4, 1000), jnp.uint32)
    np.testing.assert_array_equal(threefry(*words), threefry2x32_p.bind(*words))


def test_a_mask_is_drawn_in_one_pass() -> None:
    """JAX's cipher is a loop with copies of its own, which took as long as a sixth of F."""
    drawn = jax.jit(lambda x, key: jnp.where(keep_mask(key, 5, 0, 0, x.shape, 0.5), x, 0))
    text = drawn.lower(jnp.ones((TIME, ROWS, SIZE)), KEY).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert f"u32[{TIME},{ROWS}" not in entry


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_values_are_kept_at_the_stated_rate(rate: float) -> None:
    """Within five standard deviations, overall and for each step, row and column: no axis is treated apart."""
    shape = (40, 50, 60)
    mask = np.asarray(keep_mask(KEY, 0, 0, 0, shape, rate))
    deviation = np.sqrt(rate * (1 - rate))
    assert abs(mask.mean() - (1 - rate)) < 5 * deviation / np.sqrt(mask.size)
    for axis in range(3):
        others = tuple(i for i in range(3) if i != axis)
        assert (abs(mask.mean(axis=others) - (1 - rate)) < 5 * deviation / np.sqrt(mask.size / shape[axis])).all()


def test_masks_differ_by_key_batch_step_row_and_column() -> None:
    mask = keep_mask(KEY, 0, 0, 0, (TIME, ROWS, 64), 0.5)
    assert (mask != keep_mask(jax.random.key(1), 0, 0, 0, (TIME, ROWS, 64), 0.5)).any()
    assert (mask != keep_mask(KEY, 1, 0, 0, (TIME, ROWS, 64), 0.5)).any()
    assert len({row.tobytes() for row in np.asarray(mask).reshape((-1, 64))}) == TIME * ROWS
    assert len({column.tobytes() for column in np.asarray(mask).reshape((-1, 64)).T}) == 64


def test_what_is_kept_is_scaled_so_that_the_mean_stays() -> None:
    layer, x = mp_lstm.dropout(0.3), jnp.full((TIME, ROWS, SIZE), 2.0)
    _, y, mask = layer.forward((), x, (), Context(key=KEY, train=True))
    assert set(np.unique(y)) == {0.0, np.float32(2.0 / keep_probability(0.3))}
    dx, _, _ = layer.backward((), mask, jnp.ones_like(x), (), Context(key=KEY, train=True))
    np.testing.assert_allclose(dx, y / 2, rtol=1e-6)


def test_it_rests_outside_training() -> None:
    x = jnp.ones((TIME, ROWS, SIZE))
    assert mp_lstm.dropout(0.5).forward((), x, (), Context())[1] is x
    assert mp_lstm.dropout(0.5).infer((), x, (), Context(key=KEY, train=True))[1] is x
    assert mp_lstm.dropout(0.0).forward((), x, (), Context(train=True))[1] is x


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_refuses_a_rate_that_is_none(rate: float) -> None:
    with pytest.raises(InputError, match=rf"drop: the rate is {rate}, a number in \[0, 1\) is wanted"):
        mp_lstm.dropout(rate, name="drop")


@pytest.mark.parametrize("make", [mp_lstm.dropout, mp_lstm.locked_dropout])
def test_refuses_a_rate_that_keeps_nothing(make: Callable[..., mp_lstm.Layer]) -> None:
    """0.999999 was rounded to a mask that keeps nothing, and the scale was one divided by zero."""
    message = (
        r"drop: the rate is 0\.999999, a number in \[0, 1\) is wanted, at most 0\.9999847412109375: pass a smaller"
    )
    with pytest.raises(InputError, match=message):
        make(0.999999, name="drop")
    x = jnp.ones((TIME, ROWS, SIZE))
    _, y, _ = make(MOST_RATE, name="drop").forward((), x, (), Context(key=KEY, train=True))
    assert set(np.unique(y)) <= {0.0, 65536.0}


def test_training_needs_a_key() -> None:
    with pytest.raises(InputError, match=r"drop: training with dropout needs a key: pass key=jax.random.key"):
        mp_lstm.dropout(0.5, name="drop").forward((), jnp.ones((1, 1, 1)), (), Context(train=True))


def locked_mask(*, steps: tuple[int, int] = (0, TIME), rows: tuple[int, int] = (0, ROWS), **ctx: Any) -> np.ndarray:
    """Where ones that locked dropout was given for a unit remain."""
    x = jnp.ones((steps[1] - steps[0], rows[1] - rows[0], 64))
    ctx = {"key": KEY, "counter": 5, "start": steps[0], "row": rows[0], "train": True} | ctx
    return np.asarray(mp_lstm.locked_dropout(0.4).forward((), x, (), Context(**ctx))[1] != 0)


def test_a_locked_mask_is_one_a_row_and_feature_whatever_the_unit() -> None:
    mask = locked_mask()
    assert (mask == mask[:1]).all()
    assert (locked_mask(steps=(3, 7), rows=(2, 5)) == mask[3:7, 2:5]).all()
    assert len({row.tobytes() for row in mask[0]}) == ROWS
    assert len({column.tobytes() for column in mask[0].T}) > 32  # of 128 that seven rows may have
    assert (locked_mask(counter=6) != mask).any()
    assert (locked_mask(key=jax.random.key(1)) != mask).any()


def test_locked_dropout_drops_and_scales_at_the_stated_rate() -> None:
    layer, ctx = mp_lstm.locked_dropout(0.3), Context(key=KEY, train=True)
    x = jnp.full((2, 100, 200), 2.0)
    _, y, saved = layer.forward((), x, (), ctx)
    assert set(np.unique(y)) == {0.0, np.float32(2.0 / keep_probability(0.3))}
    kept = np.asarray(y[0] != 0)
    for axis in (None, 0, 1):
        drawn = kept.size if axis is None else kept.shape[axis]
        assert (abs(kept.mean(axis=axis) - 0.7) < 5 * np.sqrt(0.3 * 0.7 / drawn)).all()
    dx, _, _ = layer.backward((), saved, jnp.ones_like(x), (), ctx)
    np.testing.assert_allclose(dx, y / 2, rtol=1e-6)
    assert layer.infer((), x, (), ctx)[1] is x


@pytest.mark.parametrize("rate", ["0.5", None, True, mp_lstm.dense(3, 2, name="top")])
def test_refuses_a_rate_that_is_no_number(rate: Any) -> None:
    """As users call it: without the tests' own check of types."""
    shown = "the Layer 'top'" if isinstance(rate, mp_lstm.Layer) else repr(rate)
    with pytest.raises(InputError, match=rf"^drop: the rate is {shown}, a number in \[0, 1\) is wanted"):
        inspect.unwrap(mp_lstm.dropout)(rate, name="drop")


@pytest.mark.parametrize("rate", [jnp.float32(0.25), np.float16(0.25)])
@pytest.mark.parametrize(
    "make",
    [
        mp_lstm.dropout,
        mp_lstm.locked_dropout,
        lambda rate: inspect.unwrap(mp_lstm.embedding)(6, 4, dropout=rate),
        lambda rate: inspect.unwrap(mp_lstm.weight_drop)(mp_lstm.lstm_layer(4, 4), rate),
    ],
    ids=["dropout", "locked", "words", "weights"],
)
def test_a_rate_may_be_a_number_of_jax_or_numpy(make: Any, rate: Any) -> None:
    """They passed the check and failed in the first step: one asked whether it is 0, the other 2^16 in float16."""
    wanted, layer = make(0.25), inspect.unwrap(make)(rate)
    params, x = layer.init(jax.random.key(0)), jnp.ones((3, 2, 4))
    if layer.input_ids is not None:
        x = jnp.ones((3, 2), int)
    ctx = Context(key=jax.random.key(1), train=True)
    run = jax.jit(lambda one: one.forward(params, x, layer.init_state(2), ctx)[1], static_argnums=0)
    np.testing.assert_array_equal(run(layer), run(wanted))
