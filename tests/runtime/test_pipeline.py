"""What a pipeline's methods promise, beside that they compute the right numbers (tests/test_transparency.py).

Long, because a pipeline has a dozen methods, and what each refuses is tested beside what it does.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import examples
import mp_lstm
import reference
from examples import SIZES, by_row, padded, random_batch, random_carry, random_params
from mp_lstm.data import ContiguousBatches, SentenceBatches, Split, iterate
from mp_lstm.errors import InputError
from mp_lstm.runtime import programs
from mp_lstm.runtime.placement import structs
from mp_lstm.training.metrics import counted_compilations
from reference import assert_close

SPEC = reference.Spec(layers=2, dropout=0.3, tie=True)
TIED: dict[str, Any] = SIZES | {"embed": 4, "dropout": 0.3, "tie": True}
KEY = jax.random.key(9)


@pytest.fixture(scope="module")
def pipe() -> mp_lstm.Pipeline:
    """Buckets 3 and 6 in chunks of 3, micro-batches of 2, 1 and 1 rows, a tied decoder on the other stage."""
    model = mp_lstm.language_model(**TIED)
    options = {"donate": False}
    optimizer = optax.sgd(0.1, momentum=0.9)
    plan = {"lengths": (3, 6), "chunk": 3, "microbatches": 3, "partition": (2, 2)}
    return examples.pipeline(model, optimizer=optimizer, options=options, **plan)


@pytest.fixture(scope="module")
def params(pipe: mp_lstm.Pipeline) -> Any:
    return random_params(pipe.model)


@pytest.fixture(scope="module")
def state(pipe: mp_lstm.Pipeline, params: Any) -> mp_lstm.State:
    return pipe.load(params, key=KEY)


BATCH = random_batch(np.random.default_rng(0), 6, 4, lengths=[6, 2, 0, 5])


# States


def test_a_plan_for_another_size_is_refused(devices: list[jax.Device]) -> None:
    """Its memory and times, and so the choice of its partition, were those of another model with the same rows."""
    planned, model = (mp_lstm.language_model(**examples.SIZES | {"hidden": size}) for size in (8, 4))
    plan = mp_lstm.make_plan(planned, batch_size=4, lengths=(8,), devices=devices[:2])
    with pytest.raises(
        InputError, match=r"^the plan is for a model whose lstm 1 has 384 parameters, this one's has 128: "
    ):
        mp_lstm.make_pipeline(model, plan, optax.sgd(0.1))


def test_init_draws_what_the_model_does(pipe: mp_lstm.Pipeline) -> None:
    """To the last bits: a stage's program fuses its arithmetic in its own way."""
    key = jax.random.key(4)
    assert_close(pipe.params(pipe.init(key)), jax.jit(pipe.model.init)(key), 1e-5)


def test_parameters_go_in_and_come_out(pipe: mp_lstm.Pipeline, params: Any) -> None:
    """As copies: the state is donated, what the user holds is not."""
    before = jax.tree.map(np.copy, params)
    state = pipe.load(params)
    first = pipe.params(state)
    assert_close(first, params, 0.0)
    after, _ = pipe.step(state, BATCH)
    assert_close((first, params), (before, before), 0.0)
    assert all((a != b).any() for a, b in zip(*map(jax.tree.leaves, (pipe.params(after), params)), strict=True))


def test_a_state_is_restored_from_parts_by_row(pipe: mp_lstm.Pipeline, state: mp_lstm.State) -> None:
    """And goes on as the other does, on another partition too."""
    batch = BATCH._replace(resets=np.zeros(4, bool))
    after, _ = pipe.step(state, batch)
    after = dataclasses.replace(after, rate=0.5)
    assert after.carry is not None
    parts = jax.tree.map(
        np.array, {"optimizer": by_row([s.optimizer for s in after.stages]), "carry": by_row(after.carry)}
    )
    other = examples.pipeline(pipe.model, lengths=(3, 6), partition=(1, 3), optimizer=optax.sgd(0.1, momentum=0.9))
    numbers = {"key": after.key, "step": after.step, "batches": after.batches, "rate": after.rate}
    continued = []
    for some in (pipe, other):
        restored = some.restore(pipe.params(after), **parts, **numbers)
        assert (restored.step, restored.batches, restored.rate) == (1, 1, 0.5)
        continued.append(some.params(some.step(restored, batch)[0]))
    assert_close(continued[0], pipe.params(pipe.step(after, batch)[0]), 0.0)
    assert_close(continued[1], continued[0], 2e-5)


