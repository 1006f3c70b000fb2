"""Rematerialisation: the same gradients, and less that F saves."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import examples
import mp_lstm
import reference
from mp_lstm.errors import InputError
from mp_lstm.layers import heads, lean_head
from mp_lstm.layers.base import Context, apply, chain
from mp_lstm.layers.lstm import Saved as SavedByLSTM
from mp_lstm.layers.remat import REMAT, chain_with, rematerialised
from mp_lstm.layers.remat import Saved as SavedByRemat
from mp_lstm.runtime.compiler import compiler_options
from mp_lstm.runtime.stages import Unit, make_stage
from reference import assert_close

TIME, ROWS, SIZE = 6, 3, 4
KEY = jax.random.key(42)


def nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@functools.cache
def expected(tie: bool) -> tuple[mp_lstm.Model, Any, Any, list[mp_lstm.Batch], reference.Result]:
    """A model with its parameters, a window of padded batches with carried state, and the reference's results."""
    sizes = {"layers": 2, "dropout": 0.3, "tie": tie, "residual_from": 1}
    model = mp_lstm.language_model(vocab=examples.VOCAB, embed=SIZE, hidden=SIZE, dtype=jnp.float64, **sizes)
    params, carry = examples.random_params(model), examples.random_carry(model, 5)
    rng, resets = np.random.default_rng(0), [False, True, False, True, False]
    window = [
        examples.random_batch(rng, time=TIME, rows=5, lengths=lengths, weighted=True, resets=resets)
        for lengths in ([6, 0, 3, 1, 6], [2, 6, 6, 4, 0])
    ]
    before = reference.lstm_states(carry)
    return (
        model,
        params,
        carry,
        window,
        reference.run(reference.Spec(**sizes), params, window, key=KEY, counter=3, carry=before),
    )


@pytest.mark.slow  # the drawn plans of test_transparency.py recompute too
@pytest.mark.parametrize(
    ("remat", "tie", "partition"),
    [
        ("head", True, (2, 2)),
        ("stage", False, (2, 2)),
        ("layer", False, (2, 2)),
        ("stage", True, (2, 2)),
        ("layer", True, (2, 2)),
        ("stage", True, (4,)),
    ],
)
def test_any_plan_equals_the_reference_with_remat(x64: None, remat: str, tie: bool, partition: tuple[int, ...]) -> None:
    """Dropout, padding, chunks, micro-batches, carried state; a tied decoder beside its table's stage and apart."""
    model, params, carry, window, result = expected(tie)
    optimizer = examples.recorder()
    cut = {"partition": partition, "chunk": 4, "microbatches": 2, "schedule": "wavefront", "remat": remat}
    pipe = examples.pipeline(model, batch_size=5, lengths=(TIME,), optimizer=optimizer, **cut)
    state = pipe.restore(params, [optimizer.init(row) for row in params], key=KEY, carry=carry, batches=3)
    after, metrics = pipe.step(state, window)
    loss, gradients = result.mean()
    assert_close(examples.by_row([stage.optimizer for stage in after.stages]), gradients, 1e-10)
    assert_close(metrics.loss, loss, 1e-10)
    assert_close(reference.lstm_states(after.carry), result.states[-1], 1e-10)


def stage_structs(remat: str, layers: int = 3) -> tuple[Any, Any, Any]:
    """What F of a stage saves, what its B gives, and the stage's input, as structs."""
    model = mp_lstm.language_model(vocab=examples.VOCAB, embed=SIZE, hidden=SIZE, layers=layers)
    stage = make_stage(model, 0, range(1, 1 + layers), jax.devices()[0], optax.sgd(0.1), max_norm=None, remat=remat)
    own = jax.eval_shape(stage.init, KEY)
    x = jax.ShapeDtypeStruct((TIME, ROWS, SIZE), jnp.float32)
    state = jax.eval_shape(lambda: stage.layer.init_state(ROWS))
    unit = Unit()
    state, y, saved = jax.eval_shape(stage.forward, own, (), x, state, unit, None)
    backward = functools.partial(stage.backward, time=TIME)
    return saved, jax.eval_shape(backward, own, (), saved, y, state, unit, None), (x, state)


def test_what_f_saves() -> None:
    """With "stage" its input and states, with "layer" the input and state of each row."""
    _, _, (x, state) = stage_structs("none")
    saved = {remat: nbytes(stage_structs(remat)[0]) for remat in REMAT}
    assert saved["stage"] == nbytes(x) + nbytes(state)
    assert saved["layer"] == 3 * nbytes(x) + nbytes(state)
    # An LSTM saves x, four gates, c and y.
    assert saved["head"] == saved["none"] == 3 * 7 * nbytes(x) + nbytes(state)


