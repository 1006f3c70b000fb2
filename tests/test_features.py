"""Other tasks than text: dense features in, and heads that tag steps, label sequences, or predict numbers.

The reference is written anew: a textbook scan over all rows, padding and all, of which only real steps are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import examples
import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.training.metrics import counted_compilations
from reference import assert_close

TIME, ROWS, FEATURES, HIDDEN, CLASSES = 6, 4, 3, 4, 5
FLOAT = {"dtype": jnp.float64}


def pinball() -> mp_lstm.Layer:
    """A user's own head, with parameters: the median of a value, and of its absolute."""

    def init(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (HIDDEN, 2), jnp.float64)

    def f(params: jax.Array, x: jax.Array, state: tuple[()], ctx: Any) -> Any:
        predictions = jnp.einsum("tbh,hk->tbk", x, params)
        if ctx.targets is None:
            return state, predictions
        values = jnp.stack([ctx.targets["value"], jnp.abs(ctx.targets["value"])], axis=-1)
        return state, (ctx.weights * jnp.abs(predictions - values).sum(axis=-1)).sum()

    return mp_lstm.from_function(init, f, with_context=True, name="pinball")


class Task(NamedTuple):
    """A head, its loss a step in the textbook's words, and how a batch is weighted."""

    layers: Callable[[], list[mp_lstm.Layer]]
    targets: Callable[[np.random.Generator], Any]
    losses: Callable[[Any, Any, Any], Any]  # (the head's parameters, y, targets) -> [T, B]
    last_only: bool = False


def classes(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, CLASSES, (TIME, ROWS))


def class_losses(params: Any, y: Any, targets: Any) -> Any:
    logits = y @ params.kernel + params.bias[None, None, :]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


TASKS = {
    "tags": Task(lambda: [mp_lstm.softmax_head(HIDDEN, CLASSES, **FLOAT)], classes, class_losses),
    "labels": Task(lambda: [mp_lstm.softmax_head(HIDDEN, CLASSES, **FLOAT)], classes, class_losses, last_only=True),
    "numbers": Task(
        lambda: [mp_lstm.dense(HIDDEN, 2, **FLOAT), mp_lstm.loss_head(mp_lstm.squared_error)],
        lambda rng: rng.normal(size=(TIME, ROWS, 2)),
        lambda params, y, targets: jnp.square(y @ params[0].kernel + params[0].bias[None, None, :] - targets).mean(-1),
    ),
    "own": Task(
        lambda: [pinball()],
        lambda rng: {"value": rng.normal(size=(TIME, ROWS))},
        lambda params, y, targets: (
            jnp.abs((y @ params)[:, :, 0] - targets["value"])
            + jnp.abs((y @ params)[:, :, 1] - jnp.abs(targets["value"]))
        ),
    ),
}


SLOW = ("tags", "numbers")


class Cut(NamedTuple):
    """How the model and a batch are cut."""

    partition: tuple[int, ...]
    devices: tuple[int, ...]
    schedule: str
    chunk: int
    microbatches: int
    lengths: tuple[int, ...]


CUTS = {
    "tags": Cut((2, 2), (1, 0), "wavefront", 4, 3, (6, 0, 1, 5)),
    "labels": Cut((1, 2, 1), (2, 0, 2), "wavefront", 2, 1, (6, 0, 2, 3)),  # rows end in all chunks
    "numbers": Cut((3, 1), (0, 3), "one_f_one_b", 6, 4, (3, 6, 0, 6)),
    "own": Cut((2, 2), (0, 1), "zero_bubble", 3, 2, (4, 3, 6, 0)),
}


def make_model(task: Task) -> mp_lstm.Model:
    layers = [
        mp_lstm.dense(FEATURES, HIDDEN, name="frames", **FLOAT),
        mp_lstm.lstm_layer(HIDDEN, HIDDEN, name="lstm 1", **FLOAT),
        mp_lstm.lstm_layer(HIDDEN, HIDDEN, name="lstm 2", **FLOAT),
        *task.layers(),
    ]
    return mp_lstm.sequential(layers)


