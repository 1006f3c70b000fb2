"""Steps measured beside their prediction; the table and the files that come of it are in tests/test_cli.py too."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import examples
import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.planning import Timeline, default_calibration, predict, simulate, wavefront
from mp_lstm.training import timeline
from mp_lstm.training.timeline import Comparison, batches_by_length, compare, device_names


class Source:
    """Batches of given lengths, and a second epoch that nobody asks for."""

    buckets = (4, 6)

    def __init__(self, lengths: list[int]):
        self._lengths = lengths

    def num_batches(self, epoch: int = 0) -> int:
        return len(self._lengths)

    def batch(self, epoch: int, index: int) -> mp_lstm.Batch:
        assert epoch == 0
        return examples.random_batch(np.random.default_rng(index), self._lengths[index], 4)


def test_batches_are_found_by_length() -> None:
    source = Source([6, 4, 6, 6])
    found = batches_by_length(source)
    assert list(found) == [4, 6]
    assert [len(batches) for batches in found.values()] == [1, 3]
    np.testing.assert_array_equal(found[6][1].inputs, source.batch(0, 2).inputs)


def setup(**options: Any) -> Any:
    model = mp_lstm.language_model(**examples.SIZES)
    pipe = examples.pipeline(model, lengths=(4, 6), partition=(2, 2), chunk=2, options=options)
    config = SimpleNamespace(train=SimpleNamespace(seed=0))
    return SimpleNamespace(pipe=pipe, plan=pipe.plan, model=model, config=config)


@pytest.mark.parametrize("every_k", [1, 3])
def test_every_bucket_is_compared(every_k: int) -> None:
    """On one batch, however many make an update."""
    made = setup(every_k=every_k)
    costs = default_calibration().costs(made.model)
    batches = [those[0] for those in batches_by_length(Source([6, 4])).values()]
    found = list(compare(made, batches, costs, steps=2))
    assert [comparison.length for comparison in found] == [4, 6]
    for length, schedule, measured, predicted in found:
        assert schedule == made.plan.schedule((length,))
        assert set(measured.start) == set(predicted.start) == set(schedule.tasks)
        assert measured.makespan > 0
        assert predicted == predict(made.plan, made.model, costs, length)


def test_nothing_is_compiled_while_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    made, programs = setup(), []
    measure = timeline.measure_steps

    def counted(pipe: Any, state: Any, windows: Any) -> Any:
        before = len(pipe.programs)
        assert len(windows) == 3
        result = measure(pipe, state, windows)
        programs.append((before, len(pipe.programs)))
        return result

    monkeypatch.setattr(timeline, "measure_steps", counted)
    batches = [those[0] for those in batches_by_length(Source([6, 4])).values()]
    list(compare(made, batches, default_calibration().costs(made.model), steps=3))
    assert len(programs) == 2
    assert all(before == after > 0 for before, after in programs)


def test_devices_are_named_by_index() -> None:
    plan = setup().plan
    assert device_names(plan) == [str(device) for device in plan.devices]


def files(folder: Path) -> Iterator[Path]:
    schedule = wavefront((0, 1), (3,))
    measured: Timeline = simulate(schedule, lambda task: 0.02)
    predicted = simulate(schedule, lambda task: 0.01)
    return timeline.write(folder, Comparison(8, schedule, measured, predicted), ["cpu:0", "cpu:1"], "bucket 8")


def test_a_trace_and_a_picture_are_written(tmp_path: Path) -> None:
    assert list(files(tmp_path)) == [tmp_path / "trace.json", tmp_path / "timeline.png"]
    trace = json.loads((tmp_path / "trace.json").read_text())
    tasks = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(tasks) == 2 * len(wavefront((0, 1), (3,)).tasks)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    written = files(tmp_path)
    assert next(written).exists()
    with pytest.raises(InputError, match=r"^timeline.png is not drawn: .*pip install"):
        next(written)
