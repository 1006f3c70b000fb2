"""The command line: whole runs of a tiny model, and one clear line for every mistake.

Over 400 lines: the tables of mistakes are long, and all share the fixtures.
"""

from __future__ import annotations

import errno
import io
import json
import math
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
from mp_lstm.training import timeline_plot
from mp_lstm.training.config import Config, load
from mp_lstm.training.fit import FitResult
from mp_lstm.training.overrides import flag_types
from mp_lstm.training.run_directory import check_writable, claimed_directory, fresh_directory, text_files

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
    monkeypatch.setattr(launch, "prepare", lambda *_: None)


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
        patch.setattr(launch, "prepare", lambda *_: None)
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


def test_a_file_of_prompts_is_a_batch(copied: Path, run: Callable[..., Done]):
    (copied / "prompts.txt").write_text("a b c\n\nb\n")
    words = ("generate", "runs/tiny-1", "--tokens", "4", "--top-k", "3", "--top-p", "0.9", "--seed", "2")
    done = run(*words, "--prompts", "prompts.txt")
    alone = [run(*words, "--prompt", prompt).out for prompt in ("a b c", "b")]
    assert (done.status, done.out) == (0, "\n".join(alone))
    ended = run(*words, "--prompt", "a b c", "--tokens", "50", "--stop-at-eos").out
    assert ended.count("\n") == 1


def test_prompts_on_standard_input(copied: Path, run: Callable[..., Done]):
    words = ("generate", "runs/tiny-1", "--tokens", "3", "--seed", "1")
    (copied / "prompts.txt").write_text("a b c\nb\n")
    read, write = os.pipe()
    os.write(write, b"a b c\nb\n")
    os.close(write)
    before = os.dup(0)
    os.dup2(read, 0)
    try:
        done = run(*words, "--prompts", "-")
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(read)
    assert done == run(*words, "--prompts", "prompts.txt")
    assert done.out.startswith("a b c ")


def test_every_token_is_scored(copied: Path, run: Callable[..., Done]):
    whole = run("evaluate", "runs/tiny-1").out
    done = run("evaluate", "runs/tiny-1", "--per-token", "scores.tsv")
    assert (done.status, done.out) == (0, whole)
    *_, before, after = events(copied / "runs" / "tiny-1")
    assert after | {"loss": 0, "perplexity": 0} == before | {"loss": 0, "perplexity": 0}
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-5)
    lines = [line.split("\t") for line in (copied / "scores.tsv").read_text().splitlines()]
    text = (copied / "text" / "test.txt").read_text()
    assert [word for word, _ in lines] == [*text.replace("\n", " <eos> ").split(), "<eos>"]
    mean = sum(float(loss) for _, loss in lines) / len(lines)
    assert f"perplexity {math.exp(mean):.2f}  tokens {len(lines)}\n" in whole


def test_a_text_of_ones_own(copied: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch):
    """The run's own test text as a file, and on standard input; the corpus is not needed."""
    whole = run("evaluate", "runs/tiny-1").out
    text = (copied / "text" / "test.txt").rename(copied / "mine.txt")
    shutil.rmtree(copied / "text")
    before = events(copied / "runs" / "tiny-1")
    done = run("evaluate", "runs/tiny-1", "--text", "mine.txt", "--per-token", "scores.tsv")
    found = whole.removeprefix("test: ").rstrip()
    assert (done.status, done.out) == (0, f"mine.txt: {found}, of which 0 are <unk>\n")
    assert len((copied / "scores.tsv").read_text().splitlines()) == int(found.split()[-1])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
    assert run("evaluate", "runs/tiny-1", "--text", "-").out == f"standard input: {found}, of which 0 are <unk>\n"
    assert events(copied / "runs" / "tiny-1") == before


