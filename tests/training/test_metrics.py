from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mp_lstm.errors import InputError
from mp_lstm.training.metrics import MetricsWriter, Sums, counted_compilations, perplexity, read_metrics


def test_events_are_on_disk_as_soon_as_they_are_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write("train", step=10, loss=4.5)
        assert read_metrics(tmp_path / "metrics.jsonl") == [{"event": "train", "step": 10, "loss": 4.5}]


def test_a_line_that_a_killed_run_left_unfinished_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "train", "step": 10}\n{"event": "tra')
    assert read_metrics(path) == [{"event": "train", "step": 10}]


def test_a_line_that_was_not_finished_is_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    """The next event stood on the same line, and neither could be read."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "train", "step": 10}\n{"event": "tra')
    with MetricsWriter(path) as writer:
        writer.write("test", step=20)
    assert path.read_text() == '{"event": "train", "step": 10}\n{"event": "test", "step": 20}\n'


@pytest.mark.parametrize("line", ['{"event": "tr{"event": "test"}', "[1]", '{"step": 1}', "", "\0\0"])
def test_lines_that_are_no_events_are_skipped(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"event": "train"}}\n{line}\n{{"event": "test"}}\n')
    assert [event["event"] for event in read_metrics(path)] == ["train", "test"]


def test_metrics_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"metrics.jsonl cannot be written \(No such file or directory\): make room"):
        MetricsWriter(tmp_path / "nowhere" / "metrics.jsonl")


def test_a_disk_without_room_is_one_line(tmp_path: Path) -> None:
    """Closing the file tried the line again, and that was a traceback."""
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer._file.close()
    message = r"metrics.jsonl cannot be written \(No space left on device\)"
    with Path("/dev/full").open("ab") as writer._file, pytest.raises(InputError, match=message), writer:
        writer.write("train", step=1)


def test_a_resumed_run_cuts_the_file_back_and_goes_on_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write("train", step=1)
        size = writer.size
        writer.write("train", step=2)
    with MetricsWriter(path, keep=size) as writer:
        writer.write("train", step=3)
    assert [event["step"] for event in read_metrics(path)] == [1, 3]


def test_keeping_more_than_there_is_keeps_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "train"}\n')
    with MetricsWriter(path, keep=1000):
        pass
    assert path.read_text() == '{"event": "train"}\n'


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null_as_json_has_no_word_for_it(tmp_path: Path, value: float) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write("train", perplexity=value)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"event": "train", "perplexity": null}\n'


def test_every_token_counts_the_same_whatever_its_batch() -> None:
    """The mean of the batches' means would be 3."""
    sums = Sums().add(1.0, weight=30, tokens=30).add(5.0, weight=10, tokens=10)
    assert sums.mean == 2.0


def test_a_batch_without_tokens_adds_nothing_even_if_its_mean_is_no_number() -> None:
    assert Sums().add(2.0, weight=3, tokens=3).add(math.nan, weight=0, tokens=0).mean == 2.0


def test_perplexity_does_not_overflow() -> None:
    assert perplexity(math.log(50.0)) == pytest.approx(50.0)
    assert perplexity(1e6) == math.inf


def test_compilations_are_counted_wherever_they_happen() -> None:
    x = jnp.ones(7)
    with counted_compilations() as count:
        jax.jit(lambda x: x * 2 - 3)(x)
        jax.jit(lambda x: x * 4 - 5)(x)
        inside = count()
    jax.jit(lambda x: x * 6 - 7)(x)
    assert (inside, count()) == (2, 2)
