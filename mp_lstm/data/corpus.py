"""Corpora: text read into compact arrays of ids.

Text has one sentence a line, words between white space. `<eos>` is a token that ends every sentence; a file that has it
written out at line ends reads the same. A full stop ends nothing: "mr. smith" is two words of one sentence. A line
without words is an `<eos>` of the text, as language models of such corpora have it, and no sentence.

Files are streamed and a token takes four bytes from the start. The training text is read once: words get ids as they
appear, and when all are counted the ids are exchanged for those of the vocabulary.

Nothing is ever fetched. One corpus ships with the package (see NOTICE for its origin), others are directories of the
user's.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from mp_lstm.data.reading import Stream, as_bytes, opened, pieces
from mp_lstm.data.vocabulary import EOS, UNK, Vocabulary, build_vocabulary, how_to_get_unk
from mp_lstm.errors import InputError

SPLITS = ("train", "valid", "test")
AUSTEN = Path(__file__).parent / "austen"
_FILE_NAME = re.compile(r"(?:.+[._-])?(train|valid|test)\.(?:txt|tokens)(?:\.xz|\.gz)?")
_AUSTEN_SHA256 = {
    "train": "acd83a798025facc1bd5057437333c1f41e67e8700593c697e69aa1d632d2b10",
    "valid": "73d6ef1da471abe88758e87e4c612bbb3efe1a5116617c29ea5343017b50af09",
    "test": "4bfcb0751791e7ab99f5e732f5814ae2dc0fedc93be4a9bdc0ff94fe645d2e9c",
}


class Split(NamedTuple):
    """One text as ids, its sentences one after another.

    A sentence of n words has n + 1 steps: it reads `<eos>`, w1 .. wn and is to say w1 .. wn, `<eos>`. A blank line has
    one, which is part of the text; `sentences` are without them.

    Args:
      tokens: [N] ids of all words, `<eos>` after each sentence. These are the targets.
      offsets: [sentences + 1] where each sentence starts, and N.

    Example:
      >>> split = Split(np.array([5, 6, 0, 7, 0], np.int32), np.array([0, 3, 5]))
      >>> split.inputs, split.lengths
      (array([0, 5, 6, 0, 7], dtype=int32), array([3, 2]))
    """

    tokens: Int32[np.ndarray, " N"]
    offsets: Int64[np.ndarray, " sentences_and_1"]

    @property
    def inputs(self) -> Int32[np.ndarray, " N"]:
        """The token before each one. The text ends with `<eos>`, so the first reads that too."""
        return np.roll(self.tokens, 1)

    @property
    def targets(self) -> Int32[np.ndarray, " N"]:
        """The tokens."""
        return self.tokens

    @property
    def lengths(self) -> Int64[np.ndarray, " sentences"]:
        """Steps of each sentence: its words and `<eos>`."""
        return np.diff(self.offsets)

    @property
    def sentences(self) -> Split:
        """The text without its blank lines."""
        blank = self.lengths == 1
        if not blank.any():
            return self
        kept = self.lengths[~blank]
        return _frozen(self.tokens[np.repeat(~blank, self.lengths)], np.cumsum([0, *kept]))


class Corpus(NamedTuple):
    """A text in three splits, and the vocabulary of the first.

    Args:
      train, valid, test: the splits.
      vocabulary: of the training text.
      name: for people.
    """

    train: Split
    valid: Split
    test: Split
    vocabulary: Vocabulary
    name: str


def load_austen() -> Corpus:
    """Reads the corpus that comes with the package: the six novels of Jane Austen, 10,000 words.

    Returns:
      The corpus, of 787,732, 46,818 and 50,055 tokens.

    Raises:
      InputError: an installed file was changed.

    Example:
      >>> corpus = load_austen()
      >>> corpus.vocabulary.decode(corpus.test.tokens[:8])
      '" i met william larkins , " continued'
    """
    return load_packaged(AUSTEN, _AUSTEN_SHA256)


def load_packaged(folder: Path, checksums: dict[str, str]) -> Corpus:
    """Reads a corpus of known content.

    Args:
      folder: with train.txt.xz, valid.txt.xz and test.txt.xz.
      checksums: sha256 of the unpacked text of each split.

    Returns:
      The corpus, named like the folder.

    Raises:
      InputError: a file is missing, damaged, or another one.
    """
    files = {split: folder / f"{split}.txt.xz" for split in SPLITS}
    streams = {split: _verified(files[split], checksums[split]) for split in SPLITS}
    train, vocabulary = _read_train(streams["train"], str(files["train"]), None)
    valid, test = (_read_known(streams[split], str(files[split]), vocabulary) for split in ("valid", "test"))
    return Corpus(train, valid, test, vocabulary, folder.name)


def read_directory(path: str | os.PathLike[str], *, vocab_limit: int | None = None) -> Corpus:
    r"""Reads a directory of train, valid and test text.

    Args:
      path: the directory. It has one file of each split, named e.g. train.txt, ptb.train.txt, wiki.train.tokens, each
        plain, .xz or .gz.
      vocab_limit: the most words of the vocabulary, the rest become `<unk>`; None: all words.

    Returns:
      The corpus, named like the directory.

    Raises:
      InputError: the directory or a split is not there, two files could be the same split, a file has no words or is
        not UTF-8, or valid or test have a word that train lacks and there is no `<unk>`.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     for split in ("train", "valid", "test"):
      ...         _ = Path(folder, f"{split}.txt").write_text("so it is\nis it\n")
      ...     read_directory(folder).valid.tokens
      array([3, 2, 1, 0, 1, 2, 0], dtype=int32)
    """
    folder = Path(path)
    files = _find_splits(folder)
    with opened(files["train"]) as stream:
        train, vocabulary = _read_train(stream, str(files["train"]), vocab_limit)
    valid, test = (read_text(files[split], vocabulary) for split in ("valid", "test"))
    return Corpus(train, valid, test, vocabulary, folder.resolve().name)


def read_text(source: str | os.PathLike[str] | Stream[str] | Stream[bytes], vocabulary: Vocabulary) -> Split:
    """Reads one text in the words of a given vocabulary, e.g. to score it.

    Args:
      source: a file (plain, .xz or .gz), or a stream of text or bytes.
      vocabulary: the model's.

    Returns:
      The text as a split.

    Raises:
      InputError: as `read_directory`.

    Example:
      >>> read_text(io.StringIO("so it is"), Vocabulary(("<eos>", "<unk>", "it", "is"))).tokens
      array([1, 2, 3, 0], dtype=int32)
    """
    if isinstance(source, str | os.PathLike):
        with opened(source) as stream:
            return _read_known(stream, os.fspath(source), vocabulary)
    return _read_known(as_bytes(source), str(getattr(source, "name", "the stream")), vocabulary)


def _verified(path: Path, checksum: str) -> Stream[bytes]:
    with opened(path) as stream:
        text = stream.read()
    found = hashlib.sha256(text).hexdigest()
    if found != checksum:
        raise InputError(f"{path} holds sha256 {found[:12]}..., wanted {checksum[:12]}...: install mp-lstm again")
    return io.BytesIO(text)


def text_files(folder: Path) -> list[tuple[str, Path]]:
    """The texts of a directory: the split that each is named after, and its path.

    Raises:
      OSError: the directory cannot be read.

    Example:
      >>> [split for split, _ in text_files(AUSTEN)]
      ['test', 'train', 'valid']
    """
    return [(match[1], path) for path in sorted(folder.iterdir()) if (match := _FILE_NAME.fullmatch(path.name))]


def _find_splits(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise InputError(f"{folder} is no directory: pass one with train, valid and test text, or 'austen'")
    matches = text_files(folder)
    found = {split: [path for name, path in matches if name == split] for split in SPLITS}
    for split, paths in found.items():
        if not paths:
            raise InputError(
                f"{folder} has no {split} text: name it {split}.txt, NAME.{split}.txt or NAME.{split}.tokens, "
                "each also with .xz or .gz"
            )
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            raise InputError(f"{folder} has {len(paths)} files for {split} ({names}): leave one of them there")
    return {split: paths[0] for split, paths in found.items()}


def _read_train(stream: Stream[bytes], name: str, vocab_limit: int | None) -> tuple[Split, Vocabulary]:
    # (1) a new word gets the next free id, (2) words are counted by id, (3) ids become those of the vocabulary.
    first_seen: defaultdict[str, int] = defaultdict(lambda: len(first_seen))
    eos = first_seen[EOS]
    split = _read(stream, name, eos, lambda words, _: map(first_seen.__getitem__, words))
    counts = np.bincount(split.tokens, minlength=len(first_seen)).tolist()
    vocabulary = build_vocabulary(dict(zip(first_seen, counts, strict=True)), vocab_limit)
    final = vocabulary.encode(first_seen)
    return _frozen(final[split.tokens], split.offsets), vocabulary


def _read_known(stream: Stream[bytes], name: str, vocabulary: Vocabulary) -> Split:
    known, missing = vocabulary.ids, -1 if vocabulary.unk is None else vocabulary.unk

    def encode(words: list[str], line: int) -> list[int]:
        ids = [known.get(word, missing) for word in words]
        if -1 in ids:
            raise InputError(
                f"{name}, line {line}: the word {words[ids.index(-1)]!r} is not in the training text, which has no "
                f"{UNK}: {how_to_get_unk(len(known))}"
            )
        return ids

    return _read(stream, name, vocabulary.eos, encode)


def _read(stream: Stream[bytes], name: str, eos: int, encode: Callable[[list[str], int], Iterable[int]]) -> Split:
    tokens, offsets = array("i"), array("q", [0])
    for piece in pieces(stream, name):
        tokens.extend(encode(piece.words, piece.line))
        if piece.ends:
            _end_sentence(tokens, offsets, eos)
    if len(tokens) == len(offsets) - 1:  # each line has its <eos> and no more
        raise InputError(f"{name} has no words: pass text with one sentence a line, its words separated by spaces")
    return _frozen(np.frombuffer(tokens, np.int32), np.frombuffer(offsets, np.int64))


def _end_sentence(tokens: array[int], offsets: array[int], eos: int) -> None:
    """Adds `<eos>` unless the line had it written out."""
    if len(tokens) == offsets[-1] or tokens[-1] != eos:
        tokens.append(eos)
    offsets.append(len(tokens))


def _frozen(tokens: np.ndarray, offsets: np.ndarray) -> Split:
    tokens.setflags(write=False)
    offsets.setflags(write=False)
    return Split(tokens, offsets)
