"""What metrics say when they are read."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from mp_lstm.runtime import Metrics, State


@pytest.mark.parametrize(("loss", "wanted"), [(0.0, 1.0), (math.log(50), 50.0), (1e4, math.inf), (math.inf, math.inf)])
def test_perplexity(loss: float, wanted: float) -> None:
    assert Metrics(jnp.float32(loss), 1.0, 1).perplexity == pytest.approx(wanted, rel=1e-6)


def test_perplexity_of_a_loss_that_is_none() -> None:
    """No number below infinity could be compared with the best so far."""
    assert not math.isfinite(Metrics(jnp.float32(jnp.nan), 1.0, 1).perplexity)


@pytest.mark.parametrize(
    ("loss", "squares", "stages"),
    [
        (1.0, (1.0, 2.0, 3.0), []),
        (1.0, (1.0, math.nan, 3.0), [1]),
        (math.nan, (1.0, 2.0, 3.0), [2]),
        (math.inf, (math.inf, 2.0, math.nan), [0, 2]),
    ],
)
def test_stages_that_are_not_finite(loss: float, squares: tuple[float, ...], stages: list[int]) -> None:
    metrics = Metrics(jnp.float32(loss), 1.0, 1, square_norms=tuple(map(jnp.float32, squares)))
    assert metrics.not_finite() == stages


def test_a_state_is_a_value() -> None:
    state = State(jax.random.key(0), (), step=3)
    doubled = jax.tree.map(lambda leaf: leaf, state)
    assert doubled == state
