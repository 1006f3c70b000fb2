"""The benchmark's arithmetic: what everyone computes, what a table and the guard make of times that are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import bench
import contest
import guard
import ratios
from peers import flax_rnn, matrix_products, ours
from peers.problem import Product, Shape, batch_of, disagreement, initial_weights, operations, products, weight_shapes
from presets import load_contest

SHAPE = Shape(embed=3, hidden=4, layers=2, vocab=11, batch_size=2, time=5)
MXNET = Shape(200, 400, 8, 10_000, 20, 32)


def test_everyone_starts_from_the_same_weights_and_tokens():
    first, again = initial_weights(SHAPE), initial_weights(SHAPE)
    assert {name: w.shape for name, w in first.items()} == weight_shapes(SHAPE)
    assert all((first[name] == again[name]).all() and abs(first[name]).max() <= 0.1 for name in first)
    inputs, targets = batch_of(SHAPE)
    assert inputs.shape == (5, 2)
    np.testing.assert_array_equal(inputs[1:], targets[:-1])


def test_the_products_are_all_of_a_step():
    macs = (3 + 4) * 16 + (4 + 4) * 16 + 4 * 11  # of a row and step: x K, h R, and the decoder
    assert operations(SHAPE) == 3 * 2 * 10 * macs  # F, B and W
    assert 53e9 < operations(MXNET) < 54e9
    assert Product(rows=20, inner=400, columns=1600, number=8, repeats=32) in products(MXNET)


def test_flax_and_ours_agree_after_steps_of_the_programs_that_are_timed():
    mine, theirs = ours.on_devices(SHAPE, jax.devices()[:1]), flax_rnn.make(SHAPE)
    losses = [[peer.step() for _ in range(contest.STEPS)] for peer in (mine, theirs)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    error, change = disagreement(theirs.params(), mine.params(), initial_weights(SHAPE))
    assert error < 1e-5
    assert change < 1e-3


def test_rounded_products_agree_within_what_is_allowed():
    mine, rounded = (ours.on_devices(SHAPE, jax.devices()[:1], products=products) for products in (None, "bfloat16"))
    for peer in (mine, rounded):
        for _ in range(contest.STEPS):
            peer.step()
    error, change = disagreement(rounded.params(), mine.params(), initial_weights(SHAPE))
    assert 0 < error < contest.TOLERANCE
    assert 0 < change < contest.CHANGE_TOLERANCE


def test_weights_go_to_flax_and_back():
    weights = initial_weights(SHAPE)
    back = flax_rnn.from_flax(flax_rnn.to_flax(weights, SHAPE), SHAPE)
    assert disagreement(back, weights, initial_weights(SHAPE, seed=5)) == (0.0, 0.0)


def test_one_wrong_tensor_is_a_disagreement_and_so_is_a_step_not_taken():
    initial, trained = initial_weights(SHAPE), initial_weights(SHAPE)
    for weight in trained.values():
        weight += 1e-5
    wrong = trained | {"head bias": trained["head bias"] * 1.01}
    assert disagreement(wrong, trained, initial)[0] == pytest.approx(0.01, rel=1e-3)
    error, change = disagreement(initial, trained, initial)
    assert error < contest.TOLERANCE  # the parameters alone would not show it
    assert change == pytest.approx(1.0)
    with pytest.raises(ValueError, match="other names or shapes"):
        disagreement({"embed": trained["embed"]}, trained, initial)


def test_each_product_gives_seconds():
    assert 0 < matrix_products.make(SHAPE).step() < 10


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        (MXNET, [5, 6, 7]),
        (Shape(650, 650, 2, 10_000, 20, 35), [1, 2]),
        (Shape(1024, 1024, 4, 10_000, 32, 64), [2, 3, 4]),
    ],
)
def test_splits_that_are_tried_are_those_around_the_even_one(shape: Shape, wanted: list[int]):
    assert contest.splits(shape) == wanted


def test_presets_give_shape_and_what_the_file_fixes():
    shape, plan, unroll = load_contest("mxnet")
    assert shape == MXNET
    assert unroll >= 1
    assert "auto" not in plan.values()


class Recorded:
    """A contender that writes down its turns."""

    def __init__(self, name: str, weights: dict[str, np.ndarray], turns: list[str]):
        self.name, self.weights, self.turns = name, weights, turns

    def step(self) -> dict[str, float]:
        self.turns.append(self.name)
        return {"seconds": 0.1, "cpu": 0.0, "peak": 1.0, "result": 0.0}


def teams(*changes: float) -> tuple[list[Any], list[str]]:
    turns: list[str] = []
    initial = initial_weights(SHAPE)
    names = ["a", "b", "c"][: len(changes)]
    changed = [{name: weight + change for name, weight in initial.items()} for change in changes]
    return [Recorded(name, weights, turns) for name, weights in zip(names, changed, strict=True)], turns


def test_every_round_visits_everyone_in_turn():
    contenders, turns = teams(0.0, 0.0)
    steps, _ = contest.take_turns(contenders, 3)
    assert turns == ["a", "b"] * 3
    assert [len(taken) for taken in steps.values()] == [3, 3]


@pytest.mark.parametrize(
    ("third", "message"),
    [
        (3e-3, "c: after 5 steps a parameter is .* from ours on one core"),
        (1.05e-3, "the change since the start 5.0e-02"),
    ],
)
def test_who_disagrees_after_five_steps_is_not_timed(third: float, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contest, "parameters", lambda team, folder: team.weights)
    contenders, turns = teams(1e-3, 1e-3)
    assert contest.check_agreement(contenders, SHAPE, "")["b"] == (0.0, 0.0)
    assert turns == ["a"] * 5 + ["b"] * 5
    contenders, _ = teams(1e-3, 1e-3, third)
    with pytest.raises(RuntimeError, match=message):
        contest.check_agreement(contenders, SHAPE, "")


def test_rounded_products_may_differ_more():
    """Four layers of 1,024 over 64 steps did, by 1.4% of the change: a contest of twelve minutes was lost."""
    assert contest.tolerances(contest.OURS_ROUNDED) > contest.tolerances(contest.OURS_TWO)
    assert all(contest.tolerances(name) == contest.tolerances(contest.TORCH_ROUNDED) for name in ratios.ALL_ROUNDED)


def test_what_was_timed_before_a_failure_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """The contests before it were lost with it."""
    held: list[Any] = []

    def hold(*_: Any, **__: Any) -> dict[str, Any]:
        if held:
            raise RuntimeError("flax ended with status 1")
        held.append(None)
        return {"contenders": {}}

    monkeypatch.setattr(bench.contest, "hold", hold)
    monkeypatch.setattr(bench, "ratios", lambda name, result: {})
    monkeypatch.setattr(bench, "report", lambda name, result: name)
    file = tmp_path / "found.json"
    assert bench.main(["--peers", "none", "--presets", "mxnet,medium,large", "--json", str(file)]) == 1
    assert "bench: medium: flax ended with status 1" in capsys.readouterr().err
    assert list(json.loads(file.read_text())["results"]) == ["mxnet"]


def test_a_contender_that_fails_to_start_is_named():
    with (
        pytest.raises(RuntimeError, match="nobody ended with status 1"),
        contest.started(contest.Contender("nobody", "no_such_module"), SHAPE),
    ):
        pass


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--peers", "torch,keras"], "--peers: keras is unknown, of torch, flax are wanted"),
        (
            ["--peers", "flax", "--presets", "austen"],
            "--presets: austen is unknown, of mxnet, medium, large are wanted",
        ),
        (["--rounds", "0"], "--rounds is 0, at least 1 is wanted"),
        (["--options", "6+4"], "--options is no JSON"),
        (["--peers", "flax", "--options", "[6, 4]"], "--options: names with their values are wanted"),
        (["--options", '{"chunk": 8}'], "--options are for a contest: pass --peers too, or leave them out"),
        (["--json", "none/here.json"], "--json none/here.json cannot be written"),  # after hours of timing
    ],
)
def test_the_command_line_says_what_is_wrong(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        bench.main(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def entry(*seconds: float) -> dict[str, Any]:
    return {
        "about": "",
        "seconds": seconds,
        "cpu": seconds,
        "peak": 5e8,
        "disagreement": 1e-7,
        "change_disagreement": 2e-5,
    }


def made_up(torch: float, two_devices: float) -> dict[str, Any]:
    times = {ratios.OURS: 1.0, ratios.TORCH: torch, ratios.OURS_TWO: two_devices, ratios.FLAX: 2.0}
    contenders = {name: entry(time, 2 * time, 3 * time) for name, time in times.items()}
    result = {"shape": "a model", "rounds": 3, "others": 0.0, "tokens": 100, "absent": [], "contenders": contenders}
    result["limit"] = {"seconds": [0.8, 1.6, 2.4], "operations": 16e9}
    return result | {"ratios": ratios.ratios("mxnet", result)}


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {name: entry["verdict"] for name, entry in result["ratios"].items()}


def test_floors_of_two_devices_count_only_where_one_core_meets_its_own():
    assert verdicts(made_up(torch=1.25, two_devices=0.59)) == {
        "one core / PyTorch 1 thread": "met",
        "one core / flax": "met",
        "one core / its matrix products": "met",
        "two devices / our one core": "met",
    }
    assert verdicts(made_up(torch=1.2, two_devices=0.59))["one core / PyTorch 1 thread"] == "not met"
    assert verdicts(made_up(torch=1.2, two_devices=0.59))["two devices / our one core"] == "not counted"
    assert verdicts(made_up(torch=1.25, two_devices=0.61))["two devices / our one core"] == "not met"


def test_floors_of_two_devices_do_not_count_without_the_peers_on_one_core():
    alone = made_up(torch=1.25, two_devices=0.59)
    del alone["contenders"][ratios.FLAX]
    assert ratios.ratios("mxnet", alone)["two devices / our one core"]["verdict"] == "not counted"


def test_a_ratio_is_the_median_of_the_rounds_and_not_the_ratio_of_medians():
    assert ratios.paired([1.0, 2.0, 9.0], [2.0, 8.0, 3.0]) == 0.5  # the medians give 2/3


def test_a_report_shows_times_tokens_shares_and_who_is_missing():
    text = ratios.report("mxnet", made_up(torch=1.25, two_devices=0.5) | {"absent": ["torch"]})
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "ours, one core 1000.0 2000.0 50 1.00 1.00 500 1e-07 2e-05" in lines
    assert "one core / PyTorch 1 thread 0.800 0.80 met" in lines
    assert "16.0 GFLOP of its matrix products alone take one core 1600.0 ms (10 GFLOP/s): ours reaches 80%" in text
    assert "torch is not installed" in text


def written(path: Path, ratio: float) -> str:
    result = {"ratios": {"one core / flax": {"ratio": ratio}, "new": {"ratio": 9.0}}}
    path.write_text(json.dumps({"results": {"mxnet": result, "austen": [{"name": "one device"}]}}))
    return str(path)


def test_the_guard_fails_past_ten_percent(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stored = tmp_path / "ratios.json"
    stored.write_text(json.dumps({"mxnet": {"one core / flax": 0.5}, "large": {"one core / flax": 0.4}}))
    options = ["--stored", str(stored)]
    assert guard.main([written(tmp_path / "a.json", 0.549), *options]) == 0
    assert guard.main([written(tmp_path / "b.json", 0.551), *options]) == 1
    assert "mxnet: one core / flax: 0.551, stored is 0.500 (+10%)" in capsys.readouterr().out
    assert guard.main([written(tmp_path / "c.json", 0.44444), *options, "--write"]) == 0
    assert json.loads(stored.read_text()) == {
        "mxnet": {"one core / flax": 0.4444, "new": 9.0},
        "large": {"one core / flax": 0.4},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"results": {}}', "no ratio in common"),
        ("{", "cannot read"),
        ("[]", "cannot read"),
        ('{"results": []}', "cannot read"),
        ('{"results": {"mxnet": {"ratios": {"flax": {"ratio": "x"}}}}}', "cannot read"),
    ],
)
def test_the_guard_refuses_what_it_cannot_compare(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        guard.main([str(path), "--stored", str(tmp_path / "none.json")])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("stored", ["[1]", '{"mxnet": {"new": 0}}', '{"mxnet": {"new": "a"}}'])
def test_the_guard_refuses_stored_ratios_that_are_none(stored: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Each ended in a traceback, which left with the status of a ratio that is worse."""
    (tmp_path / "ratios.json").write_text(stored)
    with pytest.raises(SystemExit) as ended:
        guard.main([written(tmp_path / "run.json", 0.5), "--stored", str(tmp_path / "ratios.json")])
    assert ended.value.code == 2
    assert "cannot read the ratios" in capsys.readouterr().err


def test_the_guard_says_where_it_cannot_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        guard.main([written(tmp_path / "run.json", 0.5), "--write", "--stored", str(tmp_path / "none" / "a.json")])
    assert ended.value.code == 2
    assert "a.json cannot be written (No such file or directory)" in capsys.readouterr().err
