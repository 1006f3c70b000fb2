"""Planning the recipes that come with the project, without their text or their devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from mp_lstm.errors import InputError
from mp_lstm.planning import Calibration, DeviceRates, Plan, predicted_memory
from mp_lstm.training.build import make_model, read_corpus
from mp_lstm.training.config import load
from mp_lstm.training.planned import make_planned, plan_for, prediction_lines

CONFIGS = Path(__file__).parents[2] / "configs"

# Parameters, by hand: V = 10,000; LSTM 4H(D + H + 1); decoder V(H + 1), or V where it is tied.
PARAMETERS = {
    "zaremba_small": 4_651_600,
    "zaremba_medium": 19_775_200,
    "zaremba_large": 66_022_000,
    "wordlm_tied_650": 13_275_200,
    "awd_lstm": 24_210_800,
    "wikitext2_small": 2_651_600,
    "gnmt_8": 14_262_800,
    "austen_tied_400": 6_573_200,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_recipe_is_of_its_size_and_can_be_planned(name: str) -> None:
    config = load(CONFIGS / f"{name}.toml")
    model = make_model(config, 10_000)
    plan = plan_for(config, model, [config.data.length], ["cpu:0", "cpu:1"])
    assert sum(row.parameters for row in plan.rows) == PARAMETERS[name]
    assert len(plan.stages) == 2


def test_as_much_is_computed_again_as_it_takes_to_fit() -> None:
    words = ("--pipeline.stages", "1", "--pipeline.schedule", "serial", "--pipeline.remat")
    model = make_model(load(overrides=[*words, "auto"]), 10_000)

    def planned(remat: str, memory: int | None) -> Plan:
        costs = Calibration({"gpu:0": DeviceRates(1e12, 1e10, memory)}).costs(model)
        return plan_for(load(overrides=[*words, remat]), model, [64], ["gpu:0"], costs=costs)

    unlimited = Calibration({"gpu:0": DeviceRates(1e12, 1e10)}).costs(model)
    kept, lean = (predicted_memory(planned(remat, None), model, unlimited)[0] for remat in ("none", "head"))
    assert [planned("auto", memory).remat for memory in (kept, lean, lean - 1)] == ["none", "head", "layer"]


MESHES = [
    (("--pipeline.devices_per_stage", "2"), (2, 1)),
    (("--pipeline.model_parallel", "2"), (1, 2)),
    (("--pipeline.data_parallel", "2", "--pipeline.model_parallel", "2", "--pipeline.devices_per_stage", "4"), (2, 2)),
]


@pytest.mark.parametrize(("words", "shape"), MESHES)
def test_stages_on_groups_of_devices(words: tuple[str, ...], shape: tuple[int, int]) -> None:
    """A device too few for another group stays unused."""
    config = load(overrides=words)
    plan = plan_for(config, make_model(config, 100), [16], [f"cpu:{i}" for i in range(9)])
    assert {(group.data, group.model) for group in plan.devices} == {shape}
    assert plan.devices[0].devices == tuple(f"cpu:{i}" for i in range(shape[0] * shape[1]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--pipeline.data_parallel 2 --pipeline.stages 2",
            r"\[pipeline\] 2 stages of 2 devices for 3 devices: use fewer stages, .* --train.emulate_devices 4",
        ),
        ("--pipeline.devices_per_stage 3 --pipeline.model_parallel 2", r"\[pipeline\] devices_per_stage is 3, which"),
        ("--pipeline.model_parallel 3", r"\[pipeline\] embed: model_parallel is 3, .*: make it 99 or 102 \(data.vocab"),
    ],
)
def test_groups_that_cannot_be(words: str, message: str) -> None:
    config = load(overrides=words.split())
    with pytest.raises(InputError, match=message):
        plan_for(config, make_model(config, 100), [16], ["cpu:0", "cpu:1", "cpu:2"])


def test_the_label_of_predictions_says_that_they_are_divided() -> None:
    config = load(overrides=["--data.buckets", "300", "--pipeline.data_parallel", "2"])
    planned = make_planned(config, read_corpus(config), ["cpu:0", "cpu:1"])
    assert "divided among 2 x 1 devices a stage" in prediction_lines(planned, {300: 1})