def test_scores_do_not_overwrite_the_text(copied: Path, refused: Callable[..., None]):
    """The file was opened for writing once the text had been read, which was lost."""
    before = (copied / "text" / "test.txt").read_bytes()
    refused(
        "evaluate runs/tiny-1 --text text/test.txt --per-token text/../text/test.txt",
        "--per-token text/../text/test.txt is the text itself, it would be lost: pass another file",
    )
    assert (copied / "text" / "test.txt").read_bytes() == before


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("read", ["", " --text mine.txt"])
@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("text/test.txt", "a text of the run"),
        ("text/../text/train.txt", "a text of the run"),
        ("link.txt", "a text of the run"),
        ("runs/tiny-1/vocabulary.txt", "a file of the run"),
        ("runs/tiny-1/config.toml", "a file of the run"),
        ("runs/tiny-1/metrics.jsonl", "a file of the run"),
        ("runs/tiny-1/loss.png", "a file of the run"),
        ("runs/tiny-1/checkpoints/ABOUT", "a file of the run"),
    ],
)
def test_scores_overwrite_nothing_of_the_run(
    copied: Path, refused: Callable[..., None], read: str, file: str, what: str
):
    """Only --text was guarded: the test text of the run was emptied before it was read, its words lost."""
    shutil.copy("text/test.txt", "mine.txt")
    Path("runs/tiny-1/checkpoints/ABOUT").touch()
    Path("runs/tiny-1/loss.png").touch()
    os.link("text/valid.txt", "link.txt")
    before = files_of(copied)
    line = f"evaluate runs/tiny-1{read} --per-token {file}"
    refused(line, f"--per-token {file} is {what}, it would be lost: pass another file")
    assert files_of(copied) == before


def test_the_texts_of_the_package_are_texts_of_a_run():
    assert {path.name for path in text_files(load())} == {"train.txt.xz", "valid.txt.xz", "test.txt.xz"}


def test_scores_may_lie_beside_what_is_read(copied: Path, run: Callable[..., Done]):
    """As may those of an earlier evaluation, which are replaced."""
    for file in ("text/test.scores.tsv", "runs/tiny-1/scores.tsv", "runs/tiny-1/scores.tsv"):
        done = run("evaluate", "runs/tiny-1", "--per-token", file)
        assert (done.status, Path(file).read_text().count("\t")) == (0, int(done.out.split()[-1]))


def test_scores_do_not_overwrite_the_text_under_another_name(copied: Path, refused: Callable[..., None]):
    """A hard link to the text was overwritten."""
    shutil.copy("text/test.txt", "mine.txt")
    os.link("mine.txt", "link.txt")
    before = files_of(copied)
    refused("evaluate runs/tiny-1 --text mine.txt --per-token link.txt", "--per-token link.txt is the text itself")
    assert files_of(copied) == before


@pytest.mark.parametrize("lost", ["runs/tiny-1/checkpoints", "text"])
def test_a_refused_evaluation_leaves_the_scores_of_another(copied: Path, refused: Callable[..., None], lost: str):
    """They were emptied before the work."""
    Path("scores.tsv").write_text("old")
    shutil.rmtree(lost)
    before = files_of(copied)
    refused("evaluate runs/tiny-1 --per-token scores.tsv", lost)
    assert files_of(copied) == before


def test_scores_on_standard_output(copied: Path, capfd: pytest.CaptureFixture[str]):
    """It is not replaced by a file, and nothing else is written there."""
    assert cli.main(["evaluate", "runs/tiny-1", "--per-token", "scores.tsv"]) == 0
    capfd.readouterr()
    assert cli.main(["evaluate", "runs/tiny-1", "--per-token", "/dev/stdout"]) == 0
    out, err = capfd.readouterr()
    assert (out, err[:6]) == (Path("scores.tsv").read_text(), "test: ")
    assert cli.main(["evaluate", "runs/tiny-1", "--per-token", "-", "--text", "text/test.txt"]) == 0
    assert (out, "text/test.txt: loss ") == ((done := capfd.readouterr()).out, done.err[:20])
    assert not Path("-").exists()


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
    assert fresh_directory(None, "austen") == Path("runs/austen-1")


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


def test_plan_draws_the_commonest_bucket(place: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch):
    drawn: list[Any] = []
    monkeypatch.setattr(timeline_plot, "timeline_picture", lambda *args: drawn.append(args))
    assert run("plan", "tiny.toml", "--data.buckets", "4", "8", "--plot", "plan.png").status == 0
    ((path, measured, predicted, schedule, names, title),) = drawn
    assert (path, measured, names) == (Path("plan.png"), None, ["cpu:0", "cpu:1"])
    assert set(predicted.start) == set(schedule.tasks)
    assert title.startswith("tiny: a step of 4 rows, bucket 8 (costs: predicted for ")


