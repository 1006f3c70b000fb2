"""What layers may be made with: sizes and types, refused with the layer's name and the argument's.

Layers are made as users make them, without the tests' own check of types (`inspect.unwrap`).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.layers.arguments import TYPES, check_types
from mp_lstm.layers.base import Context


def lstm_init(*sizes: Any, name: str, **options: Any) -> Any:
    return inspect.unwrap(mp_lstm.lstm_init)(jax.random.key(0), *sizes, **options)


def temporal(size: Any, factor: Any, *, name: str, **options: Any) -> Any:
    return inspect.unwrap(mp_lstm.temporal_regularisation)(size, 1.0, name=name, **options)


def gru(inputs: Any, unroll: Any, *, name: str) -> Any:
    cell = flax.linen.GRUCell(features=3)
    return inspect.unwrap(mp_lstm.recurrent)(cell, inputs, unroll=unroll, name=name)


# What makes a layer of two sizes, and the names of these; "-" is no size.
MAKERS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "lstm_init": (lstm_init, "inputs", "hidden"),
    "lstm_layer": (inspect.unwrap(mp_lstm.lstm_layer), "inputs", "hidden"),
    "dense": (inspect.unwrap(mp_lstm.dense), "inputs", "outputs"),
    "embedding": (inspect.unwrap(mp_lstm.embedding), "vocab", "size"),
    "softmax_head": (inspect.unwrap(mp_lstm.softmax_head), "inputs", "vocab"),
    "temporal_regularisation": (temporal, "size", "-"),
    "recurrent": (gru, "inputs", "unroll"),
}


@pytest.mark.parametrize("size", [2.0, "2", True, np.float32(2), None, [2], 0, -1])
@pytest.mark.parametrize("maker", MAKERS)
def test_refuses_sizes_that_are_none(maker: str, size: Any) -> None:
    """`lstm_init` divided by zero, took True for 1, and left the rest to `jax.random`."""
    make, *fields = MAKERS[maker]
    name = "lstm_init" if maker == "lstm_init" else "mine"
    given = repr(size).replace("[", r"\[").replace("(", r"\(").replace(")", r"\)")
    for place, field in enumerate(fields):
        if field == "-" or (maker, size) == ("recurrent", None):
            continue
        sizes = [3, 3]
        sizes[place] = size
        with pytest.raises(InputError, match=rf"^{name}: {field} is {given}, wanted (an integer|at least 1): pass a "):
            make(*sizes, name="mine")


def test_sizes_may_be_numpys() -> None:
    """Layers refused them, and costs in numpy's 32 bits would have overflowed."""
    size = np.int32(65_536)
    for make in (mp_lstm.lstm_layer, mp_lstm.dense, mp_lstm.embedding, mp_lstm.softmax_head):
        assert make(size, size).cost(64, 64) == make(65_536, 65_536).cost(64, 64)
    assert mp_lstm.lstm_init(jax.random.key(0), np.int64(2), np.int64(3)).kernel.shape == (2, 12)
    assert mp_lstm.temporal_regularisation(np.int64(3), 1.0).init_state(2).shape == (2, 3)
    assert mp_lstm.recurrent(flax.linen.GRUCell(features=3), np.int64(2)).init_state(4).shape == (4, 3)


@pytest.mark.parametrize("unroll", [2.5, "2", True, None, 0, 17])
def test_refuses_to_write_out_steps_that_are_none(unroll: Any) -> None:
    with pytest.raises(InputError, match=f"^unroll is {unroll!r}, 1 to 16 is wanted: compile time grows with it"):
        inspect.unwrap(mp_lstm.lstm_layer)(3, 5, unroll=unroll)


# Types


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("nope", "'nope'"),
        (3, "3"),
        ("int8", "int8"),
        (jnp.int8, "int8"),
        (bool, "bool"),
        ("complex64", "complex64"),
        (jnp.float8_e4m3fn, "float8_e4m3fn"),
    ],
)
def test_refuses_types_that_are_none(given: Any, shown: str) -> None:
    """As products, integers rounded all weights to 0, and others failed when the layer was run."""
    for maker, (make, *_) in MAKERS.items():
        fields = ["dtype"] if maker in ("lstm_init", "embedding", "temporal_regularisation") else ["products", "dtype"]
        name = "lstm_init" if maker == "lstm_init" else "mine"
        for field in fields if maker != "recurrent" else ():
            message = (
                rf"^{name}: {field} is {shown}, one of float16, bfloat16, float32, float64 is wanted: pass e.g. jnp"
            )
            with pytest.raises(InputError, match=message):
                make(3, 3, name="mine", **{field: given})


def test_products_of_a_kernel_alone() -> None:
    params = mp_lstm.lstm_init(jax.random.key(0), 3, 5)
    with pytest.raises(InputError, match="lstm: products is int8, one of float16"):
        mp_lstm.lstm(params, jnp.ones((4, 2, 3)), products="int8")


@pytest.mark.parametrize("given", [*TYPES, np.float32, jnp.bfloat16, np.dtype("float64"), float, None])
def test_types_in_any_form(given: Any) -> None:
    check_types("mine", products=given)


def test_any_two_types_have_a_higher_one() -> None:
    for a, b in itertools.product(TYPES, TYPES):
        jnp.promote_types(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"state": (np.zeros((3, 5)), np.zeros((3, 5)))},
            r"the state is float32 \[3, 5\] at \.h, wanted float32 \[2, 5\]",
        ),
        ({"state": np.zeros((2, 5))}, r"the state is float64 \[2, 5\], a pair \(h, c\) is wanted"),
        ({"state": (np.zeros((2, 5), int), np.zeros((2, 5)))}, r"the state is int32 \[2, 5\] at \.h, wanted float32"),
        (
            {"params": mp_lstm.LSTMParams(np.ones((3, 20)), np.ones((4, 20)), np.ones(20))},
            r"the parameters have shapes .*, \[\(3, 16\), \(4, 16\), \(16,\)\] are wanted",
        ),
        (
            {"params": mp_lstm.LSTMParams(*(jnp.ones(shape, jnp.bfloat16) for shape in ((3, 20), (5, 20), 20)))},
            "its input is float32, its parameters bfloat16 and its state bfloat16: convert the input, as by x.astype",
        ),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    """They ended in JAX's words for sums and loops."""
    arguments = {"params": mp_lstm.lstm_init(jax.random.key(0), 3, 5), "state": None} | change
    with pytest.raises(InputError, match=f"^lstm: {message}"):
        inspect.unwrap(mp_lstm.lstm)(arguments["params"], jnp.ones((6, 2, 3)), arguments["state"])


def test_features_of_another_type_are_named(x64: None) -> None:
    """In x64 mode numpy's own features are float64, the layer's parameters float32."""
    layer = mp_lstm.lstm_layer(3, 4, name="first")
    with pytest.raises(
        InputError, match=r"^first: its input is float64, its parameters float32 and its state float32: co"
    ):
        layer.forward(layer.init(jax.random.key(0)), jnp.ones((2, 1, 3)), layer.init_state(1), Context())
