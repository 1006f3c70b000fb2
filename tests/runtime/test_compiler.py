"""XLA's options by phase: F by the matrix library that reads weights as they lie, all in the order of least memory."""

import jax
import jax.numpy as jnp
import pytest

from mp_lstm.runtime import compiler
from mp_lstm.runtime.compiler import LEAST_MEMORY, OLDER_PRODUCTS, compiler_options


@pytest.fixture
def cpu():
    return jax.devices("cpu")[0]


def test_what_multiplies_in_f_and_w_uses_the_older_library(cpu):
    for phase in ("forward", "evaluate", "infer", "weight_gradient", "weight_gradient_add"):
        assert compiler_options(phase, cpu) == OLDER_PRODUCTS | LEAST_MEMORY
    for phase in ("backward", "backward_add", "square_norm", "update"):
        assert compiler_options(phase, cpu) == LEAST_MEMORY


def test_other_platforms_have_no_such_options():
    class Gpu:
        platform = "gpu"

    assert compiler_options("forward", Gpu()) == {}


def test_an_xla_without_the_option_does_without_it(cpu, monkeypatch):
    monkeypatch.setattr(compiler, "OLDER_PRODUCTS", {"xla_cpu_of_another_time": "1"})
    compiler._known.cache_clear()
    assert compiler_options("forward", cpu) == LEAST_MEMORY
    compiler._known.cache_clear()


def test_the_option_takes_products_from_the_newer_library_and_says_nothing(cpu, capfd):
    """An empty value does too, but XLA then complains on standard error for every program."""
    lowered = jax.jit(lambda a, b: a @ b).lower(jnp.ones((32, 64)), jnp.ones((64, 128)))
    assert "ynn" in lowered.compile().as_text()
    assert "ynn" not in lowered.compile(compiler_options=compiler_options("forward", cpu)).as_text()
    assert capfd.readouterr().err == ""
