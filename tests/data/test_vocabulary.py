"""Words and ids: the order, unknown words, and what a file keeps."""

import errno
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.data import EOS, UNK, Vocabulary, build_vocabulary
from mp_lstm.errors import InputError

words = st.text(st.characters(exclude_categories=["Cs", "Z", "Cc"]), min_size=1).filter(lambda w: w.split() == [w])


def test_common_words_have_low_ids_and_ties_are_alphabetical():
    assert build_vocabulary(["c b a", "b z"]).words == (EOS, "b", "a", "c", "z")


def test_the_order_of_lines_does_not_matter():
    lines = ["it is so", "so it was", "was it <unk>"]
    assert build_vocabulary(lines) == build_vocabulary(lines[::-1])


def test_counts_may_hold_the_special_words():
    assert build_vocabulary({"a": 1, EOS: 7, UNK: 3, "b": 2}).words == (EOS, UNK, "b", "a")


def test_unk_is_there_if_the_text_has_it_or_the_limit_cuts():
    assert build_vocabulary(["a b"]).unk is None
    assert build_vocabulary(["a b"], limit=3).unk is None
    assert build_vocabulary(["a b <unk>"]).unk == 1
    assert build_vocabulary(["a b c"], limit=3).words == (EOS, UNK, "a")


@given(st.lists(words, min_size=1), st.integers(2, 8))
def test_the_limit_counts_every_word_and_keeps_the_commonest(text, limit):
    vocabulary = build_vocabulary([" ".join(text)], limit=limit)
    assert len(vocabulary) <= limit
    counts = Counter(text)
    kept = [counts[word] for word in vocabulary.words if word not in (EOS, UNK)]
    cut = [count for word, count in counts.items() if word not in vocabulary]
    assert not cut or not kept or min(kept) >= max(cut)


def test_story_16_unknown_words_become_unk():
    """The example raised KeyError for a word that it had not seen."""
    vocabulary = build_vocabulary(["so it is <unk>"])
    assert vocabulary.decode(vocabulary.encode("so was it")) == "so <unk> it"


def test_story_16_unknown_words_without_unk_are_a_clear_error():
    vocabulary = build_vocabulary(["so it is"])
    with pytest.raises(InputError, match=r"'was' is not among the 4 words.*no <unk>.*--data.vocab_limit below 4"):
        vocabulary.encode("so it was")


@given(st.sets(words))
def test_a_saved_vocabulary_is_the_same(tmp_path_factory, found):
    vocabulary = Vocabulary((EOS, *sorted(found - {EOS})))
    path = tmp_path_factory.mktemp("run") / "vocabulary.txt"
    vocabulary.save(path)
    assert Vocabulary.load(path) == vocabulary


def test_a_vocabulary_on_a_full_disk_is_not_half_of_one(tmp_path, monkeypatch):
    """It was written in place: what fitted stayed there, and was no vocabulary, or one with half a word at its end."""
    path = tmp_path / "vocabulary.txt"
    write = Path.write_bytes

    def full(self, data):
        write(self, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        Vocabulary((EOS, "so", "it", "is")).save(path)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    Vocabulary((EOS, "so")).save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["vocabulary.txt"]
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        Vocabulary((EOS, "so", "it", "is")).save(path)
    assert Vocabulary.load(path).words == (EOS, "so")


def test_is_immutable():
    with pytest.raises(AttributeError):
        Vocabulary((EOS,)).words = ("a",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((EOS, "a", "a"), "'a' more than once"),
        (("a",), "no <eos>"),
        ((EOS, "a b"), "'a b': words are not empty"),
        ((EOS, ""), "'': words are not empty"),
    ],
)
def test_refuses_what_is_no_vocabulary(words, message):
    with pytest.raises(InputError, match=message):
        Vocabulary(words)


@pytest.mark.parametrize("limit", [1, 0])
def test_refuses_a_limit_that_leaves_nothing(limit):
    with pytest.raises(InputError, match=f"vocab_limit is {limit!r}, wanted an integer of at least 2"):
        build_vocabulary(["a b c"], limit)


@pytest.mark.parametrize("index", [-1, 2])
def test_refuses_ids_out_of_range(index):
    with pytest.raises(InputError, match=f"{index} is no id of this vocabulary: ids go from 0 to 1"):
        Vocabulary((EOS, "a")).decode([index])


@pytest.mark.parametrize("content", [b"a\nb\n", b"<eos>\n\xff\n", b""])
def test_refuses_files_that_are_no_vocabulary(tmp_path, content):
    path = tmp_path / "vocabulary.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"vocabulary.txt is not a saved vocabulary \(.*\): put the file of the run b"):
        Vocabulary.load(path)


def test_a_vocabulary_that_is_gone_says_what_to_do(tmp_path):
    """It said to pass another one, which no command takes."""
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\): put the file back, or train"):
        Vocabulary.load(tmp_path / "vocabulary.txt")


def test_a_limit_that_cannot_be_is_no_remedy():
    """A vocabulary of two words: the limit is at least 2, and below 2 was advised."""
    with pytest.raises(InputError, match=r"train with <unk>: write <unk> for rare words in the training text$"):
        Vocabulary((EOS, "yes")).encode("no")
