"""What functions of users must give, and in which words it is said what they gave instead."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.layers.results import check_number, difference, pair

STATE = mp_lstm.LSTMState(jnp.zeros((2, 3)), jnp.zeros((2, 3)))


@pytest.mark.parametrize("given", [((), 1), [(), 1]])
def test_a_pair_may_be_a_list(given: Any) -> None:
    assert pair("mine", given, "(state, y)") == ((), 1)


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (None, "None"),
        ((1, 2, 3), "a tuple of 3"),
        (np.zeros((2, 3)), r"float64 \[2, 3\]"),  # its two rows were taken for state and y
        ({"state": (), "y": 1}, "a dict"),
    ],
)
def test_what_is_no_pair(given: Any, got: str) -> None:
    with pytest.raises(InputError, match=rf"^mine gave {got}, wanted a pair \(state, y\): return both, and \(\) where"):
        pair("mine", given, "(state, y)")


@pytest.mark.parametrize("given", [1.0, np.float32(1), np.array(1.0), jnp.float32(1), jnp.bfloat16(1)])
def test_one_floating_number(given: Any) -> None:
    check_number("mine", given, "it")


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (jnp.zeros((2, 3)), r"float32 \[2, 3\]"),
        (jnp.zeros(1), r"float32 \[1\]"),
        (jnp.int32(1), r"int32 \[\]"),  # it has no gradient
        (1, "a int"),
        (None, "None"),
        ((1.0, 2.0), "a tuple"),
    ],
)
def test_what_is_no_floating_number(given: Any, got: str) -> None:
    with pytest.raises(InputError, match=f"^mine gave {got}, wanted one floating number: return it$"):
        check_number("mine", given, "it")


@pytest.mark.parametrize(
    "given", [STATE, jax.tree.map(np.asarray, STATE), jax.tree.map(lambda leaf: np.zeros(leaf.shape), STATE)]
)
def test_alike(given: Any) -> None:
    """On the host or not; float64 there is what JAX makes of it."""
    assert difference(given, STATE) is None
    assert difference((1, 2.0), (jnp.int32(1), jnp.float32(2))) is None
    assert difference(jax.random.key(0), jax.random.key(1)) is None


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (STATE.h, "has 1 arrays, wanted 2"),
        ((), "has 0 arrays, wanted 2"),
        (
            tuple(STATE),
            "has the structure PyTreeDef((*, *)), wanted PyTreeDef(CustomNode(namedtuple[LSTMState], [*, *]))",
        ),
        (STATE._replace(c=jnp.zeros((1, 3))), "is float32 [1, 3] at .c, wanted float32 [2, 3]"),
        (STATE._replace(h=jnp.zeros((2, 3), jnp.int32)), "is int32 [2, 3] at .h, wanted float32 [2, 3]"),
        (STATE._replace(h="word"), "is a str at .h, wanted float32 [2, 3]"),
    ],
)
def test_differences(given: Any, wanted: str) -> None:
    assert difference(given, STATE) == wanted
