"""The command line: whole runs of a tiny model, and one clear line for every mistake."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mp_lstm import cli, launch
from mp_lstm.errors import InputError
from mp_lstm.training import fit as fit_module
from mp_lstm.training.config import Config, load
from mp_lstm.training.fit import FitResult
from mp_lstm.training.overrides import flag_types

TINY = """
[data]
source = "text"
buckets = "auto"
batch_size = 4
[model]
embed = 4
hidden = 4
layers = 2
[pipeline]
stages = 2
chunk = 4
[optimizer]
learning_rate = 0.01
[train]
epochs = 1
log_every = 2
"""
SENTENCES = [" ".join("abcdefg"[i % 7] for i in range(length)) for length in (2, 3, 3, 5, 5, 5, 6, 7) * 3]


def write_text(folder: Path, train: list[str], valid: list[str] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in (("train", train), ("valid", valid or train[:6]), ("test", train[2:5])):
        (folder / f"{split}.txt").write_text("\n".join(lines))


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices of the tests are emulated already, and the allocator is not theirs to set."""
    monkeypatch.setattr(launch, "prepare", lambda emulated: None)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a text and a configuration."""
    write_text(tmp_path / "text", SENTENCES)
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Done(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    def command(*words: str) -> Done:
        capsys.readouterr()
        return Done(cli.main(words), *capsys.readouterr())

    return command


@pytest.fixture
def refused(run: Callable[..., Done]) -> Callable[..., None]:
    """Asserts that a command ends with exit status 2 and one line on stderr, which holds a text."""

    def command(line: str, message: str) -> None:
        done = run(*line.split())
        assert (done.status, done.out) == (2, "")
        assert re.fullmatch(r"mp-lstm: error: [^\n]+\n", done.err)
        assert message in done.err

    return command


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like `place` in which a model has been trained; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("trained")
    write_text(folder / "text", SENTENCES)
    (folder / "tiny.toml").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "prepare", lambda emulated: None)
        patch.chdir(folder)
        assert cli.main(["train", "tiny.toml"]) == 0
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that directory, as working directory."""
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    monkeypatch.chdir(folder)
    return folder


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# --- whole runs ---


def test_a_run_directory_holds_everything(trained: Path):
    run_dir = trained / "runs" / "tiny-1"
    names = {path.name for path in run_dir.iterdir()}
    assert names >= {"config.toml", "vocabulary.txt", "metrics.jsonl", "checkpoints"}
    config = load(run_dir / "config.toml")
    buckets = config.data.buckets
    assert isinstance(buckets, tuple)  # resolved
    given = load(trained / "tiny.toml")
    assert config == replace(given, data=replace(given.data, buckets=buckets))
    names = [event["event"] for event in events(run_dir)]
    assert (names[0], names[-2:]) == ("start", ["test", "done"])
    assert set(names) == {"start", "train", "valid", "test", "done"}


def test_evaluate_finds_what_the_run_found(copied: Path, run: Callable[..., Done]):
    run_dir = copied / "runs" / "tiny-1"
    before = events(run_dir)
    done = run("evaluate", "runs/tiny-1")
    assert done.status == 0
    *same, test = events(run_dir)
    assert same == before
    assert test == before[-2]
    line = f"test: loss {test['loss']:.4f}  perplexity {test['perplexity']:.2f}  tokens {test['tokens']:,}\n"
    assert done.out == line


def test_evaluating_another_split_is_no_test(copied: Path, run: Callable[..., Done]):
    before = events(copied / "runs" / "tiny-1")
    done = run("evaluate", "runs/tiny-1", "--split", "valid")
    valid = next(event for event in before if event["event"] == "valid")
    assert (done.status, done.out.split()[:3]) == (0, ["valid:", "loss", f"{valid['loss']:.4f}"])
    assert events(copied / "runs" / "tiny-1") == before


def test_generate_needs_only_the_run(copied: Path, run: Callable[..., Done]):
    shutil.rmtree(copied / "text")
    words = ("generate", "runs/tiny-1", "--prompt", "a b c", "--tokens", "8", "--temperature")
    first, second = run(*words, "0"), run(*words, "0")
    assert first == second
    assert first.status == 0
    assert first.out.startswith("a b c ")
    assert run(*words, "1", "--seed", "1").out != run(*words, "1", "--seed", "2").out


def test_a_run_goes_on_longer_and_on_other_stages(copied: Path, run: Callable[..., Done]):
    done = run("train", "tiny.toml", "--run-dir", "runs/tiny-1", "--resume", "--train.epochs=2", "--pipeline.stages=1")
    assert done.status == 0
    assert "resumed after step" in done.out
    config = load("runs/tiny-1/config.toml")
    assert (config.train.epochs, config.pipeline.stages) == (2, 1)
    assert max(event["epoch"] for event in events(Path("runs/tiny-1")) if "epoch" in event) == 2


