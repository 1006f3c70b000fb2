"""Corpora: counts of the one that ships, directories of all shapes, and what is wrong with others."""

import gzip
import io
import lzma
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.data import EOS, Vocabulary, build_vocabulary, corpus, load_austen, read_directory, read_text
from mp_lstm.errors import InputError


def write(folder, train="so it is\nis it so\n", valid="it is\n", test="is it\n", names="{}.txt"):
    for split, text in (("train", train), ("valid", valid), ("test", test)):
        content = text if isinstance(text, bytes) else text.encode()
        name = names.format(split)
        pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
        (folder / name).write_bytes(pack(content))
    return folder


def sentences(split, vocabulary):
    return [vocabulary.decode(part) for part in np.split(split.tokens, split.offsets[1:-1])]


@pytest.fixture(scope="module")
def austen():
    return load_austen()


def test_austen_has_the_published_counts(austen):
    assert [len(split.tokens) for split in austen[:3]] == [787_732, 46_818, 50_055]
    assert len(austen.vocabulary) == 10_000
    assert austen.train.lengths.max() == 299 + 1
    assert austen.name == "austen"


def test_austen_is_compact_and_cannot_be_written_to(austen):
    for split in austen[:3]:
        assert (split.tokens.dtype, split.offsets.dtype) == (np.int32, np.int64)
        assert not split.tokens.flags.writeable
        assert not split.offsets.flags.writeable


def test_story_5_every_sentence_ends_with_eos_and_is_read_after_one(austen):
    """The example never read nor predicted the end of a sentence."""
    for split in austen[:3]:
        eos = austen.vocabulary.eos
        np.testing.assert_array_equal(split.targets[split.offsets[1:] - 1], eos)
        np.testing.assert_array_equal(split.inputs[split.offsets[:-1]], eos)
        assert np.count_nonzero(split.tokens == eos) == len(split.lengths)


def test_story_15_a_full_stop_ends_no_sentence(tmp_path):
    """The example cut at ". ", so "mr. smith" became two sentences, and a title in the middle of a line as well."""
    text = "mr. smith came . he left .\n"
    found = read_directory(write(tmp_path, text, text, text))
    assert sentences(found.train, found.vocabulary) == ["mr. smith came . he left . <eos>"]


@pytest.mark.parametrize(
    "names",
    ["{}.txt", "ptb.{}.txt", "wiki.{}.tokens", "a.b_{}.txt", "{}.txt.gz", "wiki.{}.tokens.xz", "my-{}.tokens.gz"],
)
def test_reads_files_by_their_usual_names(tmp_path, names):
    found = read_directory(write(tmp_path, names=names))
    assert found.vocabulary.words == (EOS, "is", "it", "so")
    assert sentences(found.train, found.vocabulary) == ["so it is <eos>", "is it so <eos>"]
    assert sentences(found.valid, found.vocabulary) == ["it is <eos>"]
    assert sentences(found.test, found.vocabulary) == ["is it <eos>"]
    assert found.name == tmp_path.name


def test_other_files_in_the_directory_do_not_matter(tmp_path):
    for name in ("README.md", "untrain.txt", "train.bin", "training.txt", "valid.txt.bak"):
        write(tmp_path).joinpath(name).write_bytes(b"\xff")
    assert read_directory(tmp_path).train.tokens.size == 8


def test_a_directory_reads_the_packaged_corpus_the_same(austen):
    again = read_directory(Path(corpus.__file__).parent / "austen")
    np.testing.assert_array_equal(again.test.tokens, austen.test.tokens)
    assert again.vocabulary == austen.vocabulary


@pytest.mark.parametrize("text", ["a b <eos>\nc\n", "a b\nc <eos>", "\n a b \r\n\r\n<eos>\n\tc"])
def test_pitfall_12_blank_lines_are_no_sentences_and_eos_written_out_is_not_doubled(tmp_path, text):
    found = read_directory(write(tmp_path, text, text, text))
    for split in found[:3]:
        assert sentences(split.sentences, found.vocabulary) == ["a b <eos>", "c <eos>"]


def test_a_blank_line_is_an_eos_of_the_text(tmp_path):
    """As wikitext-2 is counted; lines that end the file are lines, the end of the last one is none."""
    text = " \n = a = \n \n b\n\n"
    found = read_directory(write(tmp_path, text, text, text))
    for split in found[:3]:
        assert found.vocabulary.decode(split.tokens) == "<eos> = a = <eos> <eos> b <eos> <eos>"
        assert split.lengths.tolist() == [1, 4, 1, 2, 1]
        assert found.vocabulary.decode(split.sentences.tokens) == "= a = <eos> b <eos>"
        assert split.sentences.offsets.tolist() == [0, 4, 6]


lines_of_text = st.lists(st.lists(st.sampled_from(["a", "b", "<unk>", "é", "."]), max_size=6), min_size=1)


