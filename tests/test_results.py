"""scripts/results/compare.py: the page of curves beside PyTorch's."""

import json
from pathlib import Path

import pytest

from results import compare


def write_curve(path: Path, valid: list[float], test: float | None = None) -> Path:
    events = [{"event": "valid", "epoch": epoch, "perplexity": value} for epoch, value in enumerate(valid, 1)]
    events += [] if test is None else [{"event": "test", "epoch": len(valid), "perplexity": test}]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_a_page_has_both_curves_and_their_difference(tmp_path: Path):
    (tmp_path / "run").mkdir()
    write_curve(tmp_path / "run" / "metrics.jsonl", [90.0, 76.5], test=69.0)
    torch = write_curve(tmp_path / "torch.jsonl", [100.0], test=60.0)
    page = tmp_path / "page.md"
    assert compare.main([f"Small on Austen:{tmp_path / 'run'}:{torch}", "--out", str(page)]) == 0
    lines = page.read_text().splitlines()
    assert "| 1 | 90.00 | 100.00 | -10.0% |" in lines
    assert "| 2 | 76.50 |  |  |" in lines
    assert "| test | 69.00 | 60.00 | +15.0% |" in lines
    assert (tmp_path / "results-small-on-austen.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["austen:run"], "got 'austen:run', wanted TITLE:RUN_DIR:TORCH"),
        (["austen:{torch}:{torch}", "--out", "{here}/none/page.md"], "none is no directory"),
        (["austen:{empty}:{torch}", "--out", "{here}/page.md"], "has no validation"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    """A directory that is not there was a traceback, after all had been read and drawn."""
    names = {"here": tmp_path, "torch": write_curve(tmp_path / "torch.jsonl", [100.0])}
    names["empty"] = write_curve(tmp_path / "empty.jsonl", [])
    assert compare.main([word.format(**names) for word in words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
