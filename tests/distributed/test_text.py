"""Only the processes of the first and of the last stage need the text."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mp_lstm import cli, launch
from mp_lstm.launcher import free_port
from several import command, environment, losses, write_place


def started(folders: list[Path], words: str) -> list[tuple[int, str]]:
    """Status and words of processes that were started by hand, each in a folder of its own."""
    line = f"{words} --train.emulate_devices {len(folders)} --coordinator 127.0.0.1:{free_port()}"
    runs = [
        subprocess.Popen(
            command(*line.split(), "--processes", str(len(folders)), "--process", str(i)),
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, folder in enumerate(folders)
    ]
    said = [run.communicate(timeout=200)[0] for run in runs]
    return [(run.returncode, words) for run, words in zip(runs, said, strict=True)]


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """A folder with the text for each of three processes."""
    made = [tmp_path / name for name in ("first", "middle", "last")]
    for folder in made:
        folder.mkdir()
        write_place(folder)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sentences", "contiguous --data.length 8"])
def test_a_process_of_the_middle_has_no_text(folders: list[Path], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process read it: it had to be copied to all machines."""
    shutil.rmtree(folders[1] / "text")
    words = f"train tiny.toml --train.max_steps 5 --pipeline.stages 3 --data.mode {mode} --run-dir"
    for status, said in started(folders, f"{words} {folders[0] / 'run'}"):
        assert status == 0, said
    monkeypatch.chdir(folders[0])
    monkeypatch.setattr(launch, "prepare", lambda *_: None)
    assert cli.main([*words.split(), "one"]) == 0
    assert losses(folders[0] / "run") == pytest.approx(losses(Path("one")), rel=1e-6)


@pytest.mark.slow
def test_a_text_that_the_last_process_lacks_or_has_otherwise_ends_all(folders: list[Path]) -> None:
    words = f"train tiny.toml --train.max_steps 5 --pipeline.stages 3 --run-dir {folders[0] / 'run'}"
    text = folders[2] / "text" / "train.txt"
    text.write_text(text.read_text().replace("a b", "b a"))  # the same words, as often
    for status, said in started(folders, words):
        assert status == 2
        assert "text is another text for process 2 than for process 0: give both the same" in said
    shutil.rmtree(folders[2] / "text")
    for status, said in started(folders, words):
        assert status == 2
        assert "[data.source]" in said
    assert not (folders[0] / "run").exists()
