"""Which of XLA's matrix libraries a stage's programs use on CPUs.

XLA has two there. The newer one lays the right operand of a product out anew before it multiplies: in F that is the
weights, which a scan reads at every time step, so F uses the older one (32 rows of 1,024 units: less than half the
time). B reads its weights from the left (`layers.lstm.product_from_left`), where the newer one is the faster of the
two. W, whose products cross the rows, is beyond the newer one anyway. docs/benchmarks/NOTES.md has the numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

# Leaves convolutions, of which a stage has none, to the newer library, and every product to the older one.
OLDER_PRODUCTS: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"}


def compiler_options(phase: str, device: Any) -> dict[str, Any]:
    """XLA's options for a program.

    Args:
      phase: what the program does, as in its key.
      device: where it will run.

    Example:
      >>> compiler_options("backward", jax.devices("cpu")[0])
      {}
    """
    if device.platform != "cpu" or phase.startswith("backward") or not _known():
        return {}
    return OLDER_PRODUCTS


@functools.cache
def _known() -> bool:
    """Whether this XLA knows the option: it is an experimental one."""
    probe = jax.jit(lambda: 0).lower()
    try:
        probe.compile(compiler_options=OLDER_PRODUCTS)
    except jax.errors.JaxRuntimeError:
        return False
    return True
