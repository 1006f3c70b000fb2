"""The directory of a run: whether it may be a new one, and what an old one holds.

It holds config.toml (the configuration in full), vocabulary.txt, metrics.jsonl, checkpoints/ and, in the end, loss.png.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from mp_lstm.data import Vocabulary
from mp_lstm.data.corpus import AUSTEN
from mp_lstm.data.corpus import text_files as texts_in
from mp_lstm.errors import InputError
from mp_lstm.training.config import Config, load_saved
from mp_lstm.training.files import is_utf8, writing

CONFIG, VOCABULARY = "config.toml", "vocabulary.txt"
RUN_FILES = {"metrics.jsonl", "checkpoints"}  # what else shows that a directory is a run's


def fresh_directory(run_dir: Path | None, name: str) -> Path:
    """The directory of a new run: the one that was asked for, if it is free, else the next one of this name."""
    if run_dir is None:
        number = 1
        while (path := Path("runs", f"{name}-{number}")).exists():
            number += 1
        _check_name(path)
        return path
    _check_name(run_dir)
    with writing(run_dir):
        if run_dir.is_file():
            raise InputError(f"{run_dir} is a file: pass a directory as --run-dir")
        held = {path.name for path in run_dir.iterdir()} if run_dir.exists() else set()
    if CONFIG in held:
        raise InputError(f"{run_dir} holds another run: pass --resume to go on with it, or another --run-dir")
    if held - {VOCABULARY}:  # that alone is left by a run that came to no more
        what = f"a run that has lost its {CONFIG}" if held & RUN_FILES else "other files"
        raise InputError(f"{run_dir} holds {what}: pass another --run-dir")
    return run_dir


def claimed_directory(name: str) -> Path:
    """Makes the next directory of this name: whoever else looks for one finds it taken."""
    while True:
        path = fresh_directory(None, name)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # somebody else took it just now
                path.mkdir()
                return path


def check_writable(run_dir: Path) -> None:
    """Makes the directory of a run and a file in it, and takes them away: what is wrong shows before the work.

    A file is made beside the checkpoints too, where there are some.
    """
    with writing(run_dir):
        made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        with writing(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
        for folder in filter(Path.is_dir, (run_dir, run_dir / "checkpoints")):
            with writing(folder), tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"room")
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # not made after all, or somebody else's too by now
                path.rmdir()


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Keeps others from training the same run meanwhile; the system lets go of it however the process ends.

    Nothing is held where the system has no such locks, as on some network disks.

    Raises:
      InputError: another process trains it.

    Example:
      >>> with tempfile.TemporaryDirectory() as folder, held(Path(folder)):
      ...     with held(Path(folder)):
      ...         pass
      Traceback (most recent call last):
      mp_lstm.errors.InputError: ... is being trained by another process: wait for it, or stop it, or ...
    """
    try:
        import fcntl
    except ImportError:  # on Windows there is none
        yield
        return
    with writing(run_dir):
        folder = os.open(run_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"{run_dir} is being trained by another process: wait for it, or stop it, or pass another --run-dir"
            ) from error
        except OSError:  # no such locks here
            pass
        yield
    finally:
        os.close(folder)


def saved_config(run_dir: Path) -> Config:
    """The configuration of a run."""
    _check_name(run_dir)
    if (run_dir / CONFIG).is_file():
        return load_saved(run_dir / CONFIG)
    if any((run_dir / name).exists() for name in RUN_FILES):
        raise InputError(f"{run_dir} holds a run that has lost its {CONFIG}: put the file back, or train anew")
    raise InputError(f"{run_dir} is no run directory, it has no {CONFIG}: train first, or pass another directory")


def saved_vocabulary(run_dir: Path) -> Vocabulary:
    """The words of a run."""
    return Vocabulary.load(run_dir / VOCABULARY)


def _check_name(run_dir: Path) -> None:
    """Refuses a directory that the library of checkpoints cannot name; it would find that out when it writes them."""
    name = str(run_dir.absolute())
    if not is_utf8(name):
        raise InputError(f"{name!r} is not UTF-8, which checkpoints need: rename it, or pass another run directory")


def own_files(run_dir: Path) -> list[Path]:
    """The files of a run, whether or not they are there: what a user keeps beside them is none."""
    named = [CONFIG, VOCABULARY, *RUN_FILES, "loss.png"]
    return [*(run_dir / name for name in named), *(run_dir / "checkpoints").rglob("*")]


def text_files(config: Config) -> list[Path]:
    """The files of a run's text, of all splits; none where they cannot be found any more."""
    folder = AUSTEN if config.data.source == "austen" else Path(config.data.source)
    try:
        return [path for _, path in texts_in(folder)]
    except OSError:
        return []


def check_same_run(saved: Config, config: Config, run_dir: Path) -> None:
    """A resumed run may go on elsewhere, longer or at other rates, but not as another model or on other batches.

    The text may have moved: that it has the same words is checked when it has been read.
    """
    fixed = {
        "a checkpoint of another model": [f"model.{name}" for name in vars(saved.model)],
        "a run on other batches": [*(f"data.{name}" for name in vars(saved.data) if name != "source"), "train.seed"],
    }
    for what, names in fixed.items():
        for name in names:
            before, now = (attrgetter(name)(one) for one in (saved, config))
            if now != before:
                raise InputError(
                    f"{run_dir} holds {what}: its {name} is {before!r}, now it is {now!r}: leave it as it was, or "
                    "start a new run"
                )
