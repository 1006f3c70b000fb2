"""A step as a picture: what each device did when, measured above predicted on one time axis.

    measured    cpu:0  |F0|F1|F2|....|B2|B1|B0| W |U|
                cpu:1  |..|F0|F1|F2|B2|B1|B0| W |...|U|
    predicted   cpu:0  ...

A stage is a colour, a kind of task a shade of it from light (F) to dark (U), idle time the grey of the lane. A box says
its chunk where that fits. The colours are those of Okabe and Ito, which colour-blind eyes tell apart too, without their
yellow, whose light shade is lost on white.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mp_lstm.planning.costs import Kind
from mp_lstm.planning.schedule import KINDS, Schedule, Task, label
from mp_lstm.planning.simulate import Timeline
from mp_lstm.training.plots import new_figure, save

Colour = tuple[float, float, float]

STAGES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
# How far a kind's shade lies from its stage's colour, towards white (1) or black (-1).
SHADES: dict[Kind, float] = {"F": 0.55, "B": 0.0, "W": -0.4, "U": -0.75}
WORDS: dict[Kind, str] = {"F": "forward", "B": "backward", "W": "weight gradient", "U": "update"}
IDLE, GREY = "#ececec", 0.55

# In pixels. A picture of many devices grows with its lanes.
WIDTH, HEIGHT, FRAME, LANE = 1400, 500, 220, 30
MARGIN = 4
ENTRIES = 9  # most entries of the legend that stand in one line
NAMED = 4  # most devices whose idle shares a title has one by one


def timeline_picture(
    path: str | os.PathLike[str],
    measured: Timeline | None,
    predicted: Timeline,
    schedule: Schedule,
    device_names: Sequence[str],
    title: str,
) -> None:
    """Draws a step: a lane for each device, measured above predicted.

    Args:
      path: the picture; its suffix says which kind.
      measured: in seconds; None: only the prediction is drawn.
      predicted: in seconds.
      schedule: what both ran.
      device_names: by device index.
      title: what the step is of. The step times and idle shares stand below it.

    Raises:
      InputError: matplotlib is not installed, or the file cannot be written.

    Example:
      >>> import tempfile
      >>> from mp_lstm.planning import simulate, wavefront
      >>> schedule = wavefront((0, 1), (4,))
      >>> predicted = simulate(schedule, lambda task: 0.01)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     timeline_picture(f"{folder}/plan.png", None, predicted, schedule, ["cpu:0", "cpu:1"], "bucket 32")
      ...     os.path.getsize(f"{folder}/plan.png") > 1000
      True
    """
    timelines = {"predicted": predicted} if measured is None else {"measured": measured, "predicted": predicted}
    longest = max(timeline.makespan for timeline in timelines.values())
    scale, unit = _unit(longest)
    height = max(HEIGHT, FRAME + LANE * len(timelines) * len(device_names))
    figure = new_figure(path, width=WIDTH, height=height)
    panels = figure.subplots(len(timelines), sharex=True, squeeze=False)[:, 0]
    for axes, (what, timeline) in zip(panels, timelines.items(), strict=True):
        axes.set_title(f"{what}: {summary(timeline, device_names)}", loc="left")
        _draw_lanes(axes, timeline, schedule, device_names, scale)
    panels[-1].set_xlim(0, longest * scale)
    panels[-1].set_xlabel(f"time ({unit})")
    figure.suptitle(title, fontweight="bold")
    _draw_legend(figure, panels[0], schedule.stages)
    figure.draw_without_rendering()  # lays the picture out: only now is it known which words fit their boxes
    for axes, timeline in zip(panels, timelines.values(), strict=True):
        _write_labels(axes, timeline, schedule, scale)
    save(figure, path)


def summary(timeline: Timeline, device_names: Sequence[str]) -> str:
    """A step in words: its time, and the idle share of each device, or of many their range.

    Example:
      >>> summary(Timeline({}, {}, 0.25, {0: 0.2, 1: 0.1}, {0: 0.2, 1: 0.6}), ["cpu:0", "cpu:1"])
      '250 ms a step; idle cpu:0 20%, cpu:1 60%'
    """
    scale, unit = _unit(timeline.makespan)
    idle = timeline.idle
    if len(idle) > NAMED:
        shares = f"{min(idle.values()):.0%} to {max(idle.values()):.0%} on {len(idle)} devices"
    else:
        shares = ", ".join(f"{device_names[device]} {share:.0%}" for device, share in idle.items())
    return f"{timeline.makespan * scale:.4g} {unit} a step; idle {shares}"


def _unit(seconds: float) -> tuple[float, str]:
    """How a time of this size is written: what seconds are multiplied by, and the unit."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def shade(kind: Kind, stage: int) -> Colour:
    """The colour of a task: red, green and blue from 0 to 1.

    Example:
      >>> [round(part, 2) for part in shade("B", 0)]
      [0.0, 0.45, 0.7]
    """
    code, towards = STAGES[stage % len(STAGES)], SHADES[kind]
    red, green, blue = (_mix(int(code[at : at + 2], 16) / 255, towards) for at in (1, 3, 5))
    return red, green, blue


