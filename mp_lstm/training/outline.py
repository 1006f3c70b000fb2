"""The text of a run in several processes: read where the first and the last stage are, and nowhere else.

    first process   reads, and tells the outline: where sentences begin, in which words
    the others      plan and cut batches by the outline; their tokens are zeros, which nobody looks at
    last stage's    reads too, once the plan says which process that is, for its targets

The first stage is the first process's, since stages follow the order of devices.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from mp_lstm.data import Corpus, Split, Vocabulary
from mp_lstm.data.corpus import SPLITS
from mp_lstm.errors import InputError
from mp_lstm.runtime import processes
from mp_lstm.runtime.placement import is_here
from mp_lstm.training.build import make_sources, read_corpus
from mp_lstm.training.config import Config
from mp_lstm.training.setup import Setup

PIECE = 1 << 20  # characters that processes say at once: a longer message may be refused on its way


class Text(NamedTuple):
    """What a process knows of the text, and the outline of what the first one read; None where it is alone."""

    corpus: Corpus
    outline: str | None


def read_together(config: Config) -> Text:
    """Reads the text in the first process; the others hear its outline.

    Raises:
      InputError: what `read_corpus` finds wrong; it is raised in every process.

    Example:
      >>> from mp_lstm.training.config import load
      >>> read_together(load(overrides=["--data.vocab_limit", "500"])).corpus.name
      'austen'
    """
    if not processes.are_several():
        return Text(read_corpus(config), None)
    read: list[Corpus] = []

    def make() -> str:
        read.append(read_corpus(config))
        return outline_of(read[0])

    outline = _from_the_first(make)
    return Text(read[0] if read else from_outline(outline), outline)


def with_text(setup: Setup, text: Text) -> Setup:
    """The setup with the text itself in the processes of the first and the last stage.

    Raises:
      InputError: it cannot be read there, or is another than the first process's; it is raised in every process.
    """
    found = [setup]

    def read() -> None:
        ends = [is_here(setup.pipe.stages[end].sharding) for end in (0, -1)]
        if processes.is_first() or not any(ends):
            return
        corpus = read_corpus(setup.config)
        if not is_outline_of(str(text.outline), corpus):
            raise InputError(
                f"{setup.config.data.source} is another text for process {jax.process_index()} than for process 0: "
                "give both the same files"
            )
        found[0] = setup._replace(corpus=corpus, sources=make_sources(setup.config, corpus))

    if text.outline is not None:
        processes.together("the text", read)
    return found[0]


def outline_of(corpus: Corpus) -> str:
    """Name, words, lengths of sentences and a checksum of the tokens, as text."""
    return base64.b64encode(zlib.compress(json.dumps(_described(corpus)).encode())).decode()


def is_outline_of(outline: str, corpus: Corpus) -> bool:
    """Whether a corpus has this outline, whatever its directory is called and whichever zlib packed it."""
    return _unpacked(outline) | {"name": corpus.name} == _described(corpus)


def _described(corpus: Corpus) -> dict[str, Any]:
    splits = [getattr(corpus, split) for split in SPLITS]
    return {
        "name": corpus.name,
        "words": list(corpus.vocabulary.words),
        "lengths": [split.lengths.tolist() for split in splits],
        "sha256": [hashlib.sha256(split.tokens.tobytes()).hexdigest() for split in splits],
    }


def _unpacked(outline: str) -> dict[str, Any]:
    return json.loads(zlib.decompress(base64.b64decode(outline)))


def from_outline(outline: str) -> Corpus:
    """A corpus of these sentences and words whose tokens are zeros.

    Example:
      >>> split = Split(np.array([2, 0, 2, 2, 0], np.int32), np.array([0, 2, 5]))
      >>> corpus = Corpus(split, split, split, Vocabulary(("<eos>", "<unk>", "so")), "so")
      >>> from_outline(outline_of(corpus)).test
      Split(tokens=array([0, 0, 0, 0, 0], dtype=int32), offsets=array([0, 2, 5]))
    """
    found = _unpacked(outline)
    train, valid, test = map(_bare, found["lengths"])
    return Corpus(train, valid, test, Vocabulary(tuple(found["words"])), found["name"])


def _bare(lengths: list[int]) -> Split:
    """Sentences without their tokens."""
    offsets = np.cumsum([0, *lengths])
    return Split(np.zeros(offsets[-1], np.int32), offsets)


def _from_the_first(make: Callable[[], str]) -> str:
    """What the first process makes, however long, in every process."""
    made: list[str] = []

    def begin() -> str:
        made.append(make())
        return str(-(-len(made[0]) // PIECE))

    count = int(processes.by_the_first(begin))
    return "".join(processes.by_the_first(lambda i=i: made[0][i * PIECE : (i + 1) * PIECE]) for i in range(count))
