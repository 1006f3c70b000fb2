"""Products of rounded operands, and weights rounded ahead of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mp_lstm
from mp_lstm.layers.base import Borrowed, Context, chain
from mp_lstm.layers.embedding import EmbeddingParams
from mp_lstm.layers.products import product, product_from_left, product_over_rows, product_transposed, weighted_sum
from mp_lstm.runtime.engine import Engine

BF16 = jnp.bfloat16


def arrays(*shapes):
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def rounded(x):
    return np.asarray(x.astype(BF16), np.float64)


def test_each_product_rounds_its_operands_and_nothing_else():
    a, b, c = arrays((6, 5), (5, 4), (6, 4))
    kept = a.dtype
    for found, wanted in (
        (product(a, b, BF16), rounded(a) @ rounded(b)),
        (product_transposed(c, b, BF16), rounded(c) @ rounded(b).T),
        (product_over_rows(a, c, BF16), rounded(a).T @ rounded(c)),
        (product_from_left(c, b, BF16, kept), rounded(c) @ rounded(b).T),
    ):
        assert found.dtype == kept
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_an_operand_that_is_rounded_already_gives_the_same_numbers():
    a, b = arrays((6, 5), (5, 4))
    assert (product(a, b.astype(BF16), BF16) == product(a, b, BF16)).all()
    assert (product_over_rows(b.T.astype(BF16), b.T, BF16) == product_over_rows(b.T, b.T, BF16)).all()


def test_a_weighted_sum_of_rounded_rows_keeps_the_digits_of_its_weights():
    weights, rows = arrays((640,), (640, 30))
    rows = rows.astype(BF16)
    exact = np.asarray(weights, np.float64) @ np.asarray(rows, np.float64)
    np.testing.assert_allclose(weighted_sum(weights, rows), exact, rtol=0, atol=1e-3)
    assert abs(rounded(weights) @ rounded(rows) - exact).max() > 1e-2  # what rounding the weights would do
    assert weighted_sum(weights, rows).dtype == weights.dtype


def head(tied):
    layer = mp_lstm.softmax_head(5, 11, tied=tied, products=BF16)
    params = layer.init(jax.random.key(0))
    table = EmbeddingParams(*arrays((11, 5)))
    ctx = Context(targets=jnp.zeros((4, 2), jnp.int32), weights=jnp.ones((4, 2)))
    return layer, Borrowed(params, table) if tied else params, ctx


def other(layer):
    return layer, layer.init(jax.random.key(0)), Context()


@pytest.mark.parametrize(
    "case",
    [
        lambda: other(mp_lstm.lstm_layer(5, 7, products=BF16)),
        lambda: other(mp_lstm.dense(5, 7, products=BF16)),
        lambda: other(chain([mp_lstm.dense(5, 3), mp_lstm.lstm_layer(3, 7, products=BF16)])),
        lambda: other(mp_lstm.residual(mp_lstm.lstm_layer(5, 5, products=BF16))),
        lambda: head(tied=False),
        lambda: head(tied=True),
    ],
    ids=["lstm", "dense", "chain", "residual", "head", "tied head"],
)
def test_prepared_parameters_give_the_same_numbers(case):
    """To the last bit: they are what each unit would round for itself."""
    layer, params, ctx = case()
    x, state = arrays((4, 2, 5))[0], layer.init_state(2)
    prepared = layer.prepare(params)
    stated = layer.cost(2, 4).prepared_bytes
    assert stated == sum(leaf.nbytes for leaf in jax.tree.leaves(prepared) if leaf.dtype == BF16) > 0

    def both_phases(params):
        after, y, saved = layer.forward(params, x, state, ctx)
        return after, y, layer.backward(params, saved, jnp.ones_like(y), after, ctx)

    jax.tree.map(np.testing.assert_array_equal, both_phases(prepared), both_phases(params))


def test_what_is_not_rounded_is_not_prepared():
    assert mp_lstm.lstm_layer(5, 7).prepare is None
    assert chain([mp_lstm.dense(5, 3), mp_lstm.lstm_layer(3, 7)]).prepare is None
    masked = mp_lstm.weight_drop(mp_lstm.lstm_layer(5, 7, products=BF16), 0.5)
    assert masked.prepare is None  # its mask comes first, and differs from batch to batch
    assert masked.cost(2, 4).prepared_bytes == 0


@pytest.mark.parametrize("tie", [False, True])
def test_a_step_prepares_the_parameters_of_each_stage_once(tie, monkeypatch):
    """Each unit once rounded all weights of its stage again: a quarter of the time of a step in four chunks."""
    model = mp_lstm.language_model(vocab=30, embed=8, hidden=8, layers=2, tie=tie, products=BF16)
    fixed = {"partition": (2, 2), "schedule": "wavefront", "chunk": 2, "microbatches": 2}
    plan = mp_lstm.make_plan(model, batch_size=4, lengths=(8,), devices=jax.devices()[:2], **fixed)
    pipe = mp_lstm.make_pipeline(model, plan, optax.sgd(0.1))
    enqueued, run = [], Engine.run

    def recorded(self, stage, phase, *args, **options):
        enqueued.append((stage.number, phase))
        return run(self, stage, phase, *args, **options)

    monkeypatch.setattr(Engine, "run", recorded)
    batch = mp_lstm.Batch(np.zeros((8, 4), np.int32), np.ones((8, 4), np.int32))
    pipe.step(pipe.init(jax.random.key(0)), batch)
    assert enqueued.count((0, "forward")) == 8
    assert [work for work in enqueued if work[1] == "prepare"] == [(0, "prepare"), (1, "prepare")]
    assert pipe.programs.report().programs <= pipe.programs.bound