def _mix(part: float, towards: float) -> float:
    return part + (1 - part) * towards if towards > 0 else part * (1 + towards)


def _ink(paper: Colour) -> str:
    """Black on what is light, white on what is dark."""
    red, green, blue = paper
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _draw_lanes(axes: Any, timeline: Timeline, schedule: Schedule, device_names: Sequence[str], scale: float) -> None:
    for device, tasks in schedule.by_device().items():
        axes.barh(device, timeline.makespan * scale, color=IDLE)
        axes.barh(
            [device] * len(tasks),
            [(timeline.end[task] - timeline.start[task]) * scale for task in tasks],
            left=[timeline.start[task] * scale for task in tasks],
            color=[shade(task.kind, task.stage) for task in tasks],
            edgecolor="white",
            linewidth=0.5,
        )
    axes.set_yticks(range(len(device_names)), device_names)
    axes.set_ylim(len(device_names) - 0.5, -0.5)  # the first on top
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_legend(figure: Any, axes: Any, stages: int) -> None:
    """The colours of the stages and the shades of the kinds, as empty bars that have names."""
    for first in range(min(stages, len(STAGES))):
        same = [str(stage) for stage in range(first, stages, len(STAGES))]  # colours come round again
        names = ", ".join(same if len(same) <= 2 else [*same[:2], "..."])
        axes.barh(0, 0, color=shade("B", first), label=f"stage {names}")
    for kind, towards in SHADES.items():
        axes.barh(0, 0, color=[_mix(GREY, towards)] * 3, label=f"{kind} {WORDS[kind]}")
    axes.barh(0, 0, color=IDLE, label="idle")
    entries = min(stages, len(STAGES)) + len(SHADES) + 1
    figure.legend(loc="outside lower center", ncols=entries if entries <= ENTRIES else -(-entries // 2), frameon=False)


def _write_labels(axes: Any, timeline: Timeline, schedule: Schedule, scale: float) -> None:
    """Writes in each box its task (F3); where one of a kind has no room, its chunk alone (3), or nothing."""

    def room(task: Task) -> float:
        ends = [(timeline.start[task] * scale, 0), (timeline.end[task] * scale, 0)]
        left, right = axes.transData.transform(ends)[:, 0]
        return right - left - MARGIN

    for kind in KINDS:
        texts = [_text(axes, timeline, schedule, scale, task) for task in schedule.tasks if task.kind == kind]
        rooms = [room(task) for task in schedule.tasks if task.kind == kind]
        if any(_width(text) > wide for text, wide in zip(texts, rooms, strict=True)):
            for text in texts:
                text.set_text(text.get_text()[1:])
        for text, wide in zip(texts, rooms, strict=True):
            if not text.get_text() or _width(text) > wide:
                text.remove()


def _text(axes: Any, timeline: Timeline, schedule: Schedule, scale: float, task: Task) -> Any:
    text = axes.text(
        (timeline.start[task] + timeline.end[task]) / 2 * scale,
        schedule.devices[task.stage],
        label(task, microbatches=len(schedule.chunks)),
        color=_ink(shade(task.kind, task.stage)),
        ha="center",
        va="center",
    )
    text.set_in_layout(False)
    return text


def _width(text: Any) -> float:
    return text.get_window_extent().width
