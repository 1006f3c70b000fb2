"""XLA's options for a stage's programs on CPUs: which library multiplies, and in which order a program computes.

XLA has two libraries there. Of float32, the newer one lays the right operand of a product out anew before it
multiplies: in F that is the weights, which a scan reads at every time step, so F uses the older one (32 rows of 1,024
units: less than half the time). B reads its weights from the left (`layers.products.product_from_left`), where the
newer one is the faster of the two. W, whose products cross the rows, is beyond the newer one anyway. What multiplies
nothing keeps the newer one: without it a sum of squares first writes all squares down.

Operands rounded to bfloat16 are the newer one's in every phase: it multiplies them in the processor's matrix units,
where there are any, and the older one converts them back to float32. docs/benchmarks/NOTES.md has the numbers.

By itself XLA orders a program for operations to run at once, and puts first what waits for nothing, as the zeros that
every scan begins with. So B of rows computed again would hold the arrays of all rows from its start, and W the joined
chunks of all. Ordered for memory they hold those of one row after another.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, subjaxprs

# Leaves sums and maxima to the newer library, where the head's softmax is twice as fast, and products to the older one.
OLDER_PRODUCTS: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
LEAST_MEMORY: dict[str, Any] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
BY_THE_OLDER = ("forward", "evaluate", "infer", "weight_gradient")


def compiler_options(phase: str, device: Any, jaxpr: Jaxpr) -> dict[str, Any]:
    """XLA's options for a program.

    Args:
      phase: what the program does, as in its key.
      device: where it will run.
      jaxpr: what it computes.

    Example:
      >>> jaxpr = jax.make_jaxpr(lambda a, b: a @ b)(jnp.ones((2, 3)), jnp.ones((3, 4))).jaxpr
      >>> compiler_options("backward", jax.devices("cpu")[0], jaxpr)
      {'xla_cpu_scheduler_type': 'CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED'}
    """
    if device.platform != "cpu":
        return {}
    older = phase.startswith(BY_THE_OLDER) and not multiplies_rounded(jaxpr)
    wanted = LEAST_MEMORY | (OLDER_PRODUCTS if older else {})
    return {name: value for name, value in wanted.items() if _known(name, value)}


def multiplies_rounded(jaxpr: Jaxpr) -> bool:
    """Whether a program has a product of bfloat16 operands, in its loops too."""
    products = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general")
    here = any(_is_rounded(operand) for eqn in products for operand in eqn.invars)
    return here or any(map(multiplies_rounded, subjaxprs(jaxpr)))


def _is_rounded(operand: Any) -> bool:
    return operand.aval.dtype == jnp.bfloat16


@functools.cache
def _known(name: str, value: str) -> bool:
    """Whether this XLA knows an option: some are experimental."""
    probe = jax.jit(lambda: 0).lower()
    try:
        probe.compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True
