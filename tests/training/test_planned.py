"""Planning the recipes that come with the project, without their text or their devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from mp_lstm.training.build import make_model
from mp_lstm.training.config import load
from mp_lstm.training.planned import plan_for

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
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_recipe_is_of_its_size_and_can_be_planned(name: str) -> None:
    config = load(CONFIGS / f"{name}.toml")
    model = make_model(config, 10_000)
    plan = plan_for(config, model, [config.data.length], ["cpu:0", "cpu:1"])
    assert sum(row.parameters for row in plan.rows) == PARAMETERS[name]
    assert len(plan.stages) == 2
