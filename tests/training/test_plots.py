from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mp_lstm.errors import InputError
from mp_lstm.training.plots import plot_losses

EVENTS = [
    {"event": "start", "vocab": 7},
    {"event": "train", "step": 10, "loss": 2.0},
    {"event": "train", "step": 20, "loss": None},  # not finite
    {"event": "train", "step": 30, "loss": 1.5},
    {"event": "valid", "step": 30, "loss": 1.8},
    {"event": "test", "step": 30, "loss": 1.7},
]


def test_losses_are_drawn_by_step(tmp_path: Path, monkeypatch) -> None:
    from matplotlib.axes import Axes

    drawn, plot = {}, Axes.plot

    def remember(self, x, y, **style):
        drawn[style["label"]] = (x, y)
        return plot(self, x, y, **style)

    monkeypatch.setattr(Axes, "plot", remember)
    plot_losses(EVENTS, tmp_path / "loss.png")
    assert drawn == {"train": ((10, 30), (2.0, 1.5)), "valid": ((30,), (1.8,)), "test": ((30,), (1.7,))}
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_losses_is_an_empty_picture(tmp_path: Path) -> None:
    plot_losses(EVENTS[:1], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").exists()


def test_without_matplotlib_the_message_names_the_extra(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"^loss.png is not drawn: .*pip install 'mp-lstm\[plot\]'"):
        plot_losses(EVENTS, tmp_path / "loss.png")


def test_drawing_leaves_pyplot_alone(tmp_path: Path, monkeypatch) -> None:
    """Pyplot would choose a display and keep the figure for ever."""
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    plot_losses(EVENTS, tmp_path / "loss.png")
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("loss.xyz", "loss.xyz cannot be drawn (Format 'xyz' is not supported"),
        ("none/loss.png", "none/loss.png cannot be written (No such file or directory): pass another file name"),
    ],
)
def test_a_file_that_cannot_be_written(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        plot_losses(EVENTS, tmp_path / name)
    assert message in str(refused.value)
