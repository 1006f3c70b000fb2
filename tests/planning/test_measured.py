"""Costs from a table: lines between points, JSON to and from disk, and points kept as they are measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.errors import InputError
from mp_lstm.planning.costs import CostModel, RowMemory, Seconds
from mp_lstm.planning.measured import (
    Link,
    MeasuredCosts,
    MemoryPoint,
    Place,
    PointCache,
    RowUse,
    TaskPoint,
    interpolate,
    time_grid,
)

MEMORY = RowMemory(
    parameters=400,
    state=800,
    largest=300,
    saved=70,
    kept=10,
    tape=50,
    input=10,
    output=10,
    scratch_forward=5,
    scratch_backward=6,
    scratch_weight=7,
)


def seconds_of(rows: int, time: int) -> float:
    """Linear in time for given rows, and in rows for a given time."""
    return 0.5 + 0.25 * time + 0.125 * rows + 0.0625 * rows * time


@pytest.fixture
def costs() -> MeasuredCosts:
    """Three rows, the last two alike; measured on a CPU's devices and on an accelerator."""
    shapes = [(20, 4), (20, 16), (20, 60), (10, 4), (10, 60)]
    tasks = [
        TaskPoint(like, device, kind, rows, time, factor * seconds_of(rows, time), 2 * factor * seconds_of(rows, time))
        for like, factor in (("embed", 1), ("lstm", 8))
        for device in ("cpu", "gpu")
        for kind in ("F", "B", "W")
        for rows, time in shapes
    ]
    tasks += [TaskPoint(like, "cpu", "U", 1, 1, 3.0, 4.0) for like in ("embed", "lstm")]
    linear = [
        MemoryPoint(like, 20, time, RowMemory(*MEMORY[:3], *(20 * time * part for part in MEMORY[3:])))
        for like in ("embed", "lstm")
        for time in (4, 60)
    ]
    return MeasuredCosts(
        label="measured on 2 x cpu + 1 x gpu",
        rows=(RowUse("embed", True), RowUse("lstm", False), RowUse("lstm", True)),
        devices={
            "cpu:0": Place("cpu", "process 0", None),
            "cpu:1": Place("cpu", "process 0", None),
            "gpu:0": Place("gpu", "gpu:0", 80 << 30),
        },
        tasks=tuple(tasks),
        memories=tuple(linear),
        overheads={"cpu": 1e-5, "gpu": 2e-5},
        links=(Link("cpu", "cpu", 1e-5, 1e9), Link("cpu", "gpu", 1e-4, 1e10)),
    )


def test_it_is_a_cost_model(costs: MeasuredCosts) -> None:
    assert isinstance(costs, CostModel)


def test_lean_rows_are_like_others_of_the_table(costs: MeasuredCosts, tmp_path: Path) -> None:
    rows = (*costs.rows[:2], RowUse("embed", True))
    both = dataclasses.replace(costs, leaner=rows)
    both.save(tmp_path / "costs.json")
    for table in (both, MeasuredCosts.load(tmp_path / "costs.json")):
        lean = table.lean()
        assert (table.lean_rows, lean.lean_rows) == (frozenset(), {2})
        assert lean.lean() is lean
        assert table.seconds("F", 2, 20, 4, "cpu:0") == table.seconds("F", 1, 20, 4, "cpu:0")
        assert lean.seconds("F", 2, 20, 4, "cpu:0") == table.seconds("F", 0, 20, 4, "cpu:0")
        assert lean.seconds("F", 1, 20, 4, "cpu:0") == table.seconds("F", 1, 20, 4, "cpu:0")
    without = dataclasses.replace(costs, leaner=costs.rows)
    assert without.lean() is without
    costs.save(tmp_path / "plain.json")
    for table in (costs, MeasuredCosts.load(tmp_path / "plain.json")):
        with pytest.raises(
            InputError, match="the head as every remat but 'none' runs it was not measured: measure with"
        ):
            table.lean()


@pytest.mark.parametrize("kind", ["F", "B", "W"])
@pytest.mark.parametrize(
    ("rows", "time"), [(20, 4), (20, 10), (20, 33), (15, 16), (10, 30), (20, 80), (5, 2), (40, 16)]
)
def test_times_lie_on_the_lines_through_the_points(costs: MeasuredCosts, kind: Any, rows: int, time: int) -> None:
    expected = 8 * seconds_of(rows, time)
    assert costs.seconds(kind, 2, rows, time, "cpu:1") == pytest.approx(Seconds(expected, 2 * expected))


def test_an_update_depends_on_neither_rows_nor_time(costs: MeasuredCosts) -> None:
    assert costs.seconds("U", 1, 20, 60, "cpu:0") == costs.seconds("U", 1, 3, 7, "cpu:0") == Seconds(3.0, 4.0)


def test_devices_of_one_host_are_told_by_name(costs: MeasuredCosts) -> None:
    assert costs.host("cpu:0") == costs.host("cpu:1") != costs.host("gpu:0")
    assert (costs.capacity("cpu:0"), costs.capacity("gpu:0")) == (None, 80 << 30)
    assert (costs.overhead("cpu:1"), costs.overhead("gpu:0")) == (1e-5, 2e-5)


