"""Files that are written whole or not at all, and the one line for a place that cannot be written to."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from mp_lstm.data.replacing import taking_the_place
from mp_lstm.errors import InputError


@contextlib.contextmanager
def writing(
    path: str | os.PathLike[str], remedy: str = "make room for it, or pass another --run-dir"
) -> Iterator[None]:
    """Explains it where what is written in this context cannot be.

    Args:
      path: the file or directory, for the message.
      remedy: the end of the message.

    Raises:
      InputError: the system refuses: no such place, no right to it, no room.

    Example:
      >>> with writing("nowhere/a.txt"):
      ...     Path("nowhere/a.txt").write_text("")
      Traceback (most recent call last):
      mp_lstm.errors.InputError: nowhere/a.txt cannot be written (No such file or directory): make room for it, ...
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{os.fspath(path)} cannot be written ({error.strerror or error}): {remedy}") from error


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Replaces a file by a text at once: a process killed meanwhile leaves the file as it was.

    Raises:
      InputError: it cannot be written.

    Example:
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     replace_text(f"{folder}/a.txt", "so it is")
      ...     Path(folder, "a.txt").read_text(), os.listdir(folder)
      ('so it is', ['a.txt'])
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.new")
    with writing(path), taking_the_place(temporary, path):
        temporary.write_text(text, encoding="utf-8")


def replace_lines(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    r"""Replaces a file of the user's by lines at once; what is no file, such as a pipe, has them written to it.

    Standard output or error by another name, such as /dev/stdout, goes on where it is, even if that is a file.

    Raises:
      OSError: it cannot be written; a file is then as it was.

    Example:
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     replace_lines(f"{folder}/a.txt", ["so\n", "it is\n"])
      ...     Path(folder, "a.txt").read_text(), os.listdir(folder)
      ('so\nit is\n', ['a.txt'])
    """
    if not _is_replaced(path):
        number = _standard(path)
        with open(path if number is None else os.dup(number), "w", encoding="utf-8") as file:
            file.writelines(lines)
        return
    path = Path(os.path.realpath(path))  # not a link to it
    temporary = path.with_name(f".{secrets.token_hex(8)}.new")  # the user has no file of this name
    with taking_the_place(temporary, path):
        with temporary.open("x", encoding="utf-8") as file:
            file.writelines(lines)
        if path.exists():
            shutil.copymode(path, temporary)


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Tries, before the work, what `replace_lines` will do, and leaves everything as it is.

    Raises:
      OSError: the system refuses.

    Example:
      >>> check_replaceable("nowhere/a.txt")
      Traceback (most recent call last):
      FileNotFoundError: [Errno 2] No such file or directory: ...
    """
    if not _is_replaced(path):
        return
    path = Path(os.path.realpath(path))
    if path.exists():
        path.open("ab").close()
    tempfile.TemporaryFile(dir=path.parent).close()


def is_one_of(path: str | os.PathLike[str], files: Iterable[str | os.PathLike[str] | int]) -> bool:
    """Whether a path leads to one of these files, by whatever name or link.

    Args:
      path: of a file, which need not be there; a pipe or a device is none.
      files: paths, of files that need not be there either, or descriptors.

    Example:
      >>> is_one_of("a.txt", ["b.txt", "b/../a.txt"])
      True
    """
    found = _status(path)
    if found is None:
        return any(not isinstance(file, int) and os.path.realpath(file) == os.path.realpath(path) for file in files)
    others = [_status(file) for file in files]
    return stat.S_ISREG(found.st_mode) and any(other and os.path.samestat(found, other) for other in others)


def is_utf8(name: str) -> bool:
    r"""Whether a name that the system gave was UTF-8; where it was not, Python has put surrogates into it.

    Example:
      >>> is_utf8("caf\xe9"), is_utf8(os.fsdecode(b"caf\xe9"))
      (True, False)
    """
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


def _is_replaced(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file, a directory (which will be refused) or nothing yet, rather than a stream."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and _standard(path) is None)


def _standard(path: str | os.PathLike[str]) -> int | None:
    """The descriptor of standard output or error, if the path leads to it."""
    found = _status(path)
    for number in (1, 2):
        standard = _status(number)
        if found and standard and os.path.samestat(found, standard):
            return number
    return None


def _status(file: str | os.PathLike[str] | int) -> os.stat_result | None:
    """What the system says of a file, None where it says nothing."""
    try:
        return os.stat(file)
    except OSError:
        return None