def test_a_lean_variant_runs_in_place_of_its_row() -> None:
    """With "layer" B does not run its F again; with "stage" that is the whole chain's."""
    lstm, head = mp_lstm.lstm_layer(SIZE, SIZE), mp_lstm.softmax_head(SIZE, examples.VOCAB)
    x, ctx = jnp.ones((TIME, ROWS, SIZE)), Context(targets=jnp.zeros((TIME, ROWS), int))

    def saved(remat: str) -> Any:
        layer = chain_with(remat, [lstm, head])
        assert layer.lean is None or remat == "none"
        return layer.forward(layer.init(KEY), x, layer.init_state(ROWS), ctx)[2]

    kinds = {remat: [type(part) for part in saved(remat)] for remat in ("none", "head", "layer")}
    assert kinds == {
        "none": [SavedByLSTM, heads.Saved],
        "head": [SavedByLSTM, lean_head.Saved],
        "layer": [SavedByRemat, lean_head.Saved],
    }
    assert isinstance(saved("stage"), SavedByRemat)
    assert rematerialised(head).lean is None


@pytest.mark.parametrize("remat", ["head", "stage", "layer"])
def test_what_b_gives_does_not_change(remat: str) -> None:
    plain, again = stage_structs("none")[1], stage_structs(remat)[1]
    assert jax.tree.structure(plain) == jax.tree.structure(again)
    assert [leaf.shape for leaf in jax.tree.leaves(plain)] == [leaf.shape for leaf in jax.tree.leaves(again)]


def test_an_input_in_the_tape_is_the_saved_one() -> None:
    """So the host puts it back, and the program makes no copy of it."""
    layer = rematerialised(mp_lstm.dense(SIZE, 2))
    params = layer.init(KEY)

    def backward(x: Any, dy: Any) -> Any:
        _, _, saved = layer.forward(params, x, (), Context())
        return layer.backward(params, saved, dy, (), Context())[2].x

    x, dy = jnp.ones((TIME, ROWS, SIZE)), jnp.ones((TIME, ROWS, 2))
    jaxpr = jax.make_jaxpr(backward)(x, dy).jaxpr
    assert jaxpr.outvars == [jaxpr.invars[0]]


@pytest.mark.parametrize("value", [0.0, np.inf, -np.inf, np.nan])
def test_what_it_waits_for_does_not_change_the_input(value: float) -> None:
    """B computes F again once dy is there: were dy not finite, the tokens that F reads would still be the same."""
    layer = rematerialised(mp_lstm.embedding(7, SIZE))
    params, tokens = layer.init(KEY), jnp.array([[1, 2], [3, 6]])
    _, y, saved = layer.forward(params, tokens, (), Context())
    _, _, tape = layer.backward(params, saved, jnp.full(y.shape, value), (), Context())
    assert tape.tokens is tokens
    head = rematerialised(mp_lstm.loss_head(lambda x, targets, weights: (x * targets).sum()))
    x, ctx = jnp.ones((2, 2, 1)), Context(targets=jnp.full((2, 2, 1), 3.0))
    dx, _, _ = head.backward((), head.forward((), x, (), ctx)[2], jnp.float32(value), (), ctx)
    np.testing.assert_array_equal(dx, np.full((2, 2, 1), 3.0 * np.float32(value)))


def test_rows_are_computed_again_one_after_another() -> None:
    """With "layer" the program of B holds what one row saves, however many rows there are."""
    device, time, rows, size = jax.devices()[0], 16, 8, 32
    unit = time * rows * size * 4  # an LSTM saves five of these

    def temporaries(remat: str, layers: int) -> float:
        layer = chain_with(remat, [mp_lstm.lstm_layer(size, size)] * layers)
        params, state = jax.eval_shape(layer.init, KEY), jax.eval_shape(lambda: layer.init_state(rows))
        x = jax.ShapeDtypeStruct((time, rows, size), jnp.float32)
        state, y, saved = jax.eval_shape(layer.forward, params, x, state, Context())
        args = (params, saved, y, state, Context())
        options = compiler_options("backward", device, jax.make_jaxpr(layer.backward)(*args).jaxpr)
        analysis = jax.jit(layer.backward, compiler_options=options).lower(*args).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes / unit

    two, five = temporaries("layer", 2), temporaries("layer", 5)
    assert five < two + 1 < 12
    assert temporaries("stage", 5) > five + 2 * 5


def test_as_an_ordinary_function() -> None:
    """`apply`, and so `Model.loss`, takes such a layer like any other."""
    plain = chain([mp_lstm.dropout(0.4), mp_lstm.lstm_layer(SIZE, SIZE), mp_lstm.dense(SIZE, 2)])
    params, state = plain.init(KEY), plain.init_state(ROWS)
    x = jax.random.normal(KEY, (TIME, ROWS, SIZE))
    ctx = Context(key=KEY, mask=jnp.asarray(np.arange(TIME)[:, None] < np.array([6, 0, 2])), train=True)

    def gradient(layer: mp_lstm.Layer) -> Any:
        def scalar(params: Any, x: Any, state: Any) -> Any:
            state, y = apply(layer, params, x, state, ctx)
            return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves((state, y)))

        return jax.jit(jax.grad(scalar, argnums=(0, 1, 2)))(params, x, state)

    assert_close(gradient(rematerialised(plain)), gradient(plain), 1e-6)


def test_a_word_that_is_none_of_them() -> None:
    with pytest.raises(InputError, match="remat is 'all', one of none, head, layer, stage is wanted"):
        chain_with("all", [mp_lstm.dense(2, 2)])
