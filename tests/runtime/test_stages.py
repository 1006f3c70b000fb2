"""The parts of a stage's functions that no gradient shows: contexts, and carried state taken apart and together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import examples
import mp_lstm
from mp_lstm.planning.plan import row_splits
from mp_lstm.runtime import stages
from mp_lstm.runtime.stages import Unit, context, make_stage


@pytest.fixture(scope="module")
def stage() -> stages.Stage:
    model = mp_lstm.language_model(**examples.SIZES)
    return make_stage(model, 1, range(1, 3), jax.devices()[0], optax.sgd(0.1), max_norm=None)


@pytest.mark.parametrize(("rows", "microbatches"), [(1, 1), (5, 1), (5, 2), (5, 3), (4, 4)])
def test_split_and_merge_are_inverse(stage: stages.Stage, rows: int, microbatches: int) -> None:
    """Rows go where the rows of the batch go (pitfall 18), with zeros to fill the smaller micro-batches."""
    splits = row_splits(rows, microbatches)
    rng = np.random.default_rng(0)
    states = stage.layer.init_state(rows)
    carry, initial = (jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), states) for _ in range(2))
    resets = rng.random(rows) < 0.5
    pieces = stage.split(carry, jnp.asarray(resets), initial, splits)
    whole = stages.merge(pieces, splits)
    for got, old, fresh in zip(*map(jax.tree.leaves, (whole, carry, initial)), strict=True):
        np.testing.assert_array_equal(got, np.where(resets[:, None], fresh, old))
    size = -(-rows // microbatches)
    for piece, (first, last) in zip(pieces, splits, strict=True):
        assert all(leaf.shape[0] == size for leaf in jax.tree.leaves(piece))
        assert all((leaf[last - first :] == 0).all() for leaf in jax.tree.leaves(piece))


def test_the_context_of_a_unit() -> None:
    unit = Unit(start=jnp.int32(2), row=jnp.int32(3), lengths=jnp.array([5, 1, 3]), counter=jnp.uint32(7))
    ctx = context(unit, 2, train=True)
    assert (ctx.start, ctx.row, ctx.counter, ctx.train) == (2, 3, 7, True)
    assert ctx.mask is not None
    assert ctx.mask.T.tolist() == [[True, True], [False, False], [True, False]]
    assert context(Unit(), 2, train=False).mask is None


def test_a_stage_knows_its_place(stage: stages.Stage) -> None:
    assert (stage.number, stage.rows, stage.is_last) == (1, range(1, 3), False)
    assert stage.layer.name == "lstm 2"
