"""Bytes to words: line ends, encodings, packed and damaged files."""

import gzip
import io
import lzma

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.data import reading
from mp_lstm.errors import InputError


def lines(content, monkeypatch=None, piece_bytes=None):
    """The words of each line, its pieces joined; lines without words left out."""
    if piece_bytes:
        monkeypatch.setattr(reading, "PIECE_BYTES", piece_bytes)
    found = {}
    for piece in reading.pieces(io.BytesIO(content), "a.txt"):
        found.setdefault(piece.line, []).extend(piece.words)
    return {line: words for line, words in found.items() if words}


@pytest.mark.parametrize(
    "content",
    [
        b"so it is\nis it so\n",
        b"so it is\nis it so",
        b"so it is\r\nis it so\r\n",
        b"so\tit  is \n\tis it so\n",
        b"\xef\xbb\xbfso it is\nis it so\n",
        b"so it is\ris it so\r",
        b"\xef\xbb\xbfso it is\ris it so",
    ],
    ids=["plain", "no final newline", "crlf", "tabs", "byte-order mark", "cr", "cr and byte-order mark"],
)
def test_pitfall_12_all_line_ends_read_the_same(content):
    assert lines(content) == {1: ["so", "it", "is"], 2: ["is", "it", "so"]}


def test_pitfall_12_blank_lines_count_in_line_numbers_only():
    assert lines(b"\na\n\n \t\r\nb\n\n") == {2: ["a"], 5: ["b"]}


def test_pitfall_12_bytes_that_are_not_utf8_name_file_and_line():
    with pytest.raises(InputError, match=r"a.txt, line 2: the byte 0xe9 is not UTF-8: convert the file"):
        lines("so\ncafé\n".encode("latin-1"))


def test_pitfall_12_utf16_is_not_read_as_nonsense():
    with pytest.raises(InputError, match=r"a.txt, line 1: the byte 0xff is not UTF-8"):
        lines("so it is\n".encode("utf-16"))


@given(st.lists(st.text("aé€ \t"), max_size=5), st.integers(1, 9), st.booleans(), st.sampled_from(["\n", "\r\n", "\r"]))
def test_pieces_of_a_line_are_cut_between_words(texts, piece_bytes, mark, line_end):
    content = b"\xef\xbb\xbf" * mark + line_end.join(texts).encode()
    with pytest.MonkeyPatch.context() as monkeypatch:
        wanted = {number: text.split() for number, text in enumerate(texts, 1) if text.split()}
        assert lines(content, monkeypatch, piece_bytes) == wanted


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_packed_files_are_unpacked(tmp_path, suffix, pack):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(pack(b"so it is\n"))
    with reading.opened(path) as stream:
        assert stream.read() == b"so it is\n"


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: b"so it is\n"], ids=["cut", "plain"])
def test_damaged_files_are_a_clear_error(tmp_path, suffix, pack, damage):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(damage(pack(b"so it is\n" * 100)))
    with (
        pytest.raises(InputError, match=r"a.txt.* cannot be read \(.*\): pass a text file"),
        reading.opened(path) as stream,
    ):
        stream.read()


def test_damage_inside_a_gzip_stream_is_a_clear_error(tmp_path):
    content = bytearray(gzip.compress(bytes(range(256)) * 20))
    content[30:60] = bytes(30)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match="cannot be read"), reading.opened(path) as stream:
        stream.read()


def test_a_missing_file_is_a_clear_error(tmp_path):
    with (
        pytest.raises(InputError, match=r"no.txt cannot be read \(No such file or directory\)"),
        reading.opened(tmp_path / "no.txt"),
    ):
        pass


def test_streams_of_text_and_bytes_are_alike(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("so", newline="")
    with path.open() as text, path.open("rb") as binary:
        assert {reading.as_bytes(stream).read() for stream in (text, binary, io.StringIO("so"), io.BytesIO(b"so"))} == {
            b"so"
        }