def test_abstract_states_have_the_shapes_of_real_ones(pipe: mp_lstm.Pipeline, state: mp_lstm.State) -> None:
    assert pipe.abstract_state().stages == structs(state.stages)


def test_the_old_state_lives_where_it_is_not_donated(pipe: mp_lstm.Pipeline, state: mp_lstm.State) -> None:
    first, one = pipe.step(state, BATCH)
    second, two = pipe.step(state, BATCH)
    assert_close(pipe.params(first), pipe.params(second), 0.0)
    assert one.loss == two.loss
    assert (state.step, first.step, first.batches) == (0, 1, 1)


def test_the_rate_scales_updates(pipe: mp_lstm.Pipeline, state: mp_lstm.State, params: Any) -> None:
    def moved(rate: float) -> Any:
        after, _ = pipe.step(dataclasses.replace(state, rate=rate), BATCH)
        return jax.tree.map(np.subtract, pipe.params(after), params)

    assert all((leaf == 0).all() for leaf in jax.tree.leaves(moved(0.0)))
    # large factors, for differences of float32 numbers are no more accurate than the numbers
    assert_close(moved(64.0), jax.tree.map(lambda leaf: 0.25 * leaf, moved(256.0)), 2e-5)


# Steps


def test_value_and_grad(pipe: mp_lstm.Pipeline, state: mp_lstm.State, params: Any) -> None:
    """The gradient of a step, each row's on its stage's device."""
    window = [BATCH, random_batch(np.random.default_rng(1), 3, 4)]
    loss, gradients = pipe.value_and_grad(state, window)
    assert_close((loss, gradients), reference.run(SPEC, params, window, key=KEY).mean(), 2e-5)
    for stage in pipe.stages:
        for row in stage.rows:
            assert {d for leaf in jax.tree.leaves(gradients[row]) for d in leaf.devices()} == {
                pipe.plan.devices[stage.number]
            }


def test_a_step_that_is_not_finite_changes_nothing_and_says_where(pipe: mp_lstm.Pipeline, params: Any) -> None:
    broken = jax.tree.map(np.copy, params)
    broken[-1].bias[3] = np.nan  # in the last stage; everything below gets its gradient from there
    state = pipe.load(broken)
    after, metrics = pipe.step(state, BATCH)
    assert not math.isfinite(float(metrics.loss))
    assert metrics.not_finite() == [0, 1]
    jax.tree.map(np.testing.assert_array_equal, pipe.params(after), broken)
    assert (after.step, after.batches) == (1, 1)


def test_a_step_whose_loss_is_not_finite_changes_nothing() -> None:
    """Though every gradient is finite: the trainer says that no parameters changed, and they did."""

    def loss(predictions: Any, targets: Any, weights: Any) -> Any:
        return (weights * predictions.mean(axis=-1) * targets).sum() + jnp.inf

    model = mp_lstm.sequential([mp_lstm.lstm_layer(3, 4), mp_lstm.dense(4, 2)], loss=loss)
    pipe = examples.pipeline(model, lengths=(3,), partition=(1, 1))
    params = random_params(model)
    after, metrics = pipe.step(pipe.load(params), mp_lstm.Batch(np.ones((3, 4, 3), np.float32), np.ones((3, 4))))
    assert np.isfinite(metrics.square_norms).all()
    assert (float(metrics.loss), math.isnan(float(metrics.grad_norm))) == (math.inf, True)
    assert metrics.not_finite() == [1]
    jax.tree.map(np.testing.assert_array_equal, pipe.params(after), params)


def test_targets_that_do_not_count_are_not_looked_at() -> None:
    """NaN targets on padding made the loss NaN, and as the norm was finite the parameters moved."""
    model = mp_lstm.sequential([mp_lstm.lstm_layer(3, 6), mp_lstm.dense(6, 2)], loss=mp_lstm.squared_error)
    pipe = examples.pipeline(model, lengths=(4,), chunk=2, partition=(1, 1), options={"donate": False})
    rng = np.random.default_rng(0)
    inputs, targets = (rng.normal(size=(4, 4, size)).astype(np.float32) for size in (3, 2))
    weights = np.ones((4, 4))
    weights[0, 1] = 0
    batch = mp_lstm.Batch(inputs, targets, weights, lengths=np.array([2, 4, 4, 4]))
    absent = targets.copy()
    absent[2:, 0] = absent[0, 1] = np.nan
    state = pipe.load(random_params(model))
    (one, clean), (two, found) = (pipe.step(state, batch._replace(targets=given)) for given in (targets, absent))
    assert_close((found.loss, pipe.params(two)), (clean.loss, pipe.params(one)), 0.0)
    assert math.isfinite(float(found.loss))


