"""XLA's options by phase: F by the matrix library that reads weights as they lie, all in the order of least memory."""

import jax
import jax.numpy as jnp
import pytest

from mp_lstm.layers.products import product, product_from_left, product_over_rows, product_transposed
from mp_lstm.runtime import compiler
from mp_lstm.runtime.compiler import LEAST_MEMORY, OLDER_PRODUCTS, compiler_options

A, B = jnp.ones((32, 64)), jnp.ones((64, 128))
PRODUCT = jax.make_jaxpr(jnp.matmul)(A, B).jaxpr


@pytest.fixture
def cpu():
    return jax.devices("cpu")[0]


def test_what_multiplies_in_f_and_w_uses_the_older_library(cpu):
    for phase in ("forward", "evaluate", "infer", "weight_gradient", "weight_gradient_add"):
        assert compiler_options(phase, cpu, PRODUCT) == OLDER_PRODUCTS | LEAST_MEMORY
    for phase in ("backward", "backward_add", "square_norm", "update"):
        assert compiler_options(phase, cpu, PRODUCT) == LEAST_MEMORY


def test_other_platforms_have_no_such_options():
    class Gpu:
        platform = "gpu"

    assert compiler_options("forward", Gpu(), PRODUCT) == {}


def test_an_xla_without_the_option_does_without_it(cpu, monkeypatch):
    monkeypatch.setattr(compiler, "OLDER_PRODUCTS", {"xla_cpu_of_another_time": "1"})
    compiler._known.cache_clear()
    assert compiler_options("forward", cpu, PRODUCT) == LEAST_MEMORY
    compiler._known.cache_clear()


def test_the_option_takes_products_from_the_newer_library_and_says_nothing(cpu, capfd):
    """An empty value does too, but XLA then complains on standard error for every program."""
    lowered = jax.jit(jnp.matmul).lower(A, B)
    assert "ynn" in lowered.compile().as_text()
    assert "ynn" not in lowered.compile(compiler_options=compiler_options("forward", cpu, PRODUCT)).as_text()
    assert capfd.readouterr().err == ""


def test_rounded_operands_are_the_newer_librarys_in_every_phase(cpu):
    """The older one converts them back to float32: products in bfloat16 once took as long as those in float32."""

    def rounded(a, b):
        return product(a, b, jnp.bfloat16)

    def in_a_loop(a, b):
        return jax.lax.scan(lambda h, _: (rounded(h, b)[:, :64], None), a, length=3)[0]

    for function in (rounded, in_a_loop, jax.jit(in_a_loop)):
        jaxpr = jax.make_jaxpr(function)(A, B).jaxpr
        for phase in ("forward", "weight_gradient", "backward"):
            assert compiler_options(phase, cpu, jaxpr) == LEAST_MEMORY


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (product, [(640, 64), (64, 256)]),
        (product_transposed, [(640, 256), (64, 256)]),
        (product_over_rows, [(640, 64), (640, 256)]),
        (lambda a, b, dtype: product_from_left(a, b, dtype, a.dtype), [(640, 256), (64, 256)]),
    ],
)
def test_every_product_of_rounded_operands_is_one_for_the_newer_library(cpu, function, shapes):
    """W's was not: its left operand lay column by column."""

    def rounded(a, b):
        return function(a, b, jnp.bfloat16)

    args = [jnp.ones(shape) for shape in shapes]
    options = compiler_options("weight_gradient", cpu, jax.make_jaxpr(rounded)(*args).jaxpr)
    text = jax.jit(rounded, compiler_options=options).lower(*args).compile().as_text()
    assert "__ynn_fusion" in text
    assert " dot(" not in text.split("ENTRY")[1]
