"""Words and their ids, by frequency.

Ids are decided by the training text alone: `<eos>` is 0, `<unk>` is 1 where there is one, then words from the commonest
to the rarest, equally common ones in alphabetical order. So the same text gives the same ids on every machine, whatever
the order of its lines, and a low id is a common word.

A word is what stands between white space; there is no tokenizer here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Integer

from mp_lstm.data.checks import integer
from mp_lstm.data.replacing import taking_the_place
from mp_lstm.errors import InputError

EOS = "<eos>"
UNK = "<unk>"


@dataclass(frozen=True)
class Vocabulary:
    """The words a model knows; immutable.

    Args:
      words: by id, each once, `<eos>` among them.

    Raises:
      InputError: `<eos>` is missing, a word stands there twice, or one is empty or holds white space.

    Example:
      >>> vocabulary = Vocabulary(("<eos>", "<unk>", "the", "ball"))
      >>> vocabulary.index("ball"), vocabulary.index("bat"), len(vocabulary)
      (3, 1, 4)
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", tuple(self.words))
        for word in self.words:
            if word.split() != [word]:
                raise InputError(f"the vocabulary has the word {word!r}: words are not empty and hold no white space")
        if len(self.ids) < len(self.words):
            word = Counter(self.words).most_common(1)[0][0]
            raise InputError(f"the vocabulary has the word {word!r} more than once: every word has one id")
        if EOS not in self.ids:
            raise InputError(f"the vocabulary has no {EOS}, which ends every sentence: add it, e.g. as the first word")

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self.ids

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """The id of every word; not to be changed."""
        return {word: index for index, word in enumerate(self.words)}

    @property
    def eos(self) -> int:
        """The id of the end of a sentence."""
        return self.ids[EOS]

    @property
    def unk(self) -> int | None:
        """The id that stands for unknown words, None where they are not allowed."""
        return self.ids.get(UNK)

    def index(self, word: str) -> int:
        """Looks a word up.

        Args:
          word: any word.

        Returns:
          Its id; that of `<unk>` where the word is unknown.

        Raises:
          InputError: the word is unknown and there is no `<unk>`.

        Example:
          >>> Vocabulary(("<eos>", "yes")).index("yes")
          1
        """
        found = self.ids.get(word, self.unk)
        if found is None:
            raise InputError(
                f"the word {word!r} is not among the {len(self)} words of the vocabulary, which has no {UNK}: "
                f"use words of the training text, or train with {UNK}: {how_to_get_unk(len(self))}"
            )
        return found

    def encode(self, text: str | Iterable[str]) -> Int32[np.ndarray, " N"]:
        """Turns words into ids; `<eos>` is not added.

        Args:
          text: a line, cut at white space, or its words.

        Returns:
          [N] ids.

        Raises:
          InputError: a word is unknown and there is no `<unk>`.

        Example:
          >>> Vocabulary(("<eos>", "<unk>", "the", "ball")).encode("the bat")
          array([2, 1], dtype=int32)
        """
        words = text.split() if isinstance(text, str) else text
        return np.fromiter(map(self.index, words), np.int32)

    def decode(self, ids: Iterable[int] | Integer[np.ndarray, " N"]) -> str:
        """Turns ids into a line of words.

        Args:
          ids: of words of this vocabulary.

        Returns:
          The words, a space between them.

        Raises:
          InputError: an id is out of range.

        Example:
          >>> Vocabulary(("<eos>", "the", "ball")).decode([1, 2, 0])
          'the ball <eos>'
        """
        return " ".join(self._word(int(index)) for index in ids)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the words to a file, one a line in the order of their ids; as a whole or not at all.

        Args:
          path: the file; it is replaced.

        Raises:
          OSError: it cannot be written.

        Example:
          >>> import tempfile
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     Vocabulary(("<eos>", "the")).save(f"{folder}/vocabulary.txt")
          ...     Vocabulary.load(f"{folder}/vocabulary.txt").words
          ('<eos>', 'the')
        """
        path = Path(path)
        temporary = path.with_name(f"{path.name}.new")
        with taking_the_place(temporary, path):
            temporary.write_bytes("".join(f"{word}\n" for word in self.words).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Reads what `save` wrote.

        Args:
          path: the file.

        Returns:
          The vocabulary.

        Raises:
          InputError: there is no such file, or it is not a vocabulary.

        Example:
          See `save`.
        """
        name = os.fspath(path)
        try:
            text = Path(path).read_bytes().decode()
            return cls(tuple(text.removesuffix("\n").split("\n")))
        except OSError as error:
            raise InputError(
                f"{name}, the words of a run, cannot be read ({error.strerror}): put the file back, or train anew"
            ) from error
        except ValueError as error:
            raise InputError(f"{name} is not a saved vocabulary ({error}): put the file of the run back") from error

    def _word(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise InputError(f"{index} is no id of this vocabulary: ids go from 0 to {len(self) - 1}")
        return self.words[index]


def how_to_get_unk(size: int) -> str:
    """What a user does so that a vocabulary of this size, which has no `<unk>`, gets it.

    Example:
      >>> how_to_get_unk(40)
      'write <unk> for rare words in the training text, or set --data.vocab_limit below 40'
      >>> how_to_get_unk(2)
      'write <unk> for rare words in the training text'
    """
    limit = f", or set --data.vocab_limit below {size}" if size > 2 else ""  # the least limit is 2
    return f"write {UNK} for rare words in the training text{limit}"


def build_vocabulary(source: Mapping[str, int] | Iterable[str], limit: int | None = None) -> Vocabulary:
    """Makes the vocabulary of a text: the commonest words first.

    `<eos>` is always in it. `<unk>` is where the text has it, or where the limit cuts words.

    Args:
      source: how often each word occurs, or the lines of the text.
      limit: the most words, `<eos>` and `<unk>` included; None: all.

    Returns:
      The vocabulary.

    Raises:
      InputError: the limit is no integer, or below 2.

    Example:
      >>> build_vocabulary(["b b a", "c b a"]).words
      ('<eos>', 'b', 'a', 'c')
      >>> build_vocabulary(["b b a", "c b a"], limit=3).words
      ('<eos>', '<unk>', 'b')
    """
    counts = source if isinstance(source, Mapping) else Counter(word for line in source for word in line.split())
    ranked = sorted(counts.keys() - {EOS, UNK}, key=lambda word: (-counts[word], word))
    special = (EOS, UNK) if UNK in counts else (EOS,)
    if limit is not None and len(special) + len(ranked) > integer("vocab_limit", limit, 2):
        special = (EOS, UNK)
        ranked = ranked[: limit - len(special)]
    return Vocabulary((*special, *ranked))