@given(lines_of_text.filter(any), st.sampled_from(["\n", "\r\n", " \n\n"]))
def test_reading_is_the_textbook_loop(lines, line_end):
    vocabulary = build_vocabulary(["a b <unk>"])
    text = line_end.join(map(" ".join, lines))
    split = read_text(io.BytesIO(text.encode()), vocabulary)
    ids = {word: index for index, word in enumerate(vocabulary.words)}
    wanted = [[ids.get(word, 1) for word in line.split()] + [0] for line in io.StringIO(text)]
    assert [part.tolist() for part in np.split(split.tokens, split.offsets[1:-1])] == wanted


def test_a_limit_makes_rare_words_unknown(tmp_path):
    found = read_directory(write(tmp_path, "a a a b b c e\n", "a c d\n", "b\n"), vocab_limit=4)
    assert found.vocabulary.words == (EOS, "<unk>", "a", "b")
    assert sentences(found.train, found.vocabulary) == ["a a a b b <unk> <unk> <eos>"]
    assert sentences(found.valid, found.vocabulary) == ["a <unk> <unk> <eos>"]


def test_pitfall_13_a_word_that_train_lacks_names_word_file_line_and_remedy(tmp_path):
    write(tmp_path, valid="it is\nit was\n")
    with pytest.raises(
        InputError, match=r"valid.txt, line 2: the word 'was' is not in the training text.*--data.vocab_limit below 4"
    ):
        read_directory(tmp_path)
    assert read_directory(tmp_path, vocab_limit=3).vocabulary.unk == 1


def test_a_limit_that_cannot_be_is_no_remedy(tmp_path):
    """Below 2 words was advised, of a text with one word."""
    with pytest.raises(
        InputError, match=r"valid.txt, line 1: .* no <unk>: write <unk> for rare words in the training t.*t$"
    ):
        read_directory(write(tmp_path, train="so\n"))


def test_story_16_a_word_that_train_lacks_becomes_unk_where_train_has_it(tmp_path):
    """The example raised KeyError."""
    found = read_directory(write(tmp_path, train="so it is <unk>\n", valid="it was\n"))
    assert sentences(found.valid, found.vocabulary) == ["it <unk> <eos>"]


@pytest.mark.parametrize("content", [b"", b"\n \n", b"<eos>\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_an_empty_file_is_a_clear_error(tmp_path, split, content):
    with pytest.raises(InputError, match=f"{split}.txt has no words: pass text with one sentence a line"):
        read_directory(write(tmp_path, **{split: content}))


def test_bytes_that_are_not_utf8_name_file_and_line(tmp_path):
    with pytest.raises(InputError, match=r"valid.txt, line 2: the byte 0xff is not UTF-8"):
        read_directory(write(tmp_path, valid=b"it\nis \xff\n"))


def test_a_missing_split_is_a_clear_error(tmp_path):
    write(tmp_path).joinpath("valid.txt").unlink()
    with pytest.raises(InputError, match=r"has no valid text: name it valid.txt, NAME.valid.txt"):
        read_directory(tmp_path)


def test_two_files_for_one_split_are_a_clear_error(tmp_path):
    write(write(tmp_path), names="{}.txt.xz").joinpath("ptb.valid.txt").touch()
    with pytest.raises(InputError, match=r"has 2 files for train \(train.txt, train.txt.xz\): leave one"):
        read_directory(tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_what_is_no_directory_is_a_clear_error(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=f"{name} is no directory: pass one with train, valid and test"):
        read_directory(tmp_path / name)


def test_a_changed_file_of_the_package_is_a_clear_error(tmp_path):
    write(tmp_path, names="{}.txt.xz")
    with pytest.raises(InputError, match=r"train.txt.xz holds sha256 .*, wanted abc.*: install mp-lstm again"):
        corpus.load_packaged(tmp_path, dict.fromkeys(corpus.SPLITS, "abc"))


def test_read_text_takes_files_and_streams(tmp_path):
    vocabulary = Vocabulary((EOS, "<unk>", "it"))
    (tmp_path / "a.txt").write_text("so it is")
    sources = (tmp_path / "a.txt", str(tmp_path / "a.txt"), io.StringIO("so it is"), io.BytesIO(b"so it is"))
    assert [read_text(source, vocabulary).tokens.tolist() for source in sources] == [[1, 2, 1, 0]] * 4


def test_errors_of_a_stream_without_a_name_say_so():
    with pytest.raises(InputError, match=r"the stream, line 1: the word 'so' is not in the training text"):
        read_text(io.StringIO("so"), Vocabulary((EOS, "it")))


@pytest.mark.parametrize("line_end", [b"\n", b" "], ids=["short lines", "one line"])
def test_pitfall_10_a_corpus_is_never_held_as_python_words(tmp_path, line_end):
    """Python words take about 60 bytes each; ids take 4, and a few times that while the array grows."""
    words = 300_000
    write(tmp_path, train=(b"so it is what it is " * 5 + line_end) * (words // 30))
    tracemalloc.start()
    train = read_directory(tmp_path).train
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(train.tokens) == words + len(train.lengths)
    assert peak < 24 * len(train.tokens)
