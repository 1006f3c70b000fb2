"""XLA's options for a stage's programs on CPUs: which library multiplies, and in which order a program computes.

XLA has two libraries there. The newer one lays the right operand of a product out anew before it multiplies: in F that
is the weights, which a scan reads at every time step, so F uses the older one (32 rows of 1,024 units: less than half
the time). B reads its weights from the left (`layers.lstm.product_from_left`), where the newer one is the faster of the
two. W, whose products cross the rows, is beyond the newer one anyway. docs/benchmarks/NOTES.md has the numbers. What
multiplies nothing keeps the newer one: without it a sum of squares first writes all squares down.

By itself XLA orders a program for operations to run at once, and puts first what waits for nothing, as the zeros that
every scan begins with. So B of rows computed again would hold the arrays of all rows from its start, and W the joined
chunks of all. Ordered for memory they hold those of one row after another.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

# Leaves sums and maxima to the newer library, where the head's softmax is twice as fast, and products to the older one.
OLDER_PRODUCTS: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
LEAST_MEMORY: dict[str, Any] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
BY_THE_OLDER = ("forward", "evaluate", "infer", "weight_gradient")


def compiler_options(phase: str, device: Any) -> dict[str, Any]:
    """XLA's options for a program.

    Args:
      phase: what the program does, as in its key.
      device: where it will run.

    Example:
      >>> compiler_options("backward", jax.devices("cpu")[0])
      {'xla_cpu_scheduler_type': 'CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED'}
    """
    if device.platform != "cpu":
        return {}
    wanted = LEAST_MEMORY | (OLDER_PRODUCTS if phase.startswith(BY_THE_OLDER) else {})
    return {name: value for name, value in wanted.items() if _known(name, value)}


@functools.cache
def _known(name: str, value: str) -> bool:
    """Whether this XLA knows an option: some are experimental."""
    probe = jax.jit(lambda: 0).lower()
    try:
        probe.compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True
