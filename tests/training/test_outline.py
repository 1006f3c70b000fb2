"""What a process without the text knows of it; distributed/test_text.py trains with it."""

from __future__ import annotations

import base64
import zlib

import numpy as np
import pytest

from mp_lstm.data import Corpus, iterate
from mp_lstm.training import outline as outlines
from mp_lstm.training.build import make_sources
from mp_lstm.training.config import Config, load
from mp_lstm.training.outline import from_outline, is_outline_of, outline_of, read_together


@pytest.mark.parametrize("words", ["", "--data.mode contiguous", "--data.mode contiguous --data.random_length 10"])
def test_batches_are_the_same_but_for_their_tokens(corpus: Corpus, words: str) -> None:
    config = load(overrides=["--data.batch_size", "4", *words.split()])
    bare = from_outline(outline_of(corpus))
    assert (bare.vocabulary, bare.name) == (corpus.vocabulary, corpus.name)
    for source, other in zip(make_sources(config, corpus), make_sources(config, bare), strict=True):
        assert other.buckets == source.buckets
        assert other.counts() == source.counts()
        assert other.tokens == source.tokens
        for (place, batch), (other_place, found) in zip(
            iterate(source, epochs=2), iterate(other, epochs=2), strict=True
        ):
            assert other_place == place
            assert found.inputs.shape == batch.inputs.shape
            np.testing.assert_array_equal(found.lengths, batch.lengths)
            np.testing.assert_array_equal(found.resets, batch.resets)
            assert not np.any(found.targets)


def test_a_text_is_known_by_its_tokens_and_not_by_its_packing(corpus: Corpus) -> None:
    """Machines may have different builds of zlib, and call the directory otherwise."""
    outline = outline_of(corpus)
    repacked = base64.b64encode(zlib.compress(zlib.decompress(base64.b64decode(outline)), level=1)).decode()
    assert repacked != outline
    assert is_outline_of(repacked, corpus._replace(name="elsewhere"))
    tokens = corpus.test.tokens.copy()
    tokens[1] += 1
    assert not is_outline_of(outline, corpus._replace(test=corpus.test._replace(tokens=tokens)))


@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_the_first_process_reads_and_the_others_hear(
    corpus: Corpus, process, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces: a coordinator may refuse a long message."""
    reads = []

    def read(config: Config) -> Corpus:
        reads.append(config)
        return corpus

    monkeypatch.setattr(outlines, "read_corpus", read)
    monkeypatch.setattr(outlines, "PIECE", piece)
    process(0)
    assert read_together(Config()).corpus is corpus
    process(1)
    heard = read_together(Config())
    assert len(reads) == 1
    assert heard.outline == outline_of(corpus)
    np.testing.assert_array_equal(heard.corpus.train.offsets, corpus.train.offsets)
    assert not np.any(heard.corpus.train.tokens)