def test_windows_of_every_k_batches_and_what_remains(pipe: mp_lstm.Pipeline) -> None:
    pairs = mp_lstm.make_pipeline(pipe.model, pipe.plan, optax.sgd(0.1), every_k=2)
    batches = [random_batch(np.random.default_rng(i), time, 4) for i, time in enumerate((3, 6, 6, 3, 3))]
    assert [window.lengths for window in pairs.prefetch(batches)] == [(3, 6), (6, 3), (3,)]
    assert [window.lengths for window in pipe.prefetch(batches)] == [(3,), (6,), (6,), (3,), (3,)]
    assert list(pipe.prefetch([])) == []


# Layers of a user's own whose gradients are not arrays of their own


def test_a_layer_whose_gradients_are_one_array(x64: None) -> None:
    """Two parameters that are only ever added have one gradient: it is added up, and donated, for each of them."""

    def f(params: Any, x: Any, state: Any) -> Any:
        return state, x + (params["a"] + params["b"])[None, None, :]

    zeros = jax.nn.initializers.zeros
    added = mp_lstm.from_function(lambda key: {"a": zeros(key, (3,)), "b": zeros(key, (3,))}, f, name="added")
    model = mp_lstm.sequential(
        [
            mp_lstm.embedding(examples.VOCAB, 3, dtype=jnp.float64),
            added,
            mp_lstm.softmax_head(3, examples.VOCAB, dtype=jnp.float64),
        ]
    )
    pipe = examples.pipeline(model, lengths=(6,), chunk=3, microbatches=2, partition=(2, 1))
    state = pipe.load(random_params(model))
    state, _ = pipe.step(state, BATCH)
    state, _ = pipe.step(state, BATCH)
    assert pipe.verify(state, BATCH).passed


def test_an_optimizer_whose_state_begins_as_the_parameters() -> None:
    """An average of the parameters, say: both are donated, so they must not be the same array."""

    def update(updates: Any, average: Any, params: Any = None) -> Any:
        return updates, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, average, params)

    averaging = optax.chain(optax.sgd(0.1), optax.GradientTransformation(lambda params: params, update))
    model = mp_lstm.language_model(**SIZES)
    pipe = examples.pipeline(model, lengths=(6,), optimizer=averaging)
    state = pipe.load(random_params(model))
    state, _ = pipe.step(state, BATCH)
    state, _ = pipe.step(state, BATCH)
    assert jax.tree.structure(state.stages[0].optimizer[0][1]) == jax.tree.structure(state.stages[0].own[0])


def test_a_layer_whose_gradient_is_the_one_it_was_given() -> None:
    """The loss's gradient by an addend is the loss's own: a constant of the pipeline, which must outlive the step."""

    def f(params: Any, x: Any, state: Any, ctx: Any) -> Any:
        return state, x.sum() + params

    head = mp_lstm.from_function(lambda key: jnp.zeros(()), f, with_context=True, name="addend", kind="head")
    model = mp_lstm.sequential([mp_lstm.embedding(examples.VOCAB, 3), head])
    pipe = examples.pipeline(model, lengths=(6,), chunk=3, microbatches=2, partition=(1, 1))
    state = pipe.load(random_params(model))
    state, _ = pipe.step(state, BATCH)
    _, gradients = pipe.value_and_grad(state, BATCH)
    units = 2 * 2
    assert_close(gradients[1], np.float32(units / BATCH.lengths.sum()), 1e-6)


# Evaluation and prediction


def test_evaluation_drops_nothing_out(pipe: mp_lstm.Pipeline, state: mp_lstm.State, params: Any) -> None:
    metrics = pipe.evaluate(state, BATCH)
    assert_close(metrics.loss, reference.run(SPEC, params, [BATCH]).mean()[0], 2e-5)
    assert (metrics.tokens, metrics.weight, metrics.carry) == (13, 13.0, None)


