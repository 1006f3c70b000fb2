"""XLA's options by phase: F by the matrix library that reads weights as they lie."""

import jax
import jax.numpy as jnp
import pytest

from mp_lstm.runtime import compiler
from mp_lstm.runtime.compiler import OLDER_PRODUCTS, compiler_options


@pytest.fixture
def cpu():
    return jax.devices("cpu")[0]


def test_only_backward_programs_use_the_newer_library(cpu):
    assert compiler_options("forward", cpu) == compiler_options("evaluate", cpu) == OLDER_PRODUCTS
    assert compiler_options("backward", cpu) == compiler_options("backward_add", cpu) == {}


def test_other_platforms_have_no_such_options():
    class Gpu:
        platform = "gpu"

    assert compiler_options("forward", Gpu()) == {}


def test_an_xla_without_the_option_does_without_it(cpu, monkeypatch):
    monkeypatch.setattr(compiler, "OLDER_PRODUCTS", {"xla_cpu_of_another_time": "1"})
    compiler._known.cache_clear()
    assert compiler_options("forward", cpu) == {}
    compiler._known.cache_clear()


def test_the_option_takes_products_from_the_newer_library_and_says_nothing(cpu, capfd):
    """An empty value does too, but XLA then complains on standard error for every program."""
    lowered = jax.jit(lambda a, b: a @ b).lower(jnp.ones((32, 64)), jnp.ones((64, 128)))
    assert "ynn" in lowered.compile().as_text()
    assert "ynn" not in lowered.compile(compiler_options=compiler_options("forward", cpu)).as_text()
    assert capfd.readouterr().err == ""
