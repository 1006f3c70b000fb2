"""Models: rows from layers, ties, and the loss on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import examples
import mp_lstm
import reference
from examples import VOCAB, random_batch, random_carry, random_params
from mp_lstm.errors import InputError
from mp_lstm.layers.base import Borrowed
from mp_lstm.layers.model import lend, settle, ties_from_below
from reference import assert_close


def test_loss_and_gradients_equal_the_reference(x64: None) -> None:
    """Without any pipeline: dropout, a tie, a residual connection, padding, weights, carried state."""
    sizes = {"vocab": VOCAB, "embed": 4, "hidden": 4, "layers": 2}
    model = mp_lstm.language_model(**sizes, dropout=0.3, tie=True, residual_from=2, dtype=jnp.float64)
    params, carry, key = random_params(model), random_carry(model, 3), jax.random.key(3)
    resets = [True, False, False]
    batch = random_batch(np.random.default_rng(0), 5, 3, lengths=[5, 0, 3], weighted=True, resets=resets)

    def loss(params: Any) -> Any:
        return model.loss(params, batch, key=key, counter=7, carry=carry)

    (mean, aux), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    spec = reference.Spec(2, dropout=0.3, tie=True, residual_from=2)
    expected = reference.run(spec, params, [batch], key=key, counter=7, carry=reference.lstm_states(carry))
    assert_close((mean, gradients), expected.mean(), 1e-10)
    assert_close(reference.lstm_states(aux.carry), expected.states[0], 1e-10)


def test_a_head_has_a_loss_already() -> None:
    """Its loss was taken for predictions, and the targets were told to have its shape."""
    layers = [mp_lstm.lstm_layer(3, 4), mp_lstm.softmax_head(4, 2)]
    with pytest.raises(InputError, match=r"^sequential: the last layer, head, is a head already: leave loss out$"):
        mp_lstm.sequential(layers, loss=mp_lstm.squared_error)


def test_a_carry_of_another_batch_is_refused() -> None:
    model = mp_lstm.language_model(**examples.SIZES)
    batch = random_batch(np.random.default_rng(0), 3, 2, resets=[False, False])
    with pytest.raises(InputError, match=r"^carry is float32 \[3, 4\] at \[1\]\.h, wanted float32 \[2, 4\]: pass what"):
        model.loss(random_params(model), batch, carry=random_carry(model, 3))
    model.loss(random_params(model), batch._replace(resets=None), carry=random_carry(model, 3))  # nobody looks at it


def test_a_batch_without_weight_has_no_loss() -> None:
    model = mp_lstm.language_model(**examples.SIZES)
    batch = random_batch(np.random.default_rng(0), 3, 2, lengths=[0, 0])
    (loss, aux), gradients = jax.jit(jax.value_and_grad(lambda p: model.loss(p, batch), has_aux=True))(
        random_params(model)
    )
    assert (loss, aux.weight_sum) == (0, 0)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


def test_targets_that_do_not_count_are_not_looked_at() -> None:
    """On padding, and where the weight is 0 on a real step: NaN times zero is NaN, and loss and gradients were."""
    model = mp_lstm.sequential([mp_lstm.lstm_layer(3, 6), mp_lstm.dense(6, 2)], loss=mp_lstm.squared_error)
    rng, params = np.random.default_rng(0), random_params(model)
    weights = np.ones((4, 2))
    weights[0, 1] = 0
    inputs, targets = rng.normal(size=(4, 2, 3)).astype(np.float32), rng.normal(size=(4, 2, 2)).astype(np.float32)
    batch = mp_lstm.Batch(inputs, targets, weights, lengths=np.array([2, 4]))
    absent = targets.copy()
    absent[2:, 0] = absent[0, 1] = np.nan
    run = jax.value_and_grad(model.loss, has_aux=True)
    (wanted, _), gradients = run(params, batch)
    (loss, _), found = run(params, batch._replace(targets=absent))
    assert_close((loss, found), (wanted, gradients), 0.0)
    assert np.isfinite(loss)


def test_resets_may_be_numbers() -> None:
    model = mp_lstm.language_model(**examples.SIZES)
    params, carry = random_params(model), random_carry(model, 2)
    batch = random_batch(np.random.default_rng(0), 3, 2, resets=[True, False])
    found = [
        model.loss(params, batch._replace(resets=some), carry=carry)[0] for some in (batch.resets, [1, 0], [2.0, 0])
    ]
    assert found[0] == found[1] == found[2]


def rows_of(*layers: mp_lstm.Layer, **options: Any) -> list[str]:
    return [row.name for row in mp_lstm.sequential(layers, **options).rows]


def test_layers_without_parameters_join_the_next_row() -> None:
    drop, lstm, dense = mp_lstm.dropout(0.5), mp_lstm.lstm_layer(3, 3), mp_lstm.dense(3, 2)
    assert rows_of(lstm, dense) == ["lstm", "dense"]
    assert rows_of(drop, lstm, drop, dense, drop) == ["lstm", "dense"]
    assert rows_of(lstm, drop, dense, loss=mp_lstm.squared_error) == ["lstm", "dense"]


def test_a_model_without_parameters_is_none() -> None:
    with pytest.raises(InputError, match="sequential: no layer has parameters: there is nothing to place or train"):
        mp_lstm.sequential([mp_lstm.dropout(0.5)], loss=mp_lstm.squared_error)


@pytest.mark.parametrize("cut", [1, 2])
def test_lent_parameters_and_their_gradients_find_their_way(cut: int) -> None:
    """Whatever stage the owner and the borrower are on."""
    model = mp_lstm.language_model(vocab=5, embed=2, hidden=2, layers=1, tie=True)
    (tie,) = model.ties
    params = ("table", "lstm", "bias")
    whole = lend(model, range(3), params, ())
    assert whole == ("table", "lstm", Borrowed("bias", "table"))
    above = range(cut, 3)
    assert ties_from_below(model, above) == (tie,)
    assert ties_from_below(model, range(cut)) == ties_from_below(model, range(3)) == ()
    assert lend(model, above, params[cut:], ("table",)) == whole[cut:]

    gradients = (1.0, 2.0, Borrowed(own=3.0, lent=10.0))
    assert settle(model, range(3), gradients) == ((11.0, 2.0, 3.0), ())
    assert settle(model, above, gradients[cut:]) == ((1.0, 2.0, 3.0)[cut:], (10.0,))
