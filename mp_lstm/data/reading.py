"""Text files as a stream of words, a piece of a line at a time.

A corpus may be larger than memory and may be one single line, so a line is handed out in pieces that end between words.
What can be wrong with a file becomes an `InputError` here, with its name and the line.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, cast, runtime_checkable

from mp_lstm.errors import InputError

PIECE_BYTES = 1 << 16
_OPENERS = {".xz": lzma.open, ".gz": gzip.open}


AnyText = TypeVar("AnyText", str, bytes, covariant=True)


@runtime_checkable
class Stream(Protocol[AnyText]):
    """What is needed of an open file; `typing.IO` asks for much that is not."""

    def read(self, size: int = -1, /) -> AnyText:
        """The next characters, all without a size."""
        ...

    def readline(self, size: int = -1, /) -> AnyText:
        """The next characters, up to the end of the line at most."""
        ...


class Piece(NamedTuple):
    """Consecutive words of one line.

    Args:
      line: its number, from 1.
      words: any number of them, also none.
      ends: whether the line ends here.
    """

    line: int
    words: list[str]
    ends: bool


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Stream[bytes]]:
    r"""Opens a text file, .xz and .gz unpacked while they are read.

    Args:
      path: the file; its suffix says whether it is packed.

    Yields:
      The unpacked bytes as a stream.

    Raises:
      InputError: the file is not there, cannot be read, or its packing is damaged.

    Example:
      >>> with opened(__file__) as stream:
      ...     stream.readline()[3:13]
      b'Text files'
    """
    path = Path(path)
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as stream:
            yield stream
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be read ({reason}): pass a text file, plain, .xz or .gz") from error


def as_bytes(stream: Stream[str] | Stream[bytes]) -> Stream[bytes]:
    """Makes a stream of bytes of either kind of stream.

    Example:
      >>> as_bytes(io.StringIO("so it is")).read()
      b'so it is'
    """
    if isinstance(stream, io.TextIOWrapper):
        return stream.buffer
    if isinstance(stream, io.TextIOBase):
        return io.BytesIO(str(stream.read()).encode())
    return cast(Stream[bytes], stream)


def pieces(stream: Stream[bytes], name: str) -> Iterator[Piece]:
    r"""Cuts a stream into lines and these into words.

    Lines end with \n, \r\n or \r, the last one also with the stream; a byte-order mark is skipped.

    Args:
      stream: UTF-8 text.
      name: of the file, for messages.

    Yields:
      The pieces of each line in turn, the last one of a line with `ends`.

    Raises:
      InputError: bytes that are not UTF-8, with the line and the place in it.

    Example:
      >>> [piece.words for piece in pieces(io.BytesIO(b"so it\r\n\nis"), "a.txt")]
      [['so', 'it'], [], ['is']]
    """
    line, rest, encoding, ends = 1, b"", "utf-8-sig", True
    while block := stream.readline(PIECE_BYTES):
        # (1) Lines end inside the block only where they end with a lone \r.
        *whole, last = (rest + block).splitlines(keepends=True)
        for text in whole:
            yield Piece(line, _decoded(text, encoding, name, line).split(), True)
            line, encoding = line + 1, "utf-8"
        # (2) What the block cuts off goes on in the next one; so may a \r, with its \n.
        ends = last.endswith(b"\n")
        cut = len(last) if ends else max(last.rfind(b" "), last.rfind(b"\t")) + 1
        last, rest = last[:cut], last[cut:]
        if last:
            yield Piece(line, _decoded(last, encoding, name, line).split(), ends)
            line += ends
            encoding = "utf-8"
    if rest or not ends:
        yield Piece(line, _decoded(rest, encoding, name, line).split(), True)


def _decoded(block: bytes, encoding: str, name: str, line: int) -> str:
    try:
        return block.decode(encoding)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(
            f"{name}, line {line}: the byte 0x{byte:02x} is not UTF-8: convert the file, e.g. with iconv -t utf-8"
        ) from error