def test_timeline_measures_every_bucket(place: Path, run: Callable[..., Done]):
    done = run("timeline", "tiny.toml", "--data.buckets", "4", "8", "--steps", "2")
    assert done.status == 0
    head, table = done.out.split("\n2 steps of each bucket beside their prediction (costs: predicted for ")
    assert head.startswith("stage  device  row     kind")
    _, header, *rows = table.splitlines()
    assert header == "bucket    measured   predicted  error  idle, measured / predicted"
    times = r" +[\d,.]+ ms +[\d,.]+ ms +[-+]\d+%"
    shares = r"  cpu:0 \d+% / \d+%, cpu:1 \d+% / \d+%"
    for row, pattern in zip(rows, (f" +4{times}{shares}", f" +8{times}{shares}", f" +mean{times}"), strict=True):
        assert re.fullmatch(pattern, row)
    assert {path.name for path in place.iterdir()} == {"text", "tiny.toml"}


def test_timeline_keeps_the_commonest_bucket(place: Path, run: Callable[..., Done]):
    done = run("timeline", "tiny.toml", "--data.buckets", "4", "8", "--steps", "1", "--out", "kept/here")
    assert done.status == 0
    assert done.out.endswith("\nkept/here/trace.json\nkept/here/timeline.png\n")
    trace = json.loads(Path("kept/here/trace.json").read_text())
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["cpu:0 measured", "cpu:0 predicted", "cpu:1 measured", "cpu:1 predicted"]
    assert any(event["name"] == "F1 stage 1" for event in trace["traceEvents"])  # two chunks: bucket 8
    assert Path("kept/here/timeline.png").read_bytes().startswith(b"\x89PNG")


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
        ("train tiny.toml --run-dir tiny.toml/a", "tiny.toml/a cannot be written (Not a directory): make room for it"),
        ("train --data.source none --run-dir /proc/a", "/proc/a cannot be written (No such file or directory)"),
        ("--xyzzy", "--xyzzy is no option of mp-lstm itself: write a command first, see mp-lstm --help"),
        ("--model.layers 3", "--model.layers is no option of mp-lstm itself"),
        (
            "train tiny.toml --optimizer.options mu_dtype bogus",
            "optimizer.options is mu_dtype = 'bogus', which optax does not take for adam",
        ),
        (
            "train --data.source longer --data.buckets 4 --data.long_sentences drop",
            "[valid text] all 1 sentences are longer than the last bucket, 4, and are dropped",
        ),
        ("train tiny.toml --run-dir tiny.toml", "tiny.toml is a file: pass a directory as --run-dir"),
        ("train tiny.toml --run-dir text", "text holds other files: pass another --run-dir"),
        ("evaluate", "arguments are required: RUN_DIR"),
        ("evaluate none", "none is no run directory"),
        ("evaluate none --split tests", "invalid choice: 'tests'"),
        ("evaluate none --model.layers 3", "evaluate takes no --model.layers: it uses the configuration of the run"),
        ("generate none --tokens many", "invalid int value: 'many'"),
        ("generate none", "none is no run directory"),
        ("train tiny.toml --processes 2", "--coordinator is not given: give --coordinator HOST:PORT"),
        ("train tiny.toml --train.step_timeout 0", "train.step_timeout is 0.0, wanted a number above 0"),
        ("evaluate none --processes 2", "--processes is unknown to evaluate"),
        ("launch -- train", "arguments are required: --processes"),
        ("launch --processes 2", "launch runs train, and was given no command: write -- train ... after its options"),
        ("launch --processes 2 -- evaluate none", "launch runs train, not 'evaluate'"),
        (
            "launch --processes 2 train tiny.toml",
            "launch has no -- before train: write mp-lstm launch --processes N -- tra",
        ),
        (
            "launch --processes 2 train --train.epochs 1",
            "launch has no -- before train: write mp-lstm launch --processes",
        ),
        ("plan tiny.toml --optimizer.name adagard", "optimizer.name 'adagard' is unknown to optax: did you mean adagr"),
        ("plan tiny.toml --optimizer.options b3 1", "optimizer.options has 'b3', adam does not"),
        ("train --model.hidden", "--model.hidden is missing, wanted a whole number or a list of whole numbers"),
        ("launch --processes 0 -- train", "--processes is 0, wanted at least 1: pass --processes 2 for two"),
        ("launch --processes 2 --devices-per-process 0 -- train", "--devices-per-process is 0, wanted at least 1"),
        ("timeline tiny.toml --steps 0", "--steps is 0, wanted at least 1"),
        ("timeline tiny.toml --out tiny.toml", "tiny.toml cannot be made (File exists): pass another directory"),
        ("plan tiny.toml --plot none/a.png", "none/a.png cannot be written (No such file or directory)"),
        ("plan tiny.toml --plot a.xyz", "a.xyz cannot be drawn (Format 'xyz' is not supported"),
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
    write_text(place / "longer", ["a b"] * 8, ["a b a b a b"])
    refused(line, message)
    assert not (place / "runs").exists()


