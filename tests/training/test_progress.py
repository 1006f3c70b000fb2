from __future__ import annotations

import io

from mp_lstm.training.progress import Report, clock, progress

REPORT = Report(step=10, epoch=2, loss=3.912023, tokens_per_second=2345.6, seconds_left=75)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_a_line_a_report_and_no_control_characters() -> None:
    stream = io.StringIO()
    with progress(200, stream=stream) as shown:
        shown.step(9)
        shown.report(REPORT)
        shown.say("a line [of] text")
    assert stream.getvalue() == (
        "epoch 2  step 10/200  loss 3.9120  perplexity 50.0  2,346 tokens/s  1:15 left\na line [of] text\n"
    )


def test_a_terminal_gets_a_bar_with_epoch_loss_perplexity_speed_and_time_left(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress(200, done=4, stream=stream) as shown:
        shown.report(REPORT)
        shown.step(11)
        shown.say("a line [of] text")
    text = stream.getvalue()
    for part in ("epoch 2", "11/200", "loss 3.9120", "perplexity 50.0", "2,346 tokens/s", "1:15 left", "[of] text"):
        assert part in text, part


def test_time_left_is_left_out_until_it_is_known() -> None:
    stream = io.StringIO()
    with progress(200, stream=stream) as shown:
        shown.report(REPORT._replace(seconds_left=None))
    assert stream.getvalue().endswith("tokens/s\n")


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 3599, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]