def textbook(task: Task, params: Any, inputs: Any, targets: Any, lengths: Any) -> Any:
    """Sum of the losses over real steps, or over the last of each row; and how many these are."""
    frames, *lstms, head = params
    y = inputs @ frames.kernel + frames.bias[None, None, :]
    for lstm in lstms:

        def cell(state: Any, x: Any, lstm: Any = lstm) -> Any:
            h, c = state
            i, f, g, o = jnp.split(x @ lstm.kernel + h @ lstm.recurrent_kernel + lstm.bias[None, :], 4, axis=1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        _, y = jax.lax.scan(cell, (jnp.zeros((ROWS, HIDDEN)),) * 2, y)
    losses = task.losses(head, y, targets)
    steps = jnp.arange(TIME)[:, None]
    counted = steps == lengths[None, :] - 1 if task.last_only else steps < lengths[None, :]
    return jnp.where(counted, losses, 0).sum(), counted.sum()


def check(name: str, cut: Cut) -> None:
    task = TASKS[name]
    model, rng = make_model(task), np.random.default_rng(3)
    inputs, targets, lengths = rng.normal(size=(TIME, ROWS, FEATURES)), task.targets(rng), np.array(cut.lengths)
    params = examples.random_params(model)
    run = jax.value_and_grad(lambda params: textbook(task, params, inputs, targets, lengths), has_aux=True)
    (total, count), gradients = jax.jit(run)(params)

    padding = np.arange(TIME)[:, None] >= lengths
    inputs = np.where(padding[:, :, None], np.nan, inputs)  # not to be read
    batch = mp_lstm.Batch(inputs, targets, lengths=lengths)
    pipe = examples.pipeline(
        model,
        batch_size=ROWS,
        lengths=(TIME,),
        devices=[jax.devices()[device] for device in cut.devices],
        partition=cut.partition,
        schedule=cut.schedule,
        chunk=cut.chunk,
        microbatches=cut.microbatches,
    )
    loss, found = pipe.value_and_grad(pipe.load(params), mp_lstm.last_step_only(batch) if task.last_only else batch)
    scale = max(int(count), 1)
    assert_close(loss, total / scale, 1e-10)
    assert_close(found, jax.tree.map(lambda leaf: leaf / scale, gradients), 1e-10)


# Tags are what language models predict, and numbers are in test_transparency too.
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in TASKS])
def test_every_head_equals_the_textbook(x64: None, name: str) -> None:
    check(name, CUTS[name])


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    ends = draw(st.lists(st.integers(1, 3), max_size=3, unique=True).map(sorted))
    return Cut(
        partition=tuple(np.diff([0, *ends, 4]).tolist()),
        devices=tuple(draw(st.integers(0, 3)) for _ in range(len(ends) + 1)),
        schedule=draw(st.sampled_from(("wavefront", "zero_bubble", "one_f_one_b", "gpipe"))),
        chunk=draw(st.integers(1, TIME)),
        microbatches=draw(st.integers(1, ROWS)),
        lengths=draw(st.tuples(*[st.integers(0, TIME)] * ROWS)),
    )