def test_a_loss_that_is_not_finite_is_one_line(place: Path, run: Callable[..., Done]):
    words = "--optimizer.name sgd --optimizer.learning_rate 1e38 --optimizer.max_norm none"
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
        ("[train]\nepochs = 0", "a.toml: train.epochs is 0, wanted at least 1: its default is 3"),
        (f"[optimizer]\nlearning_rate = {10**400}", "a.toml: optimizer.learning_rate is 1"),
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


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("config.toml", "runs/tiny-1 holds a run that has lost its config.toml: put the file back, or train anew"),
        ("vocabulary.txt", "vocabulary.txt, the words of a run, cannot be read (No such file or directory): put the f"),
        ("checkpoints", "runs/tiny-1"),
    ],
)
def test_a_run_that_lost_a_file(copied: Path, run: Callable[..., Done], lost: str, message: str):
    """Each command advised the other."""
    path = Path("runs/tiny-1", lost)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for line in ("evaluate runs/tiny-1", "generate runs/tiny-1", "train --resume --run-dir runs/tiny-1"):
        done = run(*line.split())
        assert (done.status, message in done.err, done.err.count("\n")) == (2, True, 1)
    if lost == "config.toml":
        done = run("train", "tiny.toml", "--run-dir", "runs/tiny-1")
        assert "runs/tiny-1 holds a run that has lost its config.toml: pass another --run-dir" in done.err


def test_an_emptied_configuration_is_not_the_demo(copied: Path, refused: Callable[..., None]):
    Path("runs/tiny-1/config.toml").write_text("")
    for line in ("evaluate runs/tiny-1", "train --resume --run-dir runs/tiny-1"):
        refused(line, "runs/tiny-1/config.toml has lost its section [data]: put the file of the run back")


def test_a_damaged_checkpoint_is_one_line(copied: Path, refused: Callable[..., None]):
    (step,) = Path("runs/tiny-1/checkpoints").iterdir()
    for file in (step / "state" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:99])
    for line in ("evaluate runs/tiny-1", "generate runs/tiny-1", "train --resume --run-dir runs/tiny-1"):
        refused(line, f"checkpoints/{step.name} is damaged (ValueError: state/d/")


def test_a_run_may_be_one_that_is_only_read(copied: Path, run: Callable[..., Done]):
    """Metrics that cannot be written: the evaluation is printed even so."""
    Path("runs/tiny-1/metrics.jsonl").unlink()
    Path("runs/tiny-1/metrics.jsonl").mkdir()
    done = run("evaluate", "runs/tiny-1")
    assert (done.status, done.out[:11]) == (0, "test: loss ")
    assert done.err.startswith("mp-lstm: the test is not noted: runs/tiny-1/metrics.jsonl cannot be written (Is a dir")