def test_a_run_goes_on_without_its_configuration_file(copied: Path, run: Callable[..., Done], monkeypatch: Any):
    (copied / "tiny.toml").unlink()
    seen: list[Config] = []
    monkeypatch.setattr(fit_module, "fit", lambda setup, *_, **__: seen.append(setup.config) or finished())
    saved = load("runs/tiny-1/config.toml")
    assert run("train", "--run-dir", "runs/tiny-1", "--resume").status == 0
    assert seen == [saved] == [load("runs/tiny-1/config.toml")]


def finished(number: int | None = None) -> FitResult:
    return FitResult(steps=1, seconds=1.0, valid=None, best=None, test=None, signal=number)


def test_new_runs_are_numbered(place: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fit_module, "fit", lambda *_, **__: finished())
    for number in (1, 2):
        assert run("train", "tiny.toml").out == f"run directory: runs/tiny-{number}\n"
    assert cli._fresh(None, "austen") == Path("runs/austen-1")


def test_an_interrupted_run_is_not_done(place: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fit_module, "fit", lambda *_, **__: finished(15))
    assert run("train", "tiny.toml").status == 1


def test_plan_shows_what_would_be_done(place: Path, run: Callable[..., Done]):
    done = run("plan", "tiny.toml", "--data.buckets", "4", "8")
    assert done.status == 0
    assert "stage  device  row     kind" in done.out
    assert "stage 0   F0  F1  " in done.out
    assert " bucket  sentences  batches" in done.out
    assert re.search(r"bucket +8: [\d.]+ ms a step, cpu:0 busy \d+%, cpu:1 busy \d+%\n  all batches: ", done.out)
    assert not (place / "runs").exists()


def test_timeline_measures(place: Path, run: Callable[..., Done]):
    done = run("timeline", "tiny.toml", "--steps", "3")
    assert done.status == 0
    assert re.search(
        r"\nmeasured over 3 steps: [\d.]+ ms a step, cpu:0 busy \d+%, cpu:1 busy \d+%\npredicted", done.out
    )


# --- mistakes ---


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian", "invalid choice: 'trian'"),
        ("train --resum", "--resum is unknown to train: did you mean --resume?"),
        ("train --layers 3", "--layers is unknown to train: did you mean --model.layers?"),
        ("train --model.layrs 3", "--model.layrs is unknown: did you mean --model.layers?"),
        ("train --modle.layers 3", "--modle.layers is unknown: did you mean --model.layers?"),
        ("train --xyzzy", "--xyzzy is unknown to train: --help lists all flags"),
        ("train a.toml b.toml", "b.toml is unknown to train"),
        ("train --model.layers three", "--model.layers is 'three', wanted a whole number"),
        ("train --model.tie", "--model.tie is missing, wanted true or false"),
        ("train --model.dropout 1", "model.dropout is 1.0, wanted a number from 0 to below 1"),
        ("train none.toml", "none.toml cannot be read (No such file or directory)"),
        ("train --resume", "--resume needs the run to go on with: pass --run-dir DIR"),
        ("train --resume --run-dir none", "none is no run directory, it has no config.toml"),
        ("train tiny.toml --run-dir tiny.toml", "tiny.toml is a file: pass a directory as --run-dir"),
        ("train tiny.toml --run-dir text", "text holds other files"),
        ("evaluate", "arguments are required: RUN_DIR"),
        ("evaluate none", "none is no run directory"),
        ("evaluate none --split tests", "invalid choice: 'tests'"),
        ("evaluate none --model.layers 3", "evaluate takes no --model.layers: it uses the configuration of the run"),
        ("generate none --tokens many", "invalid int value: 'many'"),
        ("generate none", "none is no run directory"),
        ("timeline tiny.toml --steps 0", "--steps is 0, wanted at least 1"),
        # the corpus
        ("train --data.source none", "none is no directory: pass one with train, valid and test text, or 'austen'"),
        ("train --data.source empty", "empty has no train text"),
        ("train --data.source blank", "train.txt has no words"),
        ("train --data.source latin", "train.txt, line 2: the byte 0xe9 is not UTF-8"),
        (
            "train --data.source strange",
            "valid.txt, line 1: the word 'z' is not in the training text, which has no <",
        ),
        # the plan
        (
            "train tiny.toml --pipeline.stages auto --pipeline.partition 2 1",
            "partition gives 3 layers (2+1), the",
        ),
        ("train tiny.toml --pipeline.stages 5", "5 stages for a model of 4 placement rows"),
        ("train tiny.toml --pipeline.microbatches 5", "microbatches is 5, the batch has 4 rows"),
        ("train tiny.toml --pipeline.chunk 9", "chunk is 9 time steps, the longest bucket has 8"),
        ("plan tiny.toml --pipeline.chunk 9", "chunk is 9 time steps, the longest bucket has 8"),
    ],
)
def test_a_mistake_is_one_line(place: Path, refused: Callable[..., None], line: str, message: str):
    (place / "empty").mkdir()
    write_text(place / "blank", ["", " "])
    write_text(place / "latin", SENTENCES)
    (place / "latin" / "train.txt").write_bytes(b"so\ncaf\xe9\n")
    write_text(place / "strange", SENTENCES, ["a z"])
    refused(line, message)
    assert not (place / "runs").exists()