def test_evaluation_carries_state(pipe: mp_lstm.Pipeline, state: mp_lstm.State) -> None:
    """A text in two halves is the text: the second begins where the first ended, unless it is told to begin anew."""
    whole = random_batch(np.random.default_rng(3), 6, 4)
    first, second = (
        whole._replace(inputs=whole.inputs[part], targets=whole.targets[part], resets=np.full(4, part.start == 0))
        for part in (slice(0, 3), slice(3, 6))
    )
    one = pipe.evaluate(state, first)
    two = pipe.evaluate(state, second, carry=one.carry)
    assert_close((one.loss + two.loss) / 2, pipe.evaluate(state, whole).loss, 2e-6)
    anew = pipe.evaluate(state, second._replace(resets=np.full(4, True)), carry=one.carry)
    assert_close(anew.loss, pipe.evaluate(state, second._replace(resets=None)).loss, 0.0)
    assert abs(two.loss - anew.loss) > 1e-3


def test_predictions_are_the_models(pipe: mp_lstm.Pipeline, state: mp_lstm.State, params: Any) -> None:
    """Step by step, with the carry that the call before returned."""
    tokens = random_batch(np.random.default_rng(2), 4, 2).inputs
    wanted = reference.logits(SPEC, params, tokens)
    first, carry = pipe.infer(state, tokens[:2])
    second, _ = pipe.infer(state, tokens[2:], carry)
    assert_close(np.concatenate([first, second]), wanted, 2e-5)
    assert second.devices() == {pipe.plan.devices[-1]}


# Padding


@pytest.mark.parametrize("resets", [None, [False, True, False]])
def test_padding_changes_no_bit(pipe: mp_lstm.Pipeline, params: Any, resets: Any) -> None:
    """The same programs run, whatever stands on the padding that a caller adds."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    carry = random_carry(pipe.model, 4)
    state = pipe.restore(params, [optimizer.init(row) for row in params], key=KEY, carry=carry)
    batch = random_batch(np.random.default_rng(0), 5, 3, lengths=[5, 0, 3], resets=resets)
    results = []
    for given in (batch, padded(batch, 6, 4), padded(batch, 6, 4, fill=10**6)):
        after, metrics = pipe.step(state, given)
        results.append(jax.tree.map(np.array, (pipe.params(after), after.carry, metrics.loss, metrics.grad_norm)))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, results[0])


def test_a_batch_without_padding_equals_the_padded_one(x64: None) -> None:
    """To rounding: a plan of the batch's own size has other programs, without lengths even."""
    model = mp_lstm.language_model(**SIZES, dtype=jnp.float64)
    batch = random_batch(np.random.default_rng(0), 4, 2)
    found = []
    for rows, lengths in ((2, (4,)), (3, (7,))):
        pipe = examples.pipeline(model, batch_size=rows, lengths=lengths, optimizer=examples.recorder())
        after, metrics = pipe.step(pipe.load(random_params(model)), batch._replace(resets=np.full(2, True)))
        states = [tuple(part[:2] for part in state) for state in reference.lstm_states(after.carry)]
        gradients = by_row([stage.optimizer for stage in after.stages])
        found.append(jax.tree.map(np.array, (metrics.loss, metrics.grad_norm, gradients, states)))
        assert metrics.tokens == 8
    assert_close(found[1], found[0], 1e-12)


# Programs


def text(sentences: int) -> Split:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 7, sentences)
    return Split(rng.integers(0, examples.VOCAB, lengths.sum()).astype(np.int32), np.cumsum([0, *lengths]))


@pytest.mark.parametrize("carried", [False, True])
def test_after_warm_up_nothing_is_compiled(carried: bool) -> None:
    """In the whole process, in two epochs over all buckets: windows of two, a remainder, evaluations, a new rate."""
    split, rows = text(40), 4
    source = ContiguousBatches(split, 6, rows) if carried else SentenceBatches(split, (3, 6), rows, seed=1)
    assert source.num_batches() % 2 == 1, "the remainder is part of the test"
    model = mp_lstm.language_model(**SIZES | {"layers": 1}, dropout=0.5)
    pipe = examples.pipeline(
        model,
        batch_size=rows,
        lengths=source.buckets,
        chunk=3,
        microbatches=2,
        optimizer=optax.adam(0.1),
        options={"every_k": 2, "max_norm": 1.0},
    )
    pipe.warm_up(None if not carried else [source.batch(0, 0)])
    state = pipe.load(random_params(model))
    compiled = len(pipe.programs)
    with counted_compilations() as count:
        for epoch in (1, 2):
            batches = (batch for _, batch in iterate(source, start=(epoch - 1, 0), epochs=epoch))
            for window in pipe.prefetch(batches):
                state, metrics = pipe.step(state, window)
            state = dataclasses.replace(state, rate=state.rate / 2)
            carry = None
            for _, batch in iterate(source, epochs=1):
                evaluated = pipe.evaluate(state, batch, carry=carry)
                carry = evaluated.carry
        jax.block_until_ready((state, metrics, evaluated))
    assert count() == 0
    assert len(pipe.programs) == compiled <= pipe.programs.bound
    assert {length for length in source.buckets if pipe.programs[length]} == set(source.buckets)


