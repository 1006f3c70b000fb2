"""scripts/results/compare.py: the page of curves side by side."""

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
    assert (tmp_path / "page-small-on-austen.png").stat().st_size > 1000


def test_curves_are_kept_until_they_are_run_again(tmp_path: Path):
    """The page was written anew from what one call was given: earlier runs were gone with their directories."""
    first, second = (write_curve(tmp_path / name, [value], test=value) for name, value in (("a", 9.0), ("b", 8.0)))
    page = str(tmp_path / "page.md")
    assert compare.main([f"one:{first}:{second}", f"two:gnmt_8={first}:mxnet={second}", "--out", page]) == 0
    before = Path(page).read_text()
    assert "| epoch | gnmt_8 | mxnet | difference |" in before
    first.unlink()
    assert compare.main(["--out", page]) == 0
    assert Path(page).read_text() == before
    assert compare.main([f"one:{second}:{second}", "--out", page]) == 0
    assert Path(page).read_text().count("| 1 | 8.00 | 8.00 | +0.0% |") == 1
    assert "| 1 | 9.00 | 8.00 | +12.5% |" in Path(page).read_text()


@pytest.mark.parametrize("epochs", [2, 3, 6, 13])
def test_epochs_are_counted_in_whole_numbers(epochs: int):
    """The axis of three epochs had a tick at 1.25."""
    curve = compare.Curve({epoch: 100.0 / epoch for epoch in range(1, epochs + 1)}, None)
    ticks = compare.draw("austen", {"a": curve, "b": curve}).axes[0].get_xticks()
    assert len(ticks) > 1
    assert all(tick == round(tick) for tick in ticks)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["austen:run"], "got 'austen:run', wanted TITLE:RUN_DIR:TORCH"),
        (["austen:{torch}:{torch}", "--out", "{here}/none/page.md"], "none is no directory"),
        (["austen:{empty}:{torch}", "--out", "{here}/page.md"], "has no validation"),
        (["austen:a={torch}:a={torch}", "--out", "{here}/page.md"], "whose curves have one name: write TITLE:NAME="),
        (["austen:{torch}:{torch}", "--out", "{here}/other.md"], "other.json does not hold curves"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    """A directory that is not there was a traceback, after all had been read and drawn."""
    names = {"here": tmp_path, "torch": write_curve(tmp_path / "torch.jsonl", [100.0])}
    (tmp_path / "other.json").write_text("[1, 2]")
    names["empty"] = write_curve(tmp_path / "empty.jsonl", [])
    assert compare.main([word.format(**names) for word in words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
