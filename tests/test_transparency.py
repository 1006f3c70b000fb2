"""Whatever the cut, the placement and the order: loss and gradients are those of the separately written reference.

`make test` draws 30 random cases, `make test-all` 300. What hypothesis prints for a case that fails is all there is to
know about it: `Case` says everything, numbers included.

Longer than most files: one rule, and all that it holds for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import examples
import mp_lstm
import original
import reference
from examples import VOCAB, by_row, random_batch, random_carry, random_params
from mp_lstm.layers import lean_head
from mp_lstm.runtime import verify
from reference import assert_close

Float64 = Callable[[], AbstractContextManager[None]]
EXAMPLES = settings.default.max_examples
# LSTM layers times batches of a window: what a case costs. There are large ones of each kind, in the gate none of both.
MOST_WORK = 15 if EXAMPLES >= 300 else 6
KEY = 42


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Heads that compute their logits again do so in more than one block here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lean_head, "BLOCK_ROWS", 3)
        yield


class BatchCase(NamedTuple):
    """One batch of a window. `lengths` and `resets` are None or given a row."""

    time: int
    rows: int
    lengths: tuple[int, ...] | None
    weighted: bool
    resets: tuple[bool, ...] | None


class Case(NamedTuple):
    """A model, a plan and a window of batches."""

    hidden: tuple[int, ...]
    embed: int
    regularised: dict[str, Any]
    tie: bool
    residual_from: int | None
    partition: tuple[int, ...]
    devices: tuple[int, ...]
    batch_size: int
    lengths: tuple[int, ...]
    schedule: str
    remat: str
    chunk: int | None
    microbatches: int | None
    normalize: str
    batches: tuple[BatchCase, ...]
    counter: int
    seed: int

    def model(self, dtype: Any) -> mp_lstm.Model:
        return mp_lstm.language_model(
            vocab=VOCAB,
            embed=self.embed,
            hidden=self.hidden,
            layers=len(self.hidden),
            tie=self.tie,
            residual_from=self.residual_from,
            dtype=dtype,
            **self.regularised,
        )

    def spec(self) -> reference.Spec:
        return reference.Spec(len(self.hidden), tie=self.tie, residual_from=self.residual_from, **self.regularised)

    def plan(self, model: mp_lstm.Model) -> mp_lstm.Plan:
        return mp_lstm.make_plan(
            model,
            batch_size=self.batch_size,
            lengths=self.lengths,
            devices=[jax.devices()[device] for device in self.devices],
            partition=self.partition,
            schedule=self.schedule,
            remat=self.remat,
            chunk=self.chunk,
            microbatches=self.microbatches,
        )

    def window(self) -> list[mp_lstm.Batch]:
        rng = np.random.default_rng(self.seed)
        return [
            random_batch(rng, b.time, b.rows, lengths=b.lengths, weighted=b.weighted, resets=b.resets)
            for b in self.batches
        ]


@st.composite
def batch_cases(draw: st.DrawFn, time: int, rows: int, *, carried: bool) -> BatchCase:
    if not carried:  # a batch may be smaller than its bucket and the plan
        time, rows = draw(st.integers(1, time)), draw(st.integers(1, rows))
    lengths = st.tuples(*[st.integers(0, time)] * rows)
    return BatchCase(
        time=time,
        rows=rows,
        lengths=draw(st.none() | lengths),
        weighted=draw(st.booleans()),
        resets=draw(st.tuples(*[st.booleans()] * rows)) if carried else None,
    )


def regularisers() -> st.SearchStrategy[dict[str, Any]]:
    """None, plain dropout, or some of all that there are; names as in `mp_lstm.language_model`."""

    def rates(*values: float | None) -> st.SearchStrategy[float | None]:
        return st.sampled_from(values)

    some = {
        "dropout": rates(0.0, 0.3),
        "dropout_input": rates(None, 0.0, 0.2),
        "dropout_output": rates(None, 0.0, 0.4),
        "dropout_words": rates(0.0, 0.3),
        "dropout_locked": st.booleans(),
        "weight_drop": rates(0.0, 0.5),
        "activation_reg": rates(0.0, 2.0),
        "temporal_reg": rates(0.0, 1.0),
    }
    return st.just({}) | st.just({"dropout": 0.3}) | st.fixed_dictionaries(some)


@st.composite
def cases(draw: st.DrawFn, *, most_layers: int = 5) -> Case:
    layers = draw(st.integers(1, most_layers))
    rows = layers + 2
    # Sizes all equal, so that ties and residual connections act, or all of their own.
    if draw(st.booleans()):
        embed = draw(st.integers(2, 5))
        hidden = (embed,) * layers
    else:
        embed, *hidden = draw(st.tuples(*[st.integers(1, 5)] * (layers + 1)))
    stages = draw(st.integers(1, min(4, rows)))
    cuts = draw(st.lists(st.integers(1, rows - 1), min_size=stages - 1, max_size=stages - 1, unique=True).map(sorted))
    batch_size = draw(st.integers(1, 5))
    lengths = tuple(sorted(draw(st.sets(st.integers(1, 7), min_size=1, max_size=2))))
    schedule = draw(st.sampled_from(("wavefront", "zero_bubble", "one_f_one_b", "gpipe", "wavefront", "serial")))
    cut = schedule != "serial"
    carried = draw(st.booleans())
    window = draw(st.lists(st.sampled_from(lengths), min_size=1, max_size=min(3, max(1, MOST_WORK // layers))))
    return Case(
        hidden=tuple(hidden),
        embed=embed,
        regularised=draw(regularisers()),
        tie=hidden[-1] == embed and draw(st.booleans()),
        residual_from=draw(st.none() | st.integers(1, layers)),
        partition=tuple(np.diff([0, *cuts, rows]).tolist()),
        devices=draw(st.tuples(*[st.integers(0, 3)] * stages)),
        batch_size=batch_size,
        lengths=lengths,
        schedule=schedule,
        remat=draw(st.sampled_from(("none", "none", "head", "layer", "stage"))),
        chunk=draw(st.none() | st.integers(1, lengths[-1])) if cut else None,
        microbatches=draw(st.none() | st.integers(1, batch_size)) if cut else None,
        normalize=draw(st.sampled_from(["tokens", "rows"])),
        batches=tuple(draw(batch_cases(length, batch_size, carried=carried)) for length in window),
        counter=draw(st.integers(0, 1000)),
        seed=draw(st.integers(0, 1000)),
    )


def real_rows(batch: mp_lstm.Batch) -> int:
    """Rows of which a step counts."""
    time, rows = batch.inputs.shape
    lengths = np.full(rows, time) if batch.lengths is None else batch.lengths
    weights = np.ones((time, rows)) if batch.weights is None else batch.weights
    return int((weights * (np.arange(time)[:, None] < lengths) != 0).any(axis=0).sum())


def check(case: Case, dtype: Any) -> None:
    """One step's loss, gradient, norm and carried state against the reference's."""
    tolerance = reference.TOLERANCE[np.dtype(dtype).name]
    model, key, window = case.model(dtype), jax.random.key(KEY), case.window()
    params = random_params(model, case.seed)
    carry = random_carry(model, case.batch_size, case.seed)
    carries = any(batch.resets is not None for batch in window)
    expected = reference.run(
        case.spec(),
        params,
        window,
        key=key,
        counter=case.counter,
        carry=reference.lstm_states(carry) if carries else None,
    )

    optimizer = examples.recorder()
    pipe = mp_lstm.make_pipeline(model, case.plan(model), optimizer, normalize=case.normalize)
    state = pipe.restore(params, [optimizer.init(row) for row in params], key=key, carry=carry, batches=case.counter)
    after, metrics = pipe.step(state, window)

    loss, by_token = expected.mean()
    rows = sum(map(real_rows, window)) or 1
    gradients = by_token if case.normalize == "tokens" else jax.tree.map(lambda leaf: leaf / rows, expected.gradients)
    assert_close(by_row([stage.optimizer for stage in after.stages]), gradients, tolerance)
    assert_close(metrics.loss, loss, tolerance)
    assert_close(metrics.grad_norm, optax.tree.norm(gradients), tolerance)
    states = expected.states[-1] if carries else reference.lstm_states(carry)
    assert_close(reference.lstm_states(after.carry), states, tolerance)
    assert len(pipe.programs) <= pipe.programs.bound


@given(case=cases())
def test_any_plan_equals_the_reference(float64: Float64, case: Case) -> None:
    with float64():
        check(case, np.float64)


@settings(max_examples=EXAMPLES // 6)
@given(case=cases(most_layers=3))
def test_in_float32(case: Case) -> None:
    check(case, np.float32)


# Several steps


def windows(plan: mp_lstm.Plan, sizes: list[tuple[int, ...]]) -> list[list[mp_lstm.Batch]]:
    """Windows of padded batches of these bucket lengths."""
    rng = np.random.default_rng(5)
    rows = plan.batch_size

    def lengths(time: int) -> list[int]:
        return rng.integers(0, time + 1, rows).tolist()

    return [[random_batch(rng, time, rows, lengths=lengths(time)) for time in window] for window in sizes]


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.5, momentum=0.9), optax.adam(0.1)],
    ids=["momentum", "adam"],
)
def test_two_clipped_updates_equal_optax_on_one_device(x64: None, optimizer: optax.GradientTransformation) -> None:
    """Dropout, a tied decoder on another stage, mixed buckets, a remainder: what could go apart in a second step."""
    spec = reference.Spec(layers=2, dropout=0.3, tie=True)
    sizes = {"vocab": VOCAB, "embed": 4, "hidden": 4, "layers": 2, "dropout": 0.3, "tie": True}
    model = mp_lstm.language_model(**sizes, dtype=jnp.float64)
    pipe = examples.pipeline(
        model,
        batch_size=3,
        lengths=(2, 5),
        optimizer=optimizer,
        partition=(1, 2, 1),
        devices=[jax.devices()[device] for device in (2, 0, 2)],
        chunk=2,
        microbatches=2,
        options={"max_norm": 0.1, "every_k": 2},
    )
    key, params = jax.random.key(KEY), random_params(model)
    state, norms = pipe.load(params, key=key), []
    steps = windows(pipe.plan, [(2, 5), (5,)])
    for window in steps:
        state, metrics = pipe.step(state, window)
        norms.append(float(metrics.grad_norm))

    whole = optax.chain(optax.clip_by_global_norm(0.1), optimizer)
    update = jax.jit(whole.update)
    expected, kept, counter = params, whole.init(params), 0
    for window, norm in zip(steps, norms, strict=True):
        _, gradients = reference.run(spec, expected, window, key=key, counter=counter).mean()
        assert_close(norm, optax.tree.norm(gradients), 1e-10)
        assert norm > 0.1, "the test is about clipped steps"
        updates, kept = update(gradients, kept, expected)
        expected = jax.tree.map(np.add, expected, updates)
        counter += len(window)
    assert_close(pipe.params(state), expected, 1e-10)
    assert (state.step, state.batches) == (2, 3)


def test_rounded_products_are_the_same_for_any_plan(x64: None) -> None:
    """With operands in bfloat16 and sums in float64: each stage and unit rounds what one stage rounds."""
    sizes = {"vocab": VOCAB, "embed": 4, "hidden": 4, "layers": 1, "dropout": 0.3, "tie": True}
    model = mp_lstm.language_model(**sizes, products=jnp.bfloat16, dtype=jnp.float64)
    params, batch = random_params(model), random_batch(np.random.default_rng(0), 6, 4, lengths=[6, 0, 3, 5])

    def run(**planned: Any) -> Any:
        pipe = examples.pipeline(model, lengths=(6,), **planned)
        return pipe.value_and_grad(pipe.load(params, key=jax.random.key(KEY)), batch)

    one = run(devices=jax.devices()[:1], schedule="serial")
    assert_close(run(partition=(2, 1), chunk=2, microbatches=2), one, 1e-10)
    exact = mp_lstm.language_model(**sizes, dtype=jnp.float64).loss(params, batch, key=jax.random.key(KEY))[0]
    assert 1e-6 < abs(one[0] / exact - 1) < 1e-2


def test_the_originals_run_through_two_stages() -> None:
    """Losses, norms, gradients and weights of its five steps, to the accuracy of float32: see tests/original.py."""
    run = original.load()
    steps, rows = run.batch.inputs.shape
    pipe = examples.pipeline(
        run.model,
        batch_size=rows,
        lengths=(steps,),
        optimizer=optax.sgd(run.learning_rate),
        partition=(2, 3),
        chunk=2,
        microbatches=3,
        options={"max_norm": run.max_norm, "normalize": "rows"},
    )
    state = pipe.load(run.initial)
    loss, gradients = pipe.value_and_grad(state, run.batch)
    assert_close(loss * (steps * rows), run.losses[0].sum(), 2e-6)
    assert_close(jax.tree.map(lambda leaf: np.asarray(leaf) * rows, gradients), run.gradients, 2e-5)
    for k in range(original.STEPS):
        state, metrics = pipe.step(state, run.batch)
        assert_close(metrics.loss * (steps * rows), run.losses[k].sum(), 2e-6)
        assert_close(metrics.grad_norm, run.norms[k], 1e-5)
    assert_close(pipe.params(state), run.final, 2e-5)


# Layers of a user's own, differentiated by JAX


def smoothed(inputs: int, hidden: int) -> mp_lstm.Layer:
    """A cell that is a plain function, whose carry is a dict."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        draw = jax.random.normal(key, (inputs + hidden, hidden))
        return {"kernel": draw, "rate": jnp.zeros(())}

    def cell(params: dict[str, jax.Array], carry: dict[str, jax.Array], x: jax.Array) -> Any:
        old, rate = carry["mean"], jax.nn.sigmoid(params["rate"])
        new = rate * old + (1 - rate) * jnp.tanh(jnp.concatenate([x, old], axis=1) @ params["kernel"])
        return {"mean": new}, new

    return mp_lstm.recurrent(
        cell, init=init, init_state=lambda rows: {"mean": jnp.zeros((rows, hidden))}, name="smoothed"
    )


