"""A plan as tables: the placement of its rows, the cutting of its buckets, and what it was chosen over.

A choice is a plan in numbers. That one beats another can have three causes, and the table says which: devices wait more
(the pipeline fills and drains longer, or the largest stage is larger), there is more to do (weights are read again for
every chunk, every task is dispatched), or it does not fit the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mp_lstm.planning.plan import Plan

ALIKE = 1e-4  # relative difference of step times below which plans are as fast as each other


class Choice(NamedTuple):
    """A plan that the search looked at.

    Args:
      what: what is particular about it.
      seconds: predicted time of a step, the mean over buckets by their weights; infinite where it does not fit.
      work: seconds that all devices together are busy in it.
      devices: number of devices.
      peak: bytes of the fullest device, if memory was asked for.
      fits: whether every device holds it.
    """

    what: str
    seconds: float
    work: float
    devices: int
    peak: int | None = None
    fits: bool = True

    @property
    def idle(self) -> float:
        """Share of the step that a device waits, on average."""
        return 1 - self.work / (self.devices * self.seconds) if self.seconds else 0.0


def alternatives_table(choices: Sequence[Choice]) -> str:
    """Draws choices, the first being the chosen one, with the reason why each of the others is not.

    Example:
      >>> print(alternatives_table([Choice("2 devices", 0.5, 0.9, 2, 4_000_000), Choice("1 device", 0.8, 0.8, 1)]))
      plan       ms a step  slower   idle  memory  why not
      2 devices      500.0          10.0%  4.0 MB  chosen
      1 device       800.0  +60.0%   0.0%       -  each device has more to do
    """
    if not choices:
        return "made by hand: nothing was compared"
    chosen = choices[0]
    lines = [("plan", "ms a step", "slower", "idle", "memory", "why not")]
    for choice in choices:
        memory = "-" if choice.peak is None else _megabytes(choice.peak)
        if not choice.fits:
            lines.append((choice.what, "-", "", "", memory, "does not fit the memory"))
            continue
        slower = "" if choice is chosen else f"{choice.seconds / chosen.seconds - 1:+.1%}"
        why = "chosen" if choice is chosen else reason(choice, chosen)
        lines.append((choice.what, f"{choice.seconds * 1e3:,.1f}", slower, f"{choice.idle:.1%}", memory, why))
    return draw(lines, "<>>>><")


def reason(choice: Choice, chosen: Choice) -> str:
    """Says why a choice is slower than the chosen one."""
    if choice.seconds < chosen.seconds * (1 - ALIKE):
        return "faster, but leaves a device idle on nominal costs: measure them"
    if choice.seconds <= chosen.seconds * (1 + ALIKE):
        return "as fast; the simpler one was taken"
    if choice.devices < chosen.devices:
        return "each device has more to do"
    if choice.devices > chosen.devices:
        return "more devices wait more than they help"
    more = choice.work / chosen.work - 1 if chosen.work else 0.0
    if more > ALIKE and choice.idle <= chosen.idle:
        return f"{more:.1%} more work: weights read again, tasks dispatched"
    waits = f"devices wait more, {choice.idle:.1%} of the step"
    return f"{waits}, and {more:.1%} more work" if more > ALIKE else waits


def placement_table(plan: Plan) -> str:
    """Draws every row with its stage, device, kind, parameters and share of the work."""
    lines = [("stage", "device", "row", "kind", "parameters", "share")]
    for stage, indices in enumerate(plan.stages):
        for row in (plan.rows[index] for index in indices):
            lines.append(
                (str(stage), str(plan.devices[stage]), row.name, row.kind, f"{row.parameters:,}", f"{row.share:.1%}")
            )
    parameters, share = sum(row.parameters for row in plan.rows), sum(row.share for row in plan.rows)
    lines.append(("", "", "total", "", f"{parameters:,}", f"{share:.1%}"))
    return draw(lines, "><<<>>")


def bucket_table(plan: Plan) -> str:
    """Draws how a batch of each bucket is cut."""
    lines = [("bucket", "chunk", "chunks", "micro-batches", "rows each", "schedule")]
    lines += [(*map(str, bucket), plan.schedule_name) for bucket in plan.buckets.values()]
    return draw(lines, ">>>>><")


def draw(lines: Sequence[tuple[str, ...]], align: str) -> str:
    """Draws lines of cells as columns, each aligned "<" or ">"."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, align, widths, strict=True)).rstrip()
        for line in lines
    )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
