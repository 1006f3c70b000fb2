"""The parts of scripts/growth.py that measure nothing, and the whole of the table that is only predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import growth
from tables import buckets, memory, steps
from tables.kit import in_turn, markdown


def test_new_sections_replace_old_ones_and_the_rest_stays() -> None:
    first = growth.merged("", {"Dispatch": "old", "Peak memory against stages": "kept\n\n| a |\n|---|"})
    second = growth.merged(first, {"Dispatch": "new"})
    assert growth.sections(second) == {"Peak memory against stages": "kept\n\n| a |\n|---|", "Dispatch": "new"}
    assert list(growth.sections(second)) == ["Peak memory against stages", "Dispatch"]
    assert second == growth.merged(second, {"Dispatch": "new"})


def test_an_unknown_table_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        growth.main(["--tables", "steps,speed"])
    assert error.value.code == 2
    assert "--tables: speed is unknown, of steps, buckets" in capsys.readouterr().err


def test_a_file_is_no_folder_for_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page").touch()
    with pytest.raises(SystemExit) as error:
        growth.main(["--tables", "scaling", "--out", str(tmp_path / "page"), "--quick"])
    assert error.value.code == 2
    assert "page is no folder and cannot be made one (File exists)" in capsys.readouterr().err


def test_the_predicted_table_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the process are for scripts alone: they stay out of this one."""
    for name in ("set_allocator", "enable_compilation_cache"):
        monkeypatch.setattr(growth, name, lambda: None)
    monkeypatch.setattr(growth.mp_lstm, "emulate_devices", lambda n: None)
    assert growth.main(["--tables", "scaling", "--out", str(tmp_path), "--quick"]) == 0
    page = (tmp_path / "growth.md").read_text(encoding="utf-8")
    assert "`python scripts/growth.py --tables scaling --quick`" in page
    assert "| mxnet | 1 | 10 | serial, chunks: 1, micro-batches: 1 |" in page
    assert (tmp_path / "growth-scaling.png").stat().st_size > 1000


def test_memory_stands_under_its_heads() -> None:
    """The peak stood under activations and temporaries, and these under the peak."""
    held = memory.Held(stages=2, device=1, parameters=10_000_000, peak=50_000_000, predicted=49_000_000)
    assert dict(zip(memory.HEAD, memory.row(held), strict=True)) == {
        "stages": "2",
        "device": "1",
        "parameters, MB": "10.00",
        "activations and temporaries, MB": "30.00",
        "peak, MB": "50.00",
        "predicted, MB": "49.00",
        "error": "-2%",
    }


def test_runs_take_turns_and_the_first_rounds_do_not_count() -> None:
    order: list[str] = []

    def run(name: str) -> Any:
        return lambda: order.append(name) or float(len(order))

    assert in_turn([run("a"), run("b")], rounds=2) == [[5.0, 7.0], [6.0, 8.0]]
    assert order == ["a", "b"] * 4


def test_work_is_what_a_step_is_compared_by() -> None:
    base, double = steps.Timed([1.0, 3.0, 2.0], 10.0, 4.0), steps.Timed([3.0], 20.0, 4.0)
    assert steps.per_work(double, base) == pytest.approx(0.75)
    assert steps.nominal_per_work(double, base) == pytest.approx(0.5)
    assert steps.sizes_along(steps.Size(), "layers") == [steps.Size(layers=count) for count in (1, 2, 4, 8, 16)]


def test_every_length_counts_as_often_as_it_occurs() -> None:
    assert buckets.epoch_seconds({8: 10, 64: 1}, {8: 0.1, 64: 2.0}) == pytest.approx(3.0)


def test_a_table_in_markdown() -> None:
    assert markdown(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"