def scaled(size: int) -> mp_lstm.Layer:
    """A layer from a function of a whole chunk."""

    def f(params: Any, x: jax.Array, state: tuple[()]) -> Any:
        return state, jnp.tanh(params["scale"][None, None, :] * x)

    return mp_lstm.from_function(lambda key: {"scale": jax.random.normal(key, (size,))}, f, name="scaled")


def own_layers() -> mp_lstm.Model:
    layers = [
        mp_lstm.embedding(VOCAB, 3, dtype=jnp.float64),
        mp_lstm.recurrent(flax.linen.GRUCell(features=4, param_dtype=jnp.float64), inputs=3, name="gru"),
        scaled(4),
        mp_lstm.dropout(0.3),
        smoothed(4, 3),
        mp_lstm.softmax_head(3, VOCAB, dtype=jnp.float64),
    ]
    return mp_lstm.sequential(layers)


@settings(max_examples=EXAMPLES // 10)
@given(
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True).map(sorted),
    devices=st.tuples(*[st.integers(0, 3)] * 4),
    chunk=st.integers(1, 5),
    microbatches=st.integers(1, 3),
    batches=st.tuples(batch_cases(5, 3, carried=True), batch_cases(5, 3, carried=True)),
)
def test_a_users_own_layers(
    float64: Float64,
    cuts: list[int],
    devices: tuple[int, ...],
    chunk: int,
    microbatches: int,
    batches: tuple[BatchCase, ...],
) -> None:
    """A flax cell, a cell that is a function, a plain function: against `jax.grad` of the plain forward."""
    with float64():
        model, key = own_layers(), jax.random.key(KEY)
        partition = np.diff([0, *cuts, 5]).tolist()
        placed = [jax.devices()[device] for device in devices[: len(partition)]]
        cutting = {"chunk": chunk, "microbatches": microbatches, "schedule": "wavefront"}
        optimizer = examples.recorder()
        pipe = examples.pipeline(
            model, batch_size=3, lengths=(5,), partition=partition, devices=placed, optimizer=optimizer, **cutting
        )
        rng = np.random.default_rng(0)
        window = [
            random_batch(rng, b.time, b.rows, lengths=b.lengths, weighted=b.weighted, resets=b.resets) for b in batches
        ]
        params, carry = random_params(model), random_carry(model, 3)
        state = pipe.restore(params, [optimizer.init(row) for row in params], key=key, carry=carry)
        after, metrics = pipe.step(state, window)
        loss, gradients = verify.reference(model, params, window, key=key, counter=0, carry=carry)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"float64"}
        assert_close(metrics.loss, loss, 1e-10)
        assert_close(by_row([stage.optimizer for stage in after.stages]), gradients, 1e-10)


