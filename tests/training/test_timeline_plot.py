"""The picture of a step: what is drawn where, and that it can be read."""

from __future__ import annotations

import itertools
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from mp_lstm.errors import InputError
from mp_lstm.planning import Schedule, Timeline, simulate, wavefront
from mp_lstm.planning.schedule import KINDS
from mp_lstm.training import timeline_plot
from mp_lstm.training.timeline_plot import STAGES, shade, summary, timeline_picture

SECONDS = {"F": 0.01, "B": 0.02, "W": 0.05, "U": 0.005}


def steps(schedule: Schedule) -> tuple[Timeline, Timeline]:
    """A measured and a predicted step; the prediction is half as long."""
    return simulate(schedule, lambda t: SECONDS[t.kind]), simulate(schedule, lambda t: SECONDS[t.kind] / 2)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would have been written."""
    figures: list[Any] = []
    monkeypatch.setattr(timeline_plot, "save", lambda figure, path: figures.append(figure))
    return figures


def boxes(axes: Any) -> list[tuple[int, float, float, tuple[float, ...]]]:
    """Lane, start, end and colour of every bar, idle lanes and legend apart."""
    found = []
    for box in axes.patches:
        if box.get_edgecolor()[:3] == (1.0, 1.0, 1.0):
            lane = round(box.get_y() + box.get_height() / 2)
            found.append((lane, box.get_x(), box.get_x() + box.get_width(), box.get_facecolor()[:3]))
    return sorted(found)


def words(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_measured_stands_above_predicted_on_one_time_axis(drawn: list[Any]) -> None:
    schedule = wavefront((0, 1), (2,))
    measured, predicted = steps(schedule)
    timeline_picture("a.png", measured, predicted, schedule, ["cpu:0", "cpu:3"], "bucket 32")
    (figure,) = drawn
    upper, lower = figure.axes
    assert figure.get_suptitle() == "bucket 32"
    assert upper.get_title(loc="left") == "measured: 145 ms a step; idle cpu:0 21%, cpu:3 21%"
    assert lower.get_title(loc="left").startswith("predicted: 72.5 ms a step; idle cpu:0 21%")
    assert upper.get_position().y0 > lower.get_position().y1
    assert upper.get_xlim() == lower.get_xlim() == (0, pytest.approx(145))
    assert lower.get_xlabel() == "time (ms)"
    for axes in (upper, lower):
        assert [label.get_text() for label in axes.get_yticklabels()] == ["cpu:0", "cpu:3"]
        assert axes.yaxis_inverted()  # the first device on top
    for axes, timeline in ((upper, measured), (lower, predicted)):
        expected = [
            (task.stage, timeline.start[task] * 1e3, timeline.end[task] * 1e3, shade(task.kind, task.stage))
            for task in schedule.tasks
        ]
        for box, (lane, start, end, colour) in zip(boxes(axes), sorted(expected), strict=True):
            assert box == (lane, pytest.approx(start), pytest.approx(end), pytest.approx(colour))


def test_a_plan_has_a_prediction_only(drawn: list[Any]) -> None:
    schedule = wavefront((0, 1), (2,))
    timeline_picture("a.png", None, steps(schedule)[1], schedule, ["cpu:0", "cpu:1"], "plan")
    (axes,) = drawn[0].axes
    assert axes.get_title(loc="left").startswith("predicted: ")


def test_the_legend_explains_colours_and_shades(drawn: list[Any]) -> None:
    schedule = wavefront((0, 1), (1,))
    timeline_picture("a.png", *steps(schedule), schedule, ["cpu:0", "cpu:1"], "plan")
    (legend,) = drawn[0].legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["stage 0", "stage 1", "F forward", "B backward", "W weight gradient", "U update", "idle"]


def test_colours_come_round_again(drawn: list[Any]) -> None:
    stages = 13
    schedule = wavefront(tuple(range(stages)), (1,))
    timeline_picture("a.png", None, steps(schedule)[1], schedule, [f"gpu:{i}" for i in range(stages)], "plan")
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert names[:2] == ["stage 0, 6, ...", "stage 1, 7"]
    assert "idle 81% to 81% on 13 devices" in drawn[0].axes[0].get_title(loc="left")
    assert drawn[0].get_size_inches()[1] * drawn[0].dpi > timeline_plot.HEIGHT  # lanes stay high enough to read


def test_boxes_say_their_task_where_it_fits(drawn: list[Any]) -> None:
    for chunks in (2, 16, 200):
        schedule = wavefront((0,), (chunks,))
        timeline_picture("a.png", None, steps(schedule)[1], schedule, ["cpu:0"], "plan")
    wide, narrow, tiny = (words(figure.axes[0]) for figure in drawn)
    assert wide == ["F0", "F1", "B1", "B0", "W", "U"]
    assert [word for word in narrow if word.isdigit()] == [*map(str, range(16))]  # Fs; Bs are twice as wide
    assert [word for word in narrow if word[0] == "B"] == [f"B{chunk}" for chunk in range(15, -1, -1)]
    assert [word for word in tiny if word != "W"] == []


def test_words_stay_inside_their_boxes(drawn: list[Any]) -> None:
    schedule = wavefront((0, 1, 2), (4, 3))
    timeline_picture("a.png", *steps(schedule), schedule, ["cpu:0", "cpu:1", "cpu:2"], "plan")
    for axes in drawn[0].axes:
        extents = [box.get_window_extent() for box in axes.patches]
        assert axes.texts
        for text in axes.texts:
            inner = text.get_window_extent()
            assert any(box.x0 <= inner.x0 and inner.x1 <= box.x1 and box.y0 <= inner.y0 for box in extents)


def luminance(colour: tuple[float, ...]) -> float:
    """Relative luminance as the Web Content Accessibility Guidelines define it."""
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_shades_darken_from_f_to_u_and_words_stand_out(stage: int) -> None:
    lights = [luminance(shade(kind, stage)) for kind in KINDS]
    assert lights == sorted(lights, reverse=True)
    assert all(lighter > 1.5 * darker for lighter, darker in itertools.pairwise(lights))
    for kind, light in zip(KINDS, lights, strict=True):
        ink = {"black": 0.0, "white": 1.0}[timeline_plot._ink(shade(kind, stage))]
        assert (max(light, ink) + 0.05) / (min(light, ink) + 0.05) > 3  # enough for large words, by the same guidelines


@pytest.mark.parametrize(
    ("seconds", "written"), [(2.5, "2.5 s"), (0.99997, "1000 ms"), (0.0123, "12.3 ms"), (4.2e-5, "42 µs")]
)
def test_times_have_the_unit_of_their_size(seconds: float, written: str) -> None:
    assert summary(Timeline({}, {}, seconds, {0: 0.0}, {0: 0.0}), ["cpu:0"]) == f"{written} a step; idle cpu:0 0%"


def test_the_file_is_a_picture_of_its_size(tmp_path: Path) -> None:
    schedule = wavefront((0, 1), (4,))
    timeline_picture(tmp_path / "a.png", *steps(schedule), schedule, ["cpu:0", "cpu:1"], "bucket 32")
    written = (tmp_path / "a.png").read_bytes()
    assert written.startswith(b"\x89PNG")
    assert struct.unpack(">II", written[16:24]) == (1400, 500)


def test_without_matplotlib_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    schedule = wavefront((0,), (1,))
    with pytest.raises(InputError, match=r"^plan.png is not drawn: .*pip install 'mp-lstm\[plot\]'"):
        timeline_picture(tmp_path / "plan.png", None, steps(schedule)[1], schedule, ["cpu:0"], "plan")
