"""Files of a run that are written whole or not at all, and the one line for a directory that cannot be written to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from mp_lstm.errors import InputError


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Explains it where what is written in this context cannot be.

    Args:
      path: the file or directory, for the message.

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
        raise InputError(
            f"{os.fspath(path)} cannot be written ({error.strerror or error}): make room for it, or pass another "
            "--run-dir"
        ) from error


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Replaces a file by a text at once: a process killed meanwhile leaves the file as it was.

    Raises:
      InputError: it cannot be written.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     replace_text(f"{folder}/a.txt", "so it is")
      ...     Path(folder, "a.txt").read_text(), os.listdir(folder)
      ('so it is', ['a.txt'])
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.new")
    with writing(path):
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