def test_dense_features_and_a_dense_target() -> None:
    """Inputs are any pytree: here a dict of frames and of tokens, read by a layer from a function."""

    def read(params: Any, x: Any, state: tuple[()]) -> Any:
        return state, jnp.concatenate([x["frames"], params["table"][x["tokens"]]], axis=-1)

    layers = [
        mp_lstm.from_function(lambda key: {"table": jax.random.normal(key, (VOCAB, 2))}, read, name="read"),
        mp_lstm.lstm_layer(5, 4),
        mp_lstm.dense(4, 2),
    ]
    model = mp_lstm.sequential(layers, loss=mp_lstm.squared_error)
    rng = np.random.default_rng(0)
    batch = mp_lstm.Batch(
        inputs={
            "frames": rng.normal(size=(5, 3, 3)).astype(np.float32),
            "tokens": rng.integers(0, VOCAB, (5, 3)),
        },
        targets=rng.normal(size=(5, 3, 2)).astype(np.float32),
        lengths=np.array([5, 0, 2]),
    )
    pipe = examples.pipeline(model, batch_size=3, lengths=(5,), partition=(1, 2), chunk=2, microbatches=2)
    params, key = random_params(model), jax.random.key(KEY)
    loss, gradients = pipe.value_and_grad(pipe.load(params, key=key), batch)
    expected = verify.reference(model, params, [batch], key=key, counter=0, carry=None)
    assert_close((loss, gradients), expected, 2e-5)
