"""Files that are written whole or not at all: beside their place, which they take when they are done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def taking_the_place(temporary: Path, path: Path) -> Iterator[None]:
    """The temporary file, written in this context, becomes the other after it; if that fails it is taken away.

    Args:
      temporary: the file to be written, in the same directory.
      path: the one whose place it takes.

    Raises:
      OSError: the system refuses.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with taking_the_place(Path(folder, "a.new"), Path(folder, "a")):
      ...         _ = Path(folder, "a.new").write_text("so it is")
      ...     [path.name for path in Path(folder).iterdir()]
      ['a']
    """
    try:
        yield
        temporary.replace(path)
    except BaseException:  # an interrupt too leaves no file behind; raised again
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