def test_a_negative_seed_is_one_line(copied: Path, refused: Callable[..., None]):
    refused("generate runs/tiny-1 --seed -1", "seed is -1, a whole number of at least 0 is wanted")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("evaluate runs/tiny-1 --text none.txt", "none.txt cannot be read (No such file or directory)"),
        ("evaluate runs/tiny-1 --text text", "text cannot be read (Is a directory)"),
        ("evaluate runs/tiny-1 --text blank.txt", "blank.txt has no words"),
        ("evaluate runs/tiny-1 --text latin.txt", "latin.txt, line 2: the byte 0xe9 is not UTF-8"),
        ("evaluate runs/tiny-1 --text strange.txt", "strange.txt, line 1: the word 'zebra' is not in the training tex"),
        ("evaluate runs/tiny-1 --text a.txt --split test", "--split: not allowed with argument --text"),
        ("evaluate runs/tiny-1 a.txt", "a.txt is unknown to evaluate: did you mean --text a.txt?"),
        ("generate runs/tiny-1 word", "word is unknown to generate: did you mean --prompt word?"),
        ("evaluate runs/tiny-1 --per-token none/a", "none/a cannot be written (No such file or directory): pass anot"),
        ("generate runs/tiny-1 --prompts none.txt", "none.txt cannot be read (No such file or directory)"),
        ("generate runs/tiny-1 --prompts blank.txt", "blank.txt has no words: write one prompt a line"),
        ("generate runs/tiny-1 --prompts a.txt --prompt a", "--prompt: not allowed with argument --prompts"),
        ("generate runs/tiny-1 --top-k 0", "top_k is 0, at least 1 is wanted"),
        ("generate runs/tiny-1 --top-p 2", "top_p is 2.0, a number above 0 and at most 1 is wanted"),
    ],
)
def test_a_mistake_about_a_run_is_one_line(copied: Path, refused: Callable[..., None], line: str, message: str):
    (copied / "blank.txt").write_text(" \n\n")
    (copied / "latin.txt").write_bytes(b"a b\ncaf\xe9\n")
    (copied / "strange.txt").write_text("a zebra\n")
    refused(line, message)


@pytest.mark.parametrize(
    "line",
    [
        "generate {}",
        "evaluate {}",
        "evaluate runs/tiny-1 --text {}",
        "evaluate runs/tiny-1 --per-token {}",
        "generate runs/tiny-1 --prompts {}",
        "train tiny.toml --run-dir {}",
        "train tiny.toml --run-dir {} --resume",
        "train {}",
        "plan tiny.toml --data.source {}",
        "plan tiny.toml --plot {}.png",
        "timeline tiny.toml --out {}",
    ],
)
def test_a_name_that_the_system_refuses_is_one_line(copied: Path, refused: Callable[..., None], line: str):
    """That a path cannot even be looked for left with a traceback."""
    before = files_of(copied)
    refused(line.format("a" * 300), "File name too long")
    assert files_of(copied) == before


def test_a_run_directory_that_the_system_refuses_is_bad_input():
    """Of several processes the first one looks at it, and tells the others of an `InputError` only: they waited."""
    for look in (lambda path: fresh_directory(path, "tiny"), check_writable):
        with pytest.raises(
            InputError, match=r"cannot be written \(File name too long\): make room for it, or pass ano"
        ):
            look(Path("a" * 300))