@pytest.mark.slow
@settings(max_examples=max(1, settings.default.max_examples // 20))
@given(name=st.sampled_from(sorted(TASKS)), cut=cuts())
def test_every_head_equals_the_textbook_however_it_is_cut(
    float64: Callable[[], AbstractContextManager[None]], name: str, cut: Cut
) -> None:
    with float64():
        check(name, cut)


def test_weights_still_count_at_the_last_step() -> None:
    batch = mp_lstm.Batch(
        np.zeros((2, 3), int), weights=np.array([[5.0, 6.0, 7.0], [2.0, 3.0, 4.0]]), lengths=[2, 1, 0]
    )
    assert mp_lstm.last_step_only(batch).weights.tolist() == [[0, 6, 0], [2, 0, 0]]
    assert mp_lstm.last_step_only(batch._replace(lengths=None)).weights.tolist() == [[0, 0, 0], [2, 3, 4]]


def test_an_own_head_predicts(x64: None) -> None:
    model = make_model(TASKS["own"])
    pipe = examples.pipeline(model, batch_size=ROWS, lengths=(TIME,))
    predictions, _ = pipe.infer(pipe.load(examples.random_params(model)), np.ones((TIME, ROWS, FEATURES)))
    assert predictions.shape == (TIME, ROWS, 2)


def test_sequences_of_features_go_the_whole_way(devices: list[jax.Device]) -> None:
    """Buckets, plan, warm-up, steps, evaluation: nothing on the way needs tokens."""
    rng = np.random.default_rng(0)
    frames = [rng.normal(size=(time, FEATURES)).astype(np.float32) for time in (3, 4, 7, 2, 8, 4, 1)]
    labels = [np.full(len(part), part.sum() > 0, np.int32) for part in frames]
    source = mp_lstm.data.sequence_batches(frames, labels, (4, 8), 3)
    batches = [mp_lstm.last_step_only(batch) for _, batch in mp_lstm.data.iterate(source, epochs=1)]
    model = mp_lstm.sequential([mp_lstm.lstm_layer(FEATURES, HIDDEN), mp_lstm.softmax_head(HIDDEN, 2)])
    plan = mp_lstm.make_plan(model, batch_size=3, lengths=source.buckets, devices=devices[:2], chunk=2)
    pipe = mp_lstm.make_pipeline(model, plan, optax.adam(0.05))
    pipe.warm_up(batches)
    state = pipe.init(jax.random.key(0))
    with counted_compilations() as compiled:
        metrics = [pipe.evaluate(state, batch) for batch in batches]
        first = sum(float(one.loss) * one.weight for one in metrics)
        for _ in range(10):
            for window in pipe.prefetch(batches):
                state, _ = pipe.step(state, window)
        last = sum(float(one.loss) * one.weight for one in (pipe.evaluate(state, batch) for batch in batches))
    assert compiled() == 0
    assert sum(one.tokens for one in metrics) == len(frames)
    assert last < first / 2


def test_warming_up_without_batches_says_what_is_missing(devices: list[jax.Device]) -> None:
    model = mp_lstm.sequential([mp_lstm.lstm_layer(FEATURES, HIDDEN), mp_lstm.softmax_head(HIDDEN, 2)])
    with pytest.raises(
        InputError, match=r"^warm_up\(\) makes up tokens: pass it a batch of each bucket \(lstm: its input"
    ):
        examples.pipeline(model).warm_up()


@pytest.mark.parametrize("use", ["loss", "step", "evaluate", "value_and_grad", "verify", "warm_up"])
def test_a_model_without_a_loss_says_what_it_lacks(use: str) -> None:
    """Its step once raised an IndexError, and its loss was an array that nobody said was none."""
    model = mp_lstm.sequential([mp_lstm.lstm_layer(FEATURES, HIDDEN), mp_lstm.dense(HIDDEN, 2)])
    batch = mp_lstm.Batch(np.ones((TIME, ROWS, FEATURES), np.float32), np.ones((TIME, ROWS, 2), np.float32))
    pipe = examples.pipeline(model, batch_size=ROWS, lengths=(TIME,))
    state = pipe.load(params := examples.random_params(model))
    uses = {
        "loss": lambda: model.loss(params, batch),
        "step": lambda: pipe.step(state, batch),
        "evaluate": lambda: pipe.evaluate(state, batch),
        "value_and_grad": lambda: pipe.value_and_grad(state, batch),
        "verify": lambda: pipe.verify(state, batch),
        "warm_up": lambda: pipe.warm_up([batch]),
    }
    message = (
        r"^the model ends with dense, which gives float32 \[\d, \d, 2\], wanted is the summed loss, one "
        r"number: pass sequential\(\.\.\., loss=\.\.\.\), or end with a head"
    )
    with pytest.raises(InputError, match=message):
        uses[use]()
    if use != "step":  # which consumed the state; predictions need no loss
        assert pipe.infer(state, batch.inputs)[0].shape == (TIME, ROWS, 2)
