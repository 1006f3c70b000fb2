"""Layers of a user's own functions and cells: what they compute, what they refuse."""

from __future__ import annotations

import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import examples
import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.layers.base import Context, apply
from reference import assert_close

TIME, ROWS, INPUTS, HIDDEN = 5, 3, 2, 4


def counted(params: Any, carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A cell that adds up its inputs."""
    carry = carry + params * x
    return carry, carry


def adding() -> mp_lstm.Layer:
    zeros = jax.nn.initializers.zeros
    return mp_lstm.recurrent(
        counted,
        init=lambda key: 1.0 + zeros(key, ()),
        init_state=lambda rows: jnp.zeros((rows, INPUTS)),
        name="adding",
    )


def test_a_flax_cell_equals_flax_rnn() -> None:
    cell = nn.GRUCell(features=HIDDEN)
    layer = mp_lstm.recurrent(cell, inputs=INPUTS)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(TIME, ROWS, INPUTS)), jnp.float32)
    params = layer.init(jax.random.key(0))
    rnn = nn.RNN(cell, time_major=True, return_carry=True)

    def ours(params: Any, x: Any) -> Any:
        return apply(layer, params, x, layer.init_state(ROWS), Context())

    def flax(params: Any, x: Any) -> Any:
        return rnn.apply({"params": {"cell": params["params"]}}, x)

    def both(run: Any) -> Any:
        outputs, pull = jax.vjp(run, params, x)
        return outputs, pull(jax.tree.map(jnp.ones_like, outputs))

    assert layer.kind == "GRUCell"
    assert_close(jax.jit(lambda: both(ours))(), jax.jit(lambda: both(flax))(), 2e-5)


def test_padded_steps_keep_the_carry_and_give_zero() -> None:
    layer = adding()
    mask = jnp.asarray(np.arange(TIME)[:, None] < np.array([5, 0, 2]))
    x, state = jnp.ones((TIME, ROWS, INPUTS)), layer.init_state(ROWS)
    carry, y = layer.infer(jnp.float32(1), x, state, Context(mask=mask))
    assert carry[:, 0].tolist() == [5, 0, 2]
    assert y[:, :, 0].T.tolist() == [[1, 2, 3, 4, 5], [0] * 5, [1, 2, 0, 0, 0]]


def test_padded_steps_pass_the_carrys_gradient() -> None:
    layer = adding()
    mask = jnp.asarray(np.arange(TIME)[:, None] < np.array([5, 0, 2]))

    def last(x: Any, state: Any) -> Any:
        return apply(layer, jnp.float32(1), x, state, Context(mask=mask))[0].sum()

    dx, dstate = jax.grad(last, argnums=(0, 1))(jnp.ones((TIME, ROWS, INPUTS)), layer.init_state(ROWS))
    assert dstate.tolist() == [[1, 1]] * 3
    assert dx[:, :, 0].T.tolist() == [[1] * 5, [0] * 5, [1, 1, 0, 0, 0]]


def test_a_function_of_integers_has_no_input_gradient() -> None:
    table = mp_lstm.from_function(lambda key: jnp.ones((7, 2)), lambda params, x, state: (state, params[x]))
    tokens = jnp.zeros((TIME, ROWS), int)
    _, y, saved = table.forward(jnp.ones((7, 2)), tokens, (), Context())
    dx, _, tape = table.backward(jnp.ones((7, 2)), saved, jnp.ones_like(y), (), Context())
    assert dx is None
    assert table.weight_gradient((), tape, Context())[0].tolist() == [TIME * ROWS] * 2


def test_costs_come_from_the_parameters_or_the_user() -> None:
    function = {"init": lambda key: {"a": jnp.ones((3, 2)), "b": jnp.ones(4)}, "f": lambda params, x, state: (state, x)}
    guessed = mp_lstm.from_function(**function).cost(5, 7)
    assert (guessed.parameters, guessed.forward) == (10, 2.0 * 10 * 5 * 7)
    known = mp_lstm.Cost(1, 2, 3, 4, 5, 6, 7)
    assert mp_lstm.from_function(**function, cost=lambda rows, time: known).cost(5, 7) is known


# Messages


def test_a_function_with_a_state_cannot_see_padding() -> None:
    layer = mp_lstm.from_function(
        lambda key: (), lambda params, x, state: (state, x), init_state=lambda rows: jnp.zeros(rows), name="mine"
    )
    with pytest.raises(InputError, match=r"mine: its function carries a state .*: make it with recurrent\(cell\) or"):
        layer.forward((), jnp.ones((2, 1, 1)), jnp.zeros(1), Context(mask=jnp.ones((2, 1), bool)))


def test_a_flax_cell_needs_the_size_of_its_input() -> None:
    with pytest.raises(InputError, match=r"gru: the size of the cell's input is missing: pass recurrent\(cell, inputs"):
        mp_lstm.recurrent(nn.GRUCell(features=3), name="gru")


@pytest.mark.parametrize("given", ["init", "init_state"])
def test_a_function_needs_init_and_init_state(given: str) -> None:
    with pytest.raises(InputError, match="cell: a cell that is a function needs init"):
        mp_lstm.recurrent(counted, name="cell", **{given: lambda value: jnp.zeros(())})


TAKEN = (TIME, ROWS, INPUTS)
PAIR = r"wanted a pair \({}, y\): return both"
KEPT = "return one like that it is given, which init_state made"


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda params, x, state: x, r"gave float32 \[5, 3, 2\], " + PAIR.format("state")),
        (lambda params, x, state: None, "gave None, " + PAIR.format("state")),
        (lambda params, x, state: (state, x, x), "gave a tuple of 3, " + PAIR.format("state")),
        (
            lambda params, x, state: (x, state),
            r"gave a state that is float32 \[5, 3, 2\], wanted float32 \[3, 2\]: " + KEPT,
        ),
        (lambda params, x, state: (state[:1], x), r"gave a state that is float32 \[1, 2\], wanted float32 \[3, 2\]"),
        (lambda params, x, state: (state.astype(jnp.float16), x), r"gave a state that is float16 \[3, 2\], wanted"),
        (lambda params, x, state: ((state,), x), r"gave a state that has the structure PyTreeDef\(\(\*,\)\), wanted"),
        (lambda params, x, state: ((), x), "gave a state that has 0 arrays, wanted 1: "),
    ],
)
@pytest.mark.parametrize("with_context", [False, True])
def test_what_a_function_must_give(f: Any, message: str, with_context: bool) -> None:
    """It was an error of unpacking, of trees, or of two programs that do not fit, and named no layer."""
    layer = mp_lstm.from_function(
        lambda key: (),
        (lambda params, x, state, ctx: f(params, x, state)) if with_context else f,
        init_state=lambda rows: jnp.zeros((rows, INPUTS)),
        with_context=with_context,
        name="mine",
    )
    for run in (layer.forward, layer.infer):
        with pytest.raises(InputError, match=f"^mine: its function {message}"):
            jax.eval_shape(run, (), jnp.ones(TAKEN), layer.init_state(ROWS), Context())


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (lambda params, carry, x: x, r"its cell gave float32 \[3, 2\], " + PAIR.format("carry")),
        (
            lambda params, carry, x: (carry[:1], x),
            r"its cell gave a state that is float32 \[1, 2\], wanted .*: " + KEPT,
        ),
        (lambda params, carry, x: (carry.astype(jnp.float16), x), r"its cell gave a state that is float16 \[3, 2\]"),
        (lambda params, carry, x: ([carry], x), r"its cell gave a state that has the structure PyTreeDef\(\[\*\]\)"),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_what_a_cell_must_give(cell: Any, message: str, padded: bool) -> None:
    """Under padding one row's carry was stretched over all rows, and float16 became float32."""
    layer = mp_lstm.recurrent(cell, init=lambda key: (), init_state=lambda rows: jnp.zeros((rows, INPUTS)), name="mine")
    ctx = Context(mask=jnp.ones((TIME, ROWS), bool) if padded else None)
    with pytest.raises(InputError, match=f"^mine: {message}"):
        jax.eval_shape(layer.forward, (), jnp.ones(TAKEN), layer.init_state(ROWS), ctx)


def test_each_row_keeps_its_own_carry_under_padding() -> None:
    """A carry of all rows together was an error of `jax.lax.scan`."""
    layer = mp_lstm.recurrent(
        lambda params, carry, x: (carry + 1, x), init=lambda key: (), init_state=lambda rows: jnp.zeros(()), name="mine"
    )
    assert layer.forward((), jnp.ones(TAKEN), layer.init_state(ROWS), Context())[0] == TIME
    with pytest.raises(InputError, match=r"^mine: its carry has float32 \[\], wanted \[3, ...\]: let init_state give"):
        layer.forward((), jnp.ones(TAKEN), layer.init_state(ROWS), Context(mask=jnp.ones((TIME, ROWS), bool)))


def test_a_cell_that_cannot_run_is_named() -> None:
    """A class in place of a cell, and an input of another size, were flax's own errors."""
    with pytest.raises(InputError, match=r"^mine: the cell is the class GRUCell: pass one of it, GRUCell\(\.\.\.\)$"):
        mp_lstm.recurrent(nn.GRUCell, INPUTS, name="mine")
    layer = mp_lstm.recurrent(nn.GRUCell(4), INPUTS + 1, name="mine")
    params = layer.init(jax.random.key(0))
    with pytest.raises(InputError, match=rf"^mine: its input is float32 .*, \[T, B, {INPUTS + 1}\] is wanted"):
        layer.forward(params, jnp.ones(TAKEN), layer.init_state(ROWS), Context())


def test_a_function_of_other_arguments_is_refused_when_it_is_given() -> None:
    for f, options in ((lambda p, x: x, {}), (lambda p, x, state: (state, x), {"with_context": True})):
        with pytest.raises(InputError, match=r"^mine: its function is called with \(params, x, state"):
            mp_lstm.from_function(lambda key: (), inspect.unwrap(f), name="mine", **options)
    mp_lstm.from_function(lambda key: (), lambda *args: args[1:], name="mine")


@pytest.mark.parametrize("remat", ["none", "layer", "stage"])
def test_a_state_may_count(remat: str) -> None:
    """JAX's gradient of whole numbers and switches lies on no device: the second chunk's B was an AttributeError."""

    def f(params: Any, x: Any, state: Any) -> Any:
        total = state["sum"][None] + jnp.cumsum(x, axis=0)
        after = {"steps": state["steps"] + x.shape[0], "odd": ~state["odd"], "sum": total[-1]}
        return after, x * params[None, None, :] + total

    def initial(rows: int) -> Any:
        return {"steps": jnp.zeros(rows, jnp.int32), "odd": jnp.zeros(rows, bool), "sum": jnp.zeros((rows, 3))}

    counting = mp_lstm.recurrent(
        lambda params, carry, x: ((carry[0] + 1, carry[1] * 0.5 + x), x * params[None, :] + carry[1]),
        init=lambda key: jnp.ones(3),
        init_state=lambda rows: (jnp.zeros(rows, jnp.int32), jnp.zeros((rows, 3))),
    )
    layers = [mp_lstm.dense(3, 3), mp_lstm.from_function(lambda key: jnp.ones(3), f, init_state=initial), counting]
    model = mp_lstm.sequential([*layers, mp_lstm.dense(3, 2)], loss=mp_lstm.squared_error)
    rng = np.random.default_rng(0)
    inputs, targets = (rng.normal(size=(8, 4, size)).astype(np.float32) for size in (3, 2))
    batch = mp_lstm.Batch(inputs, targets, resets=np.zeros(4, bool))
    pipe = examples.pipeline(model, batch_size=4, lengths=(8,), partition=(2, 2), chunk=2, microbatches=2, remat=remat)
    state, _ = pipe.step(pipe.init(jax.random.key(0)), batch)
    assert pipe.verify(state, [batch, batch]).passed
    state, _ = pipe.step(state, batch)
    assert state.carry[1][0][0].tolist() == [16] * 4
    jax.grad(lambda params: model.loss(params, batch)[0])(pipe.params(state))