def test_transfers(costs: MeasuredCosts) -> None:
    assert costs.transfer(10_000, "cpu:0", "cpu:1") == pytest.approx(2e-5)
    assert costs.transfer(1_000_000, "cpu:1", "gpu:0") == pytest.approx(2e-4)
    assert costs.transfer(1_000_000, "gpu:0", "gpu:0") == 0.0


def test_bytes_scale_with_rows_and_time_and_parameters_do_not(costs: MeasuredCosts) -> None:
    expected = RowMemory(*MEMORY[:3], *(5 * 30 * part for part in MEMORY[3:]))
    assert costs.memory(2, 5, 30) == expected


def test_an_input_that_nobody_else_keeps_counts_wherever_a_stage_begins(costs: MeasuredCosts) -> None:
    kept, alone = costs.memory(2, 20, 4), costs.memory(1, 20, 4)
    assert (kept.kept, kept.input) == (800, 800)
    assert (alone.kept, alone.input) == (1600, 0)
    assert sum(kept) == sum(alone)


@given(
    points=st.dictionaries(
        st.tuples(st.integers(1, 40), st.integers(1, 80)), st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1
    ),
    rows=st.integers(1, 60),
    time=st.integers(1, 120),
)
def test_no_value_is_negative_and_points_stay_as_they_are(points: Any, rows: int, time: int) -> None:
    assert all(value >= 0 for value in interpolate(points, rows, time))
    for at, values in points.items():
        assert interpolate(points, *at) == values


def test_one_point_is_proportional() -> None:
    assert interpolate({(10, 4): (2.0,)}, 20, 8) == (8.0,)


def test_the_table_survives_the_disk(costs: MeasuredCosts, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs.save(path)
    assert MeasuredCosts.load(path) == costs
    assert [file.name for file in tmp_path.iterdir()] == ["costs.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a table of measured costs"),
        ("[]", "not a table of measured costs"),
        ('{"label": "x"}', r"not a table of measured costs \('rows'\): measure again"),
    ],
)
def test_a_file_that_holds_something_else(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        MeasuredCosts.load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No such file or directory: pass a file that MeasuredCosts.save wrote"):
        MeasuredCosts.load(tmp_path / "none.json")


def test_what_was_not_measured_is_said(costs: MeasuredCosts) -> None:
    with pytest.raises(InputError, match=r"device cpu:7 was not measured, these were: cpu:0, cpu:1, gpu:0"):
        costs.seconds("F", 0, 20, 4, "cpu:7")
    with pytest.raises(InputError, match="row 3 is wanted, 3 rows were measured"):
        costs.memory(3, 20, 4)
    with pytest.raises(InputError, match="no transfer from gpu to cpu was measured"):
        costs.transfer(1, "gpu:0", "cpu:0")
    with pytest.raises(InputError, match="no point of U of row 'embed' on gpu was measured"):
        costs.seconds("U", 0, 20, 4, "gpu:0")


def test_a_point_is_measured_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def measure() -> list[float]:
        calls.append(1)
        return [0.1, len(calls)]

    first = PointCache(tmp_path / "new" / "folder").get({"rows": 20, "time": 4}, measure)
    again = PointCache(tmp_path / "new" / "folder").get({"time": 4, "rows": 20}, measure)
    assert first == again == [0.1, 1]
    assert PointCache(tmp_path / "new" / "folder").get({"rows": 20, "time": 8}, measure) == [0.1, 2]
    assert PointCache(None).get({"rows": 20, "time": 8}, measure) == [0.1, 3]


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"key": {"rows": 21}, "value": 1}', "\xff"])
def test_a_broken_point_is_measured_again(tmp_path: Path, broken: str) -> None:
    cache, key = PointCache(tmp_path), {"rows": 20}
    cache.get(key, lambda: 1)
    (path,) = tmp_path.iterdir()
    path.write_text(broken, encoding="latin-1")
    assert cache.get(key, lambda: 2) == 2
    assert json.loads(path.read_text()) == {"key": key, "value": 2}


def test_an_interrupted_measurement_loses_nothing(tmp_path: Path) -> None:
    cache = PointCache(tmp_path)

    def interrupted() -> Any:
        raise KeyboardInterrupt

    cache.get({"rows": 1}, lambda: "first")
    with pytest.raises(KeyboardInterrupt):
        cache.get({"rows": 2}, interrupted)
    assert len(list(tmp_path.iterdir())) == 1
    assert PointCache(tmp_path).get({"rows": 1}, interrupted) == "first"


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/cache: .*: pass a folder that can be written to, or None"):
        PointCache(tmp_path / "file" / "cache")


@pytest.mark.parametrize("longest", [1, 4, 7, 8, 9, 60, 61, 1000])
@pytest.mark.parametrize("points", [2, 3, 5])
def test_the_grid_reaches_as_far_as_it_must(longest: int, points: int) -> None:
    """At least two times, so that there is a line; all of them can be cut in four."""
    grid = time_grid(longest, points)
    assert 2 <= len(grid) <= points
    assert grid[0] == 4
    assert grid[-1] >= longest
    assert grid[-1] - longest < 4 or grid[-1] == 8
    assert all(time % 4 == 0 for time in grid)
    assert list(grid) == sorted(set(grid))