@pytest.fixture
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are traced alone: enough to count them."""
    stand_in = SimpleNamespace(lower=lambda *leaves: SimpleNamespace(compile=lambda **options: None))
    names = {name: getattr(jax, name) for name in ("make_jaxpr", "tree", "ShapeDtypeStruct")}
    monkeypatch.setattr(programs, "jax", SimpleNamespace(**names, jit=lambda function, **options: stand_in))


@pytest.mark.parametrize(
    "plan",
    [
        {"lengths": (2, 3, 5, 8)},
        {"lengths": (2, 4, 8), "chunk": 2, "partition": (1, 3)},
        {"lengths": (3, 7, 8), "chunk": 3, "microbatches": 3, "partition": (1, 2, 1)},
        {"lengths": (4, 8), "schedule": "serial", "partition": (1, 1, 1, 1)},
    ],
)
@pytest.mark.parametrize("carried", [False, True])
def test_programs_are_as_few_as_stated(nothing_is_compiled: None, plan: dict[str, Any], carried: bool) -> None:
    model = mp_lstm.language_model(**TIED)
    pipe = examples.pipeline(model, devices=jax.devices(), options={"every_k": 2}, **{"partition": (2, 2)} | plan)
    resets = np.zeros(4, bool) if carried else None
    rng = np.random.default_rng(0)
    lengths = plan["lengths"]
    batches = [random_batch(rng, length, 4, lengths=[1] * 4, resets=resets) for length in lengths]
    pipe.warm_up(batches)
    assert len(pipe.programs) <= pipe.programs.bound
    report = pipe.programs.report()
    assert set(report.by_length) == set(lengths)
    assert report.programs < sum(report.by_length.values()) + 4 * len(pipe.stages), "buckets share what they can"
    pipe.programs.clear()
    pipe.warm_up()
    assert len(pipe.programs) <= pipe.programs.bound


# Messages


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "token"}, "normalize is 'token', one of tokens, rows is wanted"),
        ({"every_k": 0}, "every_k is 0, wanted at least 1"),
        ({"every_k": 1.5}, "every_k is 1.5, wanted an integer"),
        ({"max_norm": 0.0}, "max_norm is 0.0, a positive number or None is wanted"),
        ({"max_norm": float("nan")}, "max_norm is nan, a positive number or None is wanted"),
        ({"max_norm": "5"}, "max_norm is '5', a positive number or None is wanted"),
        ({"max_norm": float("inf")}, r"max_norm is inf, .*: pass one that float32 holds, 1.2e-38 to 3.4e\+38"),
        ({"max_norm": 1e39}, r"max_norm is 1e\+39, a positive number or None is wanted"),
        ({"max_norm": 1e-50}, "max_norm is 1e-50, a positive number or None is wanted"),  # it was 0 on the devices
        ({"max_norm": True}, "max_norm is True, a positive number or None is wanted"),
        ({"every_k": True}, "every_k is True, wanted an integer"),
        ({"every_k": "2"}, "every_k is '2', wanted an integer"),
    ],
)
def test_refuses_options_out_of_range(pipe: mp_lstm.Pipeline, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        mp_lstm.make_pipeline(pipe.model, pipe.plan, optax.sgd(0.1), **options)


def test_options_may_be_numpys(pipe: mp_lstm.Pipeline) -> None:
    options = {"every_k": np.int64(2), "max_norm": np.float32(5)}
    assert mp_lstm.make_pipeline(pipe.model, pipe.plan, optax.sgd(0.1), **options).every_k == 2


def test_refuses_a_plan_of_another_model(pipe: mp_lstm.Pipeline) -> None:
    other = mp_lstm.language_model(**SIZES | {"layers": 1})
    with pytest.raises(
        InputError, match=r"the plan is for rows \['embed', 'lstm 1', 'lstm 2', 'head'\], the model has"
    ):
        mp_lstm.make_pipeline(other, pipe.plan, optax.sgd(0.1))


def test_refuses_an_optimizer_that_mixes_leaves(pipe: mp_lstm.Pipeline) -> None:
    with pytest.raises(InputError, match="mixes the leaves"):
        mp_lstm.make_pipeline(pipe.model, pipe.plan, optax.clip_by_global_norm(1.0))


def test_refuses_a_bare_batch_where_windows_are_wanted(pipe: mp_lstm.Pipeline, state: mp_lstm.State) -> None:
    pairs = mp_lstm.make_pipeline(pipe.model, pipe.plan, optax.sgd(0.1), every_k=2)
    with pytest.raises(
        InputError, match=r"every_k is 2 and step got a bare batch: iterate over pipe.prefetch\(batches"
    ):
        pairs.step(state, BATCH)


def test_refuses_parameters_of_another_model(pipe: mp_lstm.Pipeline, params: Any) -> None:
    with pytest.raises(InputError, match=r"the parameters' structure is .*, the model's is "):
        pipe.load(params[:-1])
    wider = (params[0]._replace(table=np.zeros((11, 5))), *params[1:])
    with pytest.raises(InputError, match=r"embed: .table has shape \(11, 5\), \(11, 4\) is wanted"):
        pipe.load(wider)


def test_parameters_of_another_type_are_cast(pipe: mp_lstm.Pipeline, params: Any) -> None:
    """Those in float16 were taken, and refused by a compiled program in the step after."""
    half = jax.tree.map(lambda leaf: leaf.astype(np.float16), params)
    found = pipe.params(pipe.load(half))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float32)}
    assert_close(found, half, 0.0)


@pytest.mark.parametrize(
    ("key", "got"), [(0, "0"), (jax.random.PRNGKey(0), r"uint32 \[2\]"), (jax.random.split(KEY), r"key<fry> \[2\]")]
)
def test_refuses_what_is_no_typed_key(pipe: mp_lstm.Pipeline, params: Any, key: Any, got: str) -> None:
    """A key of the old style made a state, and the first step failed."""
    for make in (pipe.init, lambda key: pipe.load(params, key=key)):
        with pytest.raises(InputError, match=rf"the key is {got}, a typed one is wanted: pass jax.random.key\(seed\)"):
            make(key)


def test_refuses_a_state_that_is_used_up() -> None:
    """Instead of a traceback about deleted buffers."""
    pipe = examples.pipeline(mp_lstm.language_model(**SIZES), lengths=(6,))
    state = pipe.load(random_params(pipe.model))
    after, _ = pipe.step(state, BATCH)
    uses = (pipe.step, pipe.evaluate, pipe.value_and_grad, pipe.verify, lambda s, b: pipe.infer(s, b.inputs))
    for use in (*uses, lambda s, b: pipe.params(s)):
        with pytest.raises(InputError, match="the state is used up, a step took its memory: go on with the state that"):
            use(state, BATCH)
    pipe.evaluate(after, BATCH)


def test_refuses_a_state_of_another_pipeline(pipe: mp_lstm.Pipeline, state: mp_lstm.State) -> None:
    """Of another model, number of stages, or order of devices."""
    here, there = pipe.plan.devices
    plan: dict[str, Any] = {"lengths": (3, 6), "partition": (2, 2)}
    wider = examples.pipeline(mp_lstm.language_model(**TIED | {"embed": 8, "hidden": 8}), **plan)
    swapped = examples.pipeline(pipe.model, **plan, devices=[there, here])
    single = examples.pipeline(pipe.model, lengths=(3, 6), partition=(4,))
    for other, message in (
        (wider, "the state has parameters of another model in stage 0: pass one of this pipeline"),
        (swapped, rf"the state has stage 0 on \['{here}'\], the pipeline on \['{there}'\]: pass one"),
        (single, "the state has 2 stages, the pipeline has 1: pass one"),
    ):
        for use in (other.step, other.evaluate):
            with pytest.raises(InputError, match=message):
                use(state, BATCH)
    for nothing in (None, pipe.params(state), (state, None)):
        with pytest.raises(InputError, match=r"got a (NoneType|tuple) for a state: pass what pipe.init, load or step"):
            pipe.step(nothing, BATCH)


def test_predictions_are_asked_of_known_ids_alone(pipe: mp_lstm.Pipeline, state: mp_lstm.State) -> None:
    """An id beyond the vocabulary was answered for the last one."""
    with pytest.raises(InputError, match=r"batch.inputs has id 100 at step 0 of row 1, embed knows 0 to 10"):
        pipe.infer(state, np.array([[1, 100]]))
    with pytest.raises(InputError, match=r"batch.inputs has shape \(2,\), \[T, B, ...\] is wanted"):
        pipe.infer(state, np.array([1, 2]))
