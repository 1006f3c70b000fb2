"""Files that are whole or not there, and places that cannot be written to."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mp_lstm.errors import InputError
from mp_lstm.training.files import check_replaceable, is_one_of, replace_lines, replace_text


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


def test_a_text_that_cannot_be_encoded_leaves_nothing(tmp_path: Path) -> None:
    """A new run left config.toml.new, which was somebody's file to the next one."""
    with pytest.raises(UnicodeEncodeError):
        replace_text(tmp_path / "config.toml", "c\udce9orp")
    assert list(tmp_path.iterdir()) == []


def test_lines_that_break_off_leave_the_file_as_it_was(tmp_path: Path) -> None:
    """An evaluation that was refused had emptied the scores of another."""
    path = tmp_path / "scores.tsv"
    path.write_text("old")

    def lines() -> Iterator[str]:
        yield "so\n"
        raise InputError("no more")

    with pytest.raises(InputError, match="no more"):
        replace_lines(path, lines())
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["scores.tsv"])


def test_a_replaced_file_keeps_its_rights_and_links_to_it(tmp_path: Path) -> None:
    path, link = tmp_path / "scores.tsv", tmp_path / "link.tsv"
    path.write_text("old")
    path.chmod(0o600)
    link.symlink_to("scores.tsv")
    check_replaceable(link)
    replace_lines(link, ["new"])
    assert (path.read_text(), path.stat().st_mode & 0o777, link.is_symlink()) == ("new", 0o600, True)


def test_a_new_file_has_the_rights_of_any(tmp_path: Path) -> None:
    """Files of `tempfile` are their owner's alone."""
    replace_lines(tmp_path / "a.tsv", ["so"])
    (tmp_path / "b.tsv").write_text("so")
    assert (tmp_path / "a.tsv").stat().st_mode == (tmp_path / "b.tsv").stat().st_mode


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    check_replaceable(path)
    replace_lines(path, ["so\n", "it is\n"])
    reader.join()
    assert (read, path.is_fifo()) == (["so\nit is\n"], True)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1"])
def test_standard_output_goes_on_where_it_is(capfd: pytest.CaptureFixture[str], name: str) -> None:
    """As a file it was emptied, and what came next was written over the lines."""
    print("before", flush=True)
    check_replaceable(name)
    replace_lines(name, ["so\n"])
    print("after", flush=True)
    assert capfd.readouterr().out == "before\nso\nafter\n"


@pytest.mark.parametrize(
    ("place", "refusal"),
    [
        ("nowhere/a.txt", FileNotFoundError),
        ("file/a.txt", NotADirectoryError),
        ("folder", IsADirectoryError),
        ("loop", OSError),
        ("a" * 300, OSError),
    ],
)
def test_what_will_be_refused_is_refused_before(tmp_path: Path, place: str, refusal: type[OSError]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(refusal):
        check_replaceable(tmp_path / place)
    with pytest.raises(refusal):
        replace_lines(tmp_path / place, ["so"])
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "loop"]


def test_a_file_by_any_name_is_the_same(tmp_path: Path) -> None:
    """Paths were compared, so a hard link passed for another file."""
    file, other = tmp_path / "a.txt", tmp_path / "b.txt"
    file.touch()
    other.touch()
    (tmp_path / "symbolic").symlink_to(file)
    os.link(file, tmp_path / "hard")
    for name in ("a.txt", "symbolic", "hard", "../" + tmp_path.name + "/a.txt"):
        assert is_one_of(tmp_path / name, [tmp_path / "none", other, file])
        assert not is_one_of(tmp_path / name, [tmp_path / "none", other])
    with file.open() as stream:
        assert is_one_of(file, [stream.fileno()])
        assert not is_one_of(other, [stream.fileno()])
    assert is_one_of(tmp_path / "none", [tmp_path / "none"])
    assert not is_one_of(os.devnull, [os.devnull])