def test_a_place_that_may_not_be_looked_into_is_one_line(
    copied: Path, refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    """So did a run in a directory without rights to it."""

    def locked(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_file", locked)
    message = "runs/tiny-1/config.toml cannot be used (Permission denied): mend that, or pass another path"
    for line in ("evaluate runs/tiny-1", "generate runs/tiny-1", "train --resume --run-dir runs/tiny-1"):
        refused(line, message)


def test_a_closed_standard_input_is_one_line(
    copied: Path, refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    """`--text - <&-` ended in an AttributeError."""
    monkeypatch.setattr("sys.stdin", None)
    refused(
        "evaluate runs/tiny-1 --text -", "standard input cannot be read (it is closed): pass a text on it, or a file"
    )


def test_a_standard_input_that_cannot_be_read_is_one_line(
    copied: Path, refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    with os.fdopen(os.open("new", os.O_WRONLY | os.O_CREAT), "rb") as stream:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(stream))
        message = "standard input cannot be read (Bad file descriptor): pass a text on it, or a file"
        refused("evaluate runs/tiny-1 --text -", message)


def test_a_value_that_no_configuration_can_hold(place: Path, refused: Callable[..., None]):
    """The run had begun: its config.toml.new was left, and the directory refused from then on."""
    shutil.copytree("text", "c\udce9orp")
    before = files_of(place)
    refused("train tiny.toml --run-dir new --data.source c\udce9orp", "'c\\udce9orp' is not UTF-8")
    refused("train tiny.toml --run-dir new --data.source=c\udce9orp", "'--data.source=c\\udce9orp' is not UTF-8")
    assert files_of(place) == before
    assert not Path("new").exists()


def test_a_run_directory_that_checkpoints_cannot_be_written_to(
    copied: Path, refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    """Its name was found to be no UTF-8 after the first epoch, by Orbax, in hundreds of lines."""
    message = "is not UTF-8, which checkpoints need: rename it, or pass another run directory"
    refused("train tiny.toml --run-dir r\udce9", f"/r\\udce9' {message}")
    shutil.copy("tiny.toml", "c\udce9.toml")
    refused("train c\udce9.toml", f"/runs/c\\udce9-1' {message}")
    shutil.move("runs/tiny-1", "r\udce9")
    for line in ("evaluate r\udce9", "generate r\udce9", "train tiny.toml --resume --run-dir r\udce9"):
        refused(line, f"/r\\udce9' {message}")
    monkeypatch.chdir("r\udce9")
    refused("generate .", f"/r\\udce9' {message}")


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


def test_the_version(run: Callable[..., Done]):
    done = run("--version")
    assert done.status == 0
    assert re.fullmatch(r"mp-lstm \d+\.\d+\.\d+\n", done.out)


def process_of(place: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    environment |= {"XDG_CACHE_HOME": str(place / "cache"), **options.pop("env", {})}
    options = {"capture_output": True, "text": True} | options
    return subprocess.run([sys.executable, *words], env=environment, check=False, **options)


@pytest.mark.parametrize("module", ["mp_lstm", "mp_lstm.cli"])
def test_python_runs_the_module(place: Path, module: str):
    """`python -m mp_lstm.cli` did nothing, and that with status 0."""
    done = process_of(place, "-m", module, "--version")
    assert (done.returncode, done.stdout[:8], done.stderr) == (0, "mp-lstm ", "")
    assert process_of(place, "-m", module, "train", "--layers", "3").returncode == 2


def test_nobody_reads_what_is_printed(place: Path):
    """`mp-lstm plan | head -1` ended in a traceback."""
    read, write = os.pipe()
    os.close(read)
    try:
        words = ["-m", "mp_lstm", "plan", "tiny.toml", "--train.emulate_devices", "2"]
        done = process_of(place, *words, capture_output=False, stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_no_room_for_what_is_printed(place: Path):
    """`mp-lstm generate RUN > /dev/full` ended in a traceback."""
    with open("/dev/full", "w") as full:
        done = process_of(
            place, "-m", "mp_lstm", "--version", capture_output=False, stdout=full, stderr=subprocess.PIPE
        )
    message = "mp-lstm: error: standard output cannot be written (No space left on device): send it elsewhere\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_a_word_that_the_terminal_cannot_show(place: Path):
    """It ended in a UnicodeEncodeError."""
    text = "import sys; from mp_lstm import cli; cli._run = lambda _: print('caf\\xe9'); sys.exit(cli.main())"
    done = process_of(place, "-c", text, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf\\xe9\n", "")


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Done]):
    def broken(*_: Any) -> Config:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "load", broken)
    with pytest.raises(ZeroDivisionError):
        run("plan")


def test_a_system_error_without_a_path_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Done]):
    def broken(*_: Any) -> Config:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(cli, "load", broken)
    with pytest.raises(OSError, match="Bad file descriptor"):
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
    done = process_of(
        place, "-m", "mp_lstm", "plan", "tiny.toml", "--train.emulate_devices", "2", "--pipeline.stages", "3"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "mp-lstm: error: [pipeline] 3 stages for 2 devices: use fewer stages, or emulate more devices with "
        "--train.emulate_devices 3\n"
    )


def test_a_run_that_could_not_write_its_configuration_leaves_the_directory_free(tmp_path: Path) -> None:
    """A disk that was full after config.toml and before vocabulary.txt left what neither began anew nor resumed."""
    (tmp_path / "vocabulary.txt").write_text("<eos>\n")
    assert fresh_directory(tmp_path, "austen") == tmp_path
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds other files: pass another --run-dir"):
        fresh_directory(tmp_path, "austen")


def test_two_new_runs_have_a_directory_each(place: Path):
    """Both found the same one free, and read their texts before they made it."""
    assert [claimed_directory("tiny") for _ in range(2)] == [Path("runs/tiny-1"), Path("runs/tiny-2")]
