"""What metrics say when they are read, and what may be carried."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import examples
import mp_lstm
from mp_lstm.errors import InputError
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


# Carries


@pytest.fixture(scope="module")
def pipe() -> mp_lstm.Pipeline:
    """Stage 0 has embedding and a first LSTM, stage 1 a second one and the head."""
    return examples.pipeline(
        mp_lstm.language_model(**examples.SIZES), batch_size=2, lengths=(3,), partition=(2, 2), chunk=3, microbatches=1
    )


@pytest.fixture(scope="module")
def state(pipe: mp_lstm.Pipeline) -> State:
    return pipe.load(examples.random_params(pipe.model))


def carry_of(pipe: mp_lstm.Pipeline, rows: int = 2) -> Any:
    """A carry on the host, by stage."""
    by_row = examples.random_carry(pipe.model, rows)
    return tuple(by_row[stage.rows.start : stage.rows.stop] for stage in pipe.stages)


TOKENS = np.ones((1, 2), int)
BATCH = examples.random_batch(np.random.default_rng(0), 3, 2, resets=[False, False])
REMEDY = "pass what the call before returned for as many rows, or None"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda carry: carry[:1], "carry is 1 parts, wanted one part for each of 2 stages: "),
        (lambda carry: (*carry, ()), "carry is 3 parts, wanted one part for each of 2 stages: "),
        (lambda carry: 3, "carry is a int, wanted one part for each of 2 stages: "),
        (lambda carry: carry[::-1], r"carry of stage 0 \(embed, lstm 1\) has the structure .*, wanted .*: "),
        (lambda carry: (None, None), r"carry of stage 0 \(embed, lstm 1\) has 0 arrays, wanted 2: "),
        (
            lambda carry: jax.tree.map(lambda leaf: leaf[:1], carry),
            r"carry of stage 0 \(embed, lstm 1\) is float32 \[1, 4\] at \[1\].h, wanted float32 \[2, 4\]: ",
        ),
        (
            lambda carry: (carry[0], jax.tree.map(lambda leaf: leaf.astype(np.float16), carry[1])),
            r"carry of stage 1 \(lstm 2, head\) is float16 \[2, 4\] at \[0\].h, wanted float32 \[2, 4\]: ",
        ),
    ],
)
def test_refuses_a_carry_of_another_kind(pipe: mp_lstm.Pipeline, state: State, change: Any, message: str) -> None:
    """It was an error of zip, of trees, or of a compiled program's types."""
    carry = change(carry_of(pipe))
    with pytest.raises(InputError, match=f"^{message}{REMEDY}"):
        pipe.infer(state, TOKENS, carry)
    with pytest.raises(InputError, match=f"^{message}{REMEDY}"):
        pipe.infer(state, TOKENS, carry, resets=[True, False])
    with pytest.raises(InputError, match=f"^{message}{REMEDY}"):
        pipe.evaluate(state, BATCH, carry=carry)


def test_a_carry_may_lie_anywhere(state: State, pipe: mp_lstm.Pipeline) -> None:
    """On the host or another device it was refused where programs were made for it, or by them."""
    carry, other = carry_of(pipe), jax.devices()[3]
    wanted, after = pipe.infer(state, TOKENS, carry)
    for given in (list(carry), jax.device_put(carry, other), jax.tree.map(lambda leaf: leaf.astype(float), carry)):
        found, _ = pipe.infer(state, TOKENS, given)
        np.testing.assert_array_equal(found, wanted)
    assert {leaf.sharding for leaf in jax.tree.leaves(after[1])} == {pipe.stages[1].sharding}
    pipe.infer(state, TOKENS, carry, resets=[True, False])
    jax.block_until_ready(pipe.evaluate(state, BATCH, carry=jax.device_put(carry, other)).loss)


def test_a_state_of_the_host_is_refused(pipe: mp_lstm.Pipeline, state: State) -> None:
    on_host = dataclasses.replace(state, stages=jax.device_get(state.stages))
    with pytest.raises(InputError, match=r"^the state has float32 .* of the host in stage 0: .* pipe\.load$"):
        pipe.step(on_host, examples.random_batch(np.random.default_rng(0), 4, 2))
