"""Files that are whole or not there, and places that cannot be written to."""

from __future__ import annotations

from pathlib import Path

import pytest

from mp_lstm.errors import InputError
from mp_lstm.training.files import replace_text


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run killed while it wrote config.toml left it empty."""
    path = tmp_path / "config.toml"
    path.write_text("before")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        replace_text(path, "after")
    assert path.read_text() == "before"


@pytest.mark.parametrize(
    ("place", "reason"),
    [("nowhere/a.txt", "No such file or directory"), ("file/a.txt", "Not a directory"), ("folder", "Is a directory")],
)
def test_a_place_that_cannot_be_written_to(tmp_path: Path, place: str, reason: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=rf"{place} cannot be written \({reason}\): make room for it, or pass another"):
        replace_text(tmp_path / place, "text")
