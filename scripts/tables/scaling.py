"""Step times on 1 to 8 devices as the planner predicts them: simulated, nothing runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import mp_lstm
from mp_lstm.planning.plan import Plan
from presets import NAMES, load_preset
from tables.kit import Series, draw, lines, markdown, prose, together

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 8


class Predicted(NamedTuple):
    """The best plan for up to so many devices, its step's seconds, and the mean idle share of the devices it uses."""

    devices: int
    plan: Plan
    seconds: float
    idle: float


def measure(name: str, most: int) -> list[Predicted]:
    """Plans a preset for 1, 2, ... devices."""
    preset, found = load_preset(name), []
    costs = mp_lstm.default_calibration().costs(preset.model)
    (length,) = preset.lengths
    for count in range(1, most + 1):
        plan = mp_lstm.make_plan(
            preset.model,
            batch_size=preset.batch_size,
            lengths=preset.lengths,
            devices=[f"core:{i}" for i in range(count)],
            costs=costs,
        )
        timeline = mp_lstm.predict(plan, preset.model, costs, length)
        found.append(Predicted(count, plan, timeline.makespan, sum(timeline.idle.values()) / len(timeline.idle)))
    return found


def row(name: str, one: Predicted, first: Predicted) -> list[str]:
    """A line of the table."""
    (bucket,) = one.plan.buckets.values()
    speedup = first.seconds / one.seconds
    return [
        name,
        f"{one.devices}",
        "+".join(map(str, one.plan.partition)),
        f"{one.plan.schedule_name}, chunks: {bucket.chunks}, micro-batches: {bucket.microbatches}",
        f"{one.seconds * 1e3:.0f}",
        f"{speedup:.2f}",
        f"{speedup / one.devices:.0%}",
        f"{one.idle:.0%}",
    ]


def table(picture: Path, *, quick: bool) -> str:
    """Predicts, draws, and says what it shows."""
    names, most = (NAMES[:1], 2) if quick else (NAMES, MOST)
    found = {name: measure(name, most) for name in names}
    rows = [row(name, one, part[0]) for name, part in found.items() for one in part]

    def panel(axes: Axes) -> None:
        counts = range(1, most + 1)
        series = [Series(name, counts, [part[0].seconds / one.seconds for one in part]) for name, part in found.items()]
        lines(axes, [*series, Series("ideal", counts, counts)], "devices", "speed-up, predicted")

    label = mp_lstm.default_calibration().label
    head = ["preset", "devices", "rows", "schedule", "step, ms", "speed-up", "of ideal", "idle"]
    return together(
        prose(
            f"**Predicted, not measured** ({label}): the best plan for up to so many devices by nominal costs, and its",
            "simulated step. A plan may leave devices unused. No stage is smaller than a row, so the largest row",
            "bounds the speed-up of a preset with few layers.",
        ),
        markdown(head, rows),
        draw(picture, [panel]),
    )