def test_a_loss_that_is_not_finite_is_one_line(place: Path, run: Callable[..., Done]):
    words = "--optimizer.name sgd --optimizer.learning_rate 1e30 --optimizer.max_norm none"
    done = run("train", "tiny.toml", *words.split())
    assert done.status == 2
    assert re.fullmatch(r"mp-lstm: error: step \d+: loss [^\n]+\n", done.err)
    assert "optimizer.learning_rate" in done.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[modle]\nlayers = 2", "a.toml: section [modle] is unknown: did you mean model?"),
        ("[model]\nlayrs = 2", "a.toml: field model.layrs is unknown: did you mean layers?"),
        ("[model]\nlayers = '2'", "a.toml: model.layers is '2', wanted a whole number"),
        ("[train]\nepochs = 0", "train.epochs is 0, wanted at least 1"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(place: Path, refused: Callable[..., None], text: str, message: str):
    (place / "a.toml").write_text(text)
    refused("train a.toml", message)


def test_a_run_is_not_mixed_with_another(copied: Path, refused: Callable[..., None]):
    refused("train tiny.toml --run-dir runs/tiny-1", "runs/tiny-1 holds another run: pass --resume to go on with it")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--model.hidden 8", "holds a checkpoint of another model: its model.hidden is 4, now it is 8"),
        ("--data.batch_size 8", "holds a run on other batches: its data.batch_size is 4, now it is 8"),
        ("--train.seed 1", "holds a run on other batches: its train.seed is 0, now it is 1"),
        ("--optimizer.name sgd", "is of another optimizer"),
        ("--data.source other", "other has another vocabulary (3 words) than the run had (8)"),
    ],
)
def test_a_run_does_not_go_on_as_another(copied: Path, refused: Callable[..., None], override: str, message: str):
    write_text(copied / "other", ["a b a b a b a", "a b"] * 6)
    before = Path("runs/tiny-1/config.toml").read_text()
    refused(f"train --run-dir runs/tiny-1 --resume {override}", message)
    assert Path("runs/tiny-1/config.toml").read_text() == before


def test_a_checkpoint_of_another_model_is_refused(copied: Path, refused: Callable[..., None]):
    path = Path("runs/tiny-1/config.toml")
    path.write_text(path.read_text().replace("hidden = 4", "hidden = [8, 4]"))
    for line in ("evaluate runs/tiny-1", "generate runs/tiny-1"):
        refused(line, "is of another model")


def test_an_unknown_word_of_a_prompt(copied: Path, refused: Callable[..., None]):
    refused("generate runs/tiny-1 --prompt zebra", "zebra")


# --- help, exit status, process ---


def test_help_lists_commands_and_fields(run: Callable[..., Done], capsys: pytest.CaptureFixture[str]):
    assert all(f"    {name} " in run().out for name in ("train", "evaluate", "generate", "plan", "timeline"))
    for command, configured in (("train", True), ("evaluate", False)):
        with pytest.raises(SystemExit) as ended:
            run(command, "--help")
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert [flag for flag in flag_types(Config) if (f"{flag} " in text) != configured] == []


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Done]):
    def broken(*_: Any) -> Config:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "load", broken)
    with pytest.raises(ZeroDivisionError):
        run("plan")


def test_ctrl_c_outside_of_training(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Done]):
    def interrupted(*_: Any) -> Config:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load", interrupted)
    assert run("plan") == (1, "", "mp-lstm: interrupted\n")


def test_a_message_stays_one_line(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Done]):
    def refuse(*_: Any) -> Config:
        raise InputError("one\n  two")

    monkeypatch.setattr(cli, "load", refuse)
    assert run("plan") == (2, "", "mp-lstm: error: one two\n")


def test_a_process_of_its_own(place: Path):
    main = "import sys; from mp_lstm.cli import main; sys.exit(main())"
    words = ["plan", "tiny.toml", "--train.emulate_devices", "2", "--pipeline.stages", "3"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    environment["XDG_CACHE_HOME"] = str(place / "cache")
    done = subprocess.run([sys.executable, "-c", main, *words], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "mp-lstm: error: [pipeline] 3 stages for 2 devices: use fewer stages, or emulate more devices with "
        "--train.emulate_devices 3\n"
    )
