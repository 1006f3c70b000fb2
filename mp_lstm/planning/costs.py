"""What a layer costs in plain numbers, and the types in which costs are handed on.

A layer states its `Cost` for a batch size and a number of time steps: operations and bytes, from formulas. A
`CostModel` says what each task of a placement row takes, in seconds and in bytes of memory; everything that plans asks
one of these and nothing else. There are two: `CalibratedCosts` turns a `Cost` into seconds by the rates of a described
machine, and a measured one reads them from a table.

What such numbers must not forget is that every F and every B reads the stage's weights again, whatever the length of
its chunk: this is what many short chunks pay for a short pipeline fill, and without it a planner would cut time ever
finer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

Kind = Literal["F", "B", "W", "U"]

STATE_BYTES = 4  # of one parameter, gradient or optimiser value: they stay float32 whatever the products use


class Cost(NamedTuple):
    """Cost of one layer for one unit. Bytes of arrays are linear in batch size times time steps.

    Args:
      forward, backward, weight: floating-point operations of F, B and W (a multiply-add counts two).
      parameters: number of parameters the layer owns.
      parameter_bytes: bytes of the parameters that every F, B or W reads.
      saved_bytes: of the arrays that F makes and B reads last.
      transfer_bytes: of the output, sent on when the next layer lives elsewhere.
      kept_bytes: of the arrays that F makes and W reads last.
      tape_bytes: of the arrays that B makes and W reads.
      input_bytes: of x, if F saves it.
      step_bytes: bytes of parameters that F and B read at every time step, as a scan does its recurrent kernel.
      scratch_bytes: of the largest temporaries of F and B.
      prepared_bytes: of the copies of parameters that are made once a step for F and B.
      scratch_weight_bytes: of the largest temporaries of W, where it does more than its products.
    """

    forward: float
    backward: float
    weight: float
    parameters: int
    parameter_bytes: int
    saved_bytes: int
    transfer_bytes: int
    kept_bytes: int = 0
    tape_bytes: int = 0
    input_bytes: int = 0
    step_bytes: int = 0
    scratch_bytes: int = 0
    prepared_bytes: int = 0
    scratch_weight_bytes: int = 0

    @property
    def flops(self) -> float:
        """Operations of all three phases."""
        return self.forward + self.backward + self.weight

    @property
    def activation_bytes(self) -> int:
        """Bytes that F leaves for B and W."""
        return self.input_bytes + self.saved_bytes + self.kept_bytes


class Seconds(NamedTuple):
    """How long a task takes.

    Args:
      alone: seconds while the other devices of its host are idle.
      shared: seconds while every device of its host is busy; equal to `alone` for devices of their own.
    """

    alone: float
    shared: float


class RowMemory(NamedTuple):
    """Bytes of one placement row; all but the first three for one unit, linear in its batch rows times its time steps.

    But the temporaries of a lean head are those of a block of rows, about as large for any unit of some blocks.

    Args:
      parameters: of the parameters the row owns; their gradients take as much again.
      state: of the optimiser's state of them, and of the copies that are made of them for F and B.
      largest: of the largest array among the parameters.
      saved: arrays that F makes and B reads last (an LSTM's gates and cells).
      kept: arrays that F makes and W reads last (an LSTM's y, which is in the tape too).
      tape: arrays that B makes and W reads.
      input: of x, if F saves it: counted only in the first row of a stage, elsewhere the row below has it.
      output: of y, sent on to the next stage.
      scratch_forward, scratch_backward, scratch_weight: temporaries of the compiled programs. W's are those of adding
        to a gradient, the row's own gradient among them.
    """

    parameters: int
    state: int
    largest: int
    saved: int
    kept: int
    tape: int
    input: int
    output: int
    scratch_forward: int
    scratch_backward: int
    scratch_weight: int


@runtime_checkable
class CostModel(Protocol):
    """What every task costs: seconds, and bytes. Rows are indices of the model's placement rows."""

    @property
    def label(self) -> str:
        """Where the numbers come from, e.g. "measured on 2 x cpu, jax 0.10.2" or "predicted for 8 x h100"."""
        ...

    def seconds(self, kind: Kind, row: int, rows: int, time: int, device: Any) -> Seconds:
        """Time of a row's task: F and B of one unit, W of a micro-batch's joined chunks, U of a step.

        Args:
          kind: of the task.
          row: index of the placement row.
          rows: batch rows of the unit.
          time: time steps of the unit; for W the padded length.
          device: that does it.
        """
        ...

    def overhead(self, device: Any) -> float:
        """Seconds that a task costs beside its rows: its dispatch."""
        ...

    def transfer(self, nbytes: int, source: Any, target: Any) -> float:
        """Seconds until `nbytes` have reached another device."""
        ...

    def memory(self, row: int, rows: int, time: int) -> RowMemory:
        """Bytes of a placement row, for units of `rows` batch rows and `time` steps."""
        ...

    def capacity(self, device: Any) -> int | None:
        """Bytes of a device's memory; None: unknown, and not checked."""
        ...

    def host(self, device: Any) -> Any:
        """The host of a device: devices of equal host share its processor cores."""
        ...

    @property
    def lean_rows(self) -> frozenset[int]:
        """Rows whose costs are those of their lean variants: none but in what `lean` gives."""
        ...

    def lean(self) -> CostModel:
        """The costs of the same model with each row in its lean variant, where its layer has one (`Layer.lean`).

        What is lean already is returned as it is.
        """
        ...


def total(costs: Iterable[Cost]) -> Cost:
    """Adds the costs of consecutive layers.

    Args:
      costs: in the order of the layers.

    Returns:
      The cost of the layers as one; all zeros for no layers. The input is the first layer's: those between layers are
      made by F and so kept. The output is the last one's that states any: a layer that keeps its input's shape may
      state none. Temporaries are those of the largest layer.

    Example:
      >>> both = total([Cost(10, 10, 10, 5, 20, 8, 4, input_bytes=6), Cost(1, 2, 3, 4, 16, 8, 2, input_bytes=4)])
      >>> both.forward, both.parameter_bytes, both.input_bytes, both.kept_bytes, both.transfer_bytes
      (11, 36, 6, 4, 2)
    """
    parts = tuple(costs)
    if not parts:
        return Cost(0, 0, 0, 0, 0, 0, 0)
    added = Cost(*(sum(column) for column in zip(*parts, strict=True)))
    return added._replace(
        transfer_bytes=next((part.transfer_bytes for part in reversed(parts) if part.transfer_bytes), 0),
        kept_bytes=added.kept_bytes + sum(part.input_bytes for part in parts[1:]),
        input_bytes=parts[0].input_bytes,
        scratch_bytes=max(part.scratch_bytes for part in parts),
        scratch_weight_bytes=max(part.scratch_weight_bytes for part in parts),
    )
