"""What a layer costs, and how long a device takes for it: plain numbers, from formulas.

A layer states its `Cost` for a batch size and a number of time steps; costs add up over the layers of a stage, and
`task_times` turns them into seconds with the `Rates` of a device. The one thing such a model must not forget is that
every F and every B reads the stage's weights again, whatever the length of its chunk: this is what many short chunks
pay for a short pipeline fill, and without it a planner would cut time ever finer.

Times are sums of a compute, a memory and a dispatch part. They rank plans; they are not measurements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

STATE_BYTES = 4  # of one parameter, gradient or optimiser value: they stay float32 whatever the products use
UPDATE_PASSES = 7  # U reads parameter, gradient and two moments, and writes parameter and moments (Adam)


class Cost(NamedTuple):
    """Cost of one layer for one unit.

    Args:
      forward, backward, weight: floating-point operations of F, B and W (a multiply-add counts two).
      parameters: number of parameters the layer owns.
      parameter_bytes: bytes of the parameters that every F, B or W reads.
      activation_bytes: bytes saved by F for B and W.
      transfer_bytes: bytes of the output, sent on when the next layer lives elsewhere.
    """

    forward: float
    backward: float
    weight: float
    parameters: int
    parameter_bytes: int
    activation_bytes: int
    transfer_bytes: int

    @property
    def flops(self) -> float:
        """Operations of all three phases."""
        return self.forward + self.backward + self.weight


class Rates(NamedTuple):
    """What a device can do. The defaults are nominal for one core of a server CPU in float32.

    Args:
      flops_per_second: floating-point operations in large matrix products.
      bytes_per_second: main memory bandwidth.
      transfer_bytes_per_second: bandwidth of a link between two devices.
      latency_seconds: time to dispatch a task, and to begin a transfer.
    """

    flops_per_second: float = 150e9
    bytes_per_second: float = 10e9
    transfer_bytes_per_second: float = 5e9
    latency_seconds: float = 3e-5


class TaskTimes(NamedTuple):
    """Seconds of one stage's tasks: F and B of one unit, W of one micro-batch, U of one step."""

    F: float
    B: float
    W: float
    U: float


def total(costs: Iterable[Cost]) -> Cost:
    """Adds the costs of consecutive layers; the output that is sent on is the last layer's.

    Args:
      costs: in the order of the layers.

    Returns:
      The cost of the layers as one; all zeros for no layers.

    Example:
      >>> total([Cost(10, 10, 10, 5, 20, 8, 4), Cost(1, 2, 3, 4, 16, 8, 2)])
      Cost(forward=11, backward=12, weight=13, parameters=9, parameter_bytes=36, activation_bytes=16, transfer_bytes=2)
    """
    parts = tuple(costs)
    return Cost(
        forward=sum(part.forward for part in parts),
        backward=sum(part.backward for part in parts),
        weight=sum(part.weight for part in parts),
        parameters=sum(part.parameters for part in parts),
        parameter_bytes=sum(part.parameter_bytes for part in parts),
        activation_bytes=sum(part.activation_bytes for part in parts),
        transfer_bytes=parts[-1].transfer_bytes if parts else 0,
    )


def task_times(unit: Cost, joined: Cost, rates: Rates) -> TaskTimes:
    """Predicts how long a stage's tasks take.

    Args:
      unit: the stage's cost for one unit: one chunk of one micro-batch.
      joined: its cost for all chunks of the micro-batch, over which one W runs. Not a multiple of `unit`: the
        parameters are read once.
      rates: of the stage's device.

    Returns:
      Seconds of F, B, W and U.

    Example:
      >>> unit = Cost(2e9, 2e9, 2e9, 1_000_000, 4_000_000, 0, 0)
      >>> joined = unit._replace(forward=8e9, backward=8e9, weight=8e9)
      >>> rates = Rates(flops_per_second=1e9, bytes_per_second=4e6, latency_seconds=0.5)
      >>> task_times(unit, joined, rates)
      TaskTimes(F=3.5, B=3.5, W=10.5, U=7.5)
    """

    def seconds(flops: float, moved: float) -> float:
        return flops / rates.flops_per_second + moved / rates.bytes_per_second + rates.latency_seconds

    read = unit.parameter_bytes + unit.activation_bytes
    # W reads the tape, and reads and writes the accumulated gradient.
    accumulated = joined.activation_bytes + 2 * STATE_BYTES * joined.parameters
    return TaskTimes(
        F=seconds(unit.forward, read),
        B=seconds(unit.backward, read),
        W=seconds(joined.weight, accumulated),
        U=seconds(0, UPDATE_PASSES * STATE_BYTES * joined.parameters),
    )
