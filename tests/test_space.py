"""The search space: conditions, choices, steps, derived values; what is proposed can always be trained."""

import json
from pathlib import Path
from typing import Any

import optuna
import pytest

from rigsweep.sweeps import files
from rigsweep.sweeps.files import WrongInput
from rigsweep.sweeps.space import Space, flatten
from rigsweep.sweeps.study import Study
from rigsweep.sweeps.sweep import Sweep, check

from .simulator import simulate

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

RICH = """
trainable: gpt
base:
  data: {sequence_length: 128}
  model: {layers: 4, width: 128, head_width: 32}
  optimizer: {betas: [0.9, 0.95]}
  schedule: {warmup: 2%}
  batch: {examples: 4096}
  budget: {examples: 400k}
search:
  schedule.cooldown: {low: 10%, high: 50%, when: {schedule.decay: linear}}
  schedule.decay: {choices: [cosine, linear], when: {model.layers: [4, 6, 8]}}
  optimizer.learning_rate: {low: 1e-4, high: 1e-2, log: true}
  optimizer.betas: {choices: [[0.9, 0.95], [0.9, 0.999]]}
  optimizer.clip_norm: {choices: [null, 1.0]}
  model.layers: {low: 2, high: 8, step: 2}
  model.width: = 32 * model.layers
  model.feedforward: = max(2, 512 / model.width)
  model.tied: {choices: [true, false]}
  batch.examples: {low: 1024, high: 8192, step: 1024}
  evaluation.examples: {low: 1k, high: 64k, log: true}
  sampling.temperature: {low: 0, high: 1, step: 0.25}
searcher: random
trials: 200
"""


def sweep_of(text: str = RICH, *overrides: str) -> Sweep:
    document = files.parse(text, "made.yaml")
    files.override(document, "base.sampling={temperature: 0.5}", *overrides)
    return check(document, "made")


def searching(search: str, base: str = "", **settings: str) -> Sweep:
    more = "\n".join(f"{key}: {value}" for key, value in settings.items())
    text = f"trainable: gpt\nbase:\n  budget: {{examples: 400k}}\n{base}\nsearch:\n{search}\n{more}\n"
    return check(files.parse(text, "made.yaml"), "made")


def proposals(sweep: Sweep, amount: int) -> list[dict[str, Any]]:
    study = Study(sweep)
    return [study.propose(group) for group in range(amount)]


def dimension(space: Space, key: str) -> Any:
    return next(d for d in space.dimensions if d.key == key)


def test_trial_0_is_the_base() -> None:
    sweep = sweep_of()
    first = proposals(sweep, 1)[0]
    assert first == {
        "schedule.decay": "cosine",
        "optimizer.learning_rate": 1e-3,
        "optimizer.betas": [0.9, 0.95],
        "optimizer.clip_norm": 1.0,
        "model.layers": 4,
        "model.tied": True,
        "batch.examples": 4096,
        "evaluation.examples": 16384,
        "sampling.temperature": 0.5,
    }
    assert sweep.training(first) == sweep.training({})


@pytest.mark.parametrize("searcher", ["random", "tpe", "qmc"])
def test_every_proposal_lies_in_the_space_and_can_be_trained(searcher: str, tmp_path: Path) -> None:
    sweep = sweep_of(RICH, f"searcher={searcher}", "trials=60")
    study = Study(sweep)
    seen: dict[str, set[str]] = {}
    for group in range(60):
        parameters = study.propose(group)
        assert json.loads(json.dumps(parameters)) == parameters, "what the history gives back is the same"
        training: Any = sweep.training(parameters)
        values = flatten(training.model_dump(mode="json"))
        for key, value in parameters.items():
            assert dimension(sweep.space, key).holds(value)
            assert values[key] == value
            seen.setdefault(key, set()).add(str(value))
        assert training.model.width == 32 * training.model.layers
        assert training.model.feedforward == max(2, 512 / training.model.width)
        assert ("schedule.decay" in parameters) == (training.model.layers in (4, 6, 8))
        assert ("schedule.cooldown" in parameters) == (training.schedule.decay == "linear")
        trial = study.study.get_trials(deepcopy=False)[group]
        study.study._storage.set_trial_state_values(
            trial._trial_id, optuna.trial.TrialState.COMPLETE, [training.optimizer.learning_rate]
        )
    assert seen["model.layers"] == {"2", "4", "6", "8"}
    assert seen["optimizer.betas"] == {"[0.9, 0.95]", "[0.9, 0.999]"}
    assert seen["optimizer.clip_norm"] == {"None", "1.0"}
    assert seen["sampling.temperature"] == {"0.0", "0.25", "0.5", "0.75", "1.0"}
    assert seen["schedule.decay"] == {"cosine", "linear"}
    assert "schedule.cooldown" in seen


def test_a_condition_reads_the_base_where_its_key_is_not_stated() -> None:
    # The base says nothing of `decay`, whose default is cosine.
    sweep = searching("  optimizer.weight_decay: {low: 0, high: 1, when: {schedule.decay: cosine}}")
    assert all("optimizer.weight_decay" in parameters for parameters in proposals(sweep, 3))


def test_a_dimension_that_does_not_exist_leaves_the_bases_value() -> None:
    sweep = searching(
        "  schedule.decay: {choices: [cosine, linear]}\n"
        "  schedule.cooldown: {low: 10%, high: 50%, when: {schedule.decay: linear}}"
    )
    for parameters in proposals(sweep, 10):
        if parameters["schedule.decay"] == "cosine":
            assert sweep.training(parameters).schedule.cooldown == 0.4


def test_derived_values_are_computed_in_the_order_in_which_they_read_each_other() -> None:
    sweep = searching(
        "  model.feedforward: = model.width / 32\n  model.width: = model.head_width * model.layers\n"
        "  model.layers: {choices: [2, 4]}",
        "  model: {layers: 2, head_width: = 8 * 4}",
    )
    training: Any = sweep.training({"model.layers": 4})
    assert (training.model.head_width, training.model.width, training.model.feedforward) == (32, 128, 4.0)


def test_a_text_that_begins_with_an_equals_sign_is_a_text_where_no_number_is_expected() -> None:
    sweep = searching("  model.layers: {choices: [12]}", "  sampling: {prompt: = 1}")
    training: Any = sweep.training({})
    assert training.sampling.prompt == "= 1"


def test_a_searched_seed_is_the_seed_and_repeats_count_on_from_it() -> None:
    sweep = searching("  seed: {choices: [0, 10]}", repeats="2")
    assert sweep.training({"seed": 10}).seed == 10
    assert sweep.training({"seed": 10}, repeat=1).seed == 11


@pytest.mark.parametrize(
    ("search", "base", "message"),
    [
        # Only 96, inside the range, does not divide 256.
        (
            "  model.head_width: {low: 32, high: 128, step: 32}",
            "  model: {width: 256, head_width: 32}",
            "made.yaml:6: search.model.head_width: width 256 is not divisible by head_width 96",
        ),
        (
            "  model.width: {low: 64, high: 256, step: 64}\n  model.head_width: {choices: [32, 64, 128]}",
            "  model: {width: 64, head_width: 32}",
            "made.yaml:7: search.model.head_width: width 64 is not divisible by head_width 128",
        ),
        (
            "  schedule.cooldown: {low: 10%, high: 95%, when: {schedule.decay: linear}}\n"
            "  schedule.decay: {choices: [cosine, linear]}\n  schedule.warmup: {low: 0%, high: 10%}",
            "",
            "warmup 10% and cooldown 95% are together over 100%",
        ),
        # The base says nothing of `decay`, whose default is cosine.
        (
            "  model.width: {choices: [96, 100], when: {schedule.decay: cosine}}",
            "  model: {width: 96, head_width: 32}",
            "made.yaml:6: search.model.width: width 100 is not divisible by head_width 32",
        ),
        (
            "  model.width: = 12 * model.layers\n  model.layers: {low: 8, high: 12}",
            "  model: {head_width: 24, layers: 8}",
            "made.yaml:6: search.model.width: width 108 is not divisible by head_width 24",
        ),
    ],
)
def test_a_combination_that_cannot_be_trained_is_found_before_it_is_proposed(
    search: str, base: str, message: str
) -> None:
    with pytest.raises(WrongInput) as error:
        searching(search, base)
    assert message in str(error.value)


def test_a_derived_value_that_fits_every_combination_is_accepted() -> None:
    searching(
        "  model.width: = 24 * model.layers\n  model.layers: {low: 8, high: 12}", "  model: {head_width: 8, layers: 8}"
    )


def test_a_combination_is_judged_only_where_its_conditions_hold() -> None:
    # A cool-down of 95% with a warm-up of 10% would be wrong, but the cosine has none.
    searching(
        "  schedule.cooldown: {low: 10%, high: 95%, when: {schedule.decay: linear}}\n"
        "  schedule.decay: {choices: [cosine, linear], when: {model.layers: 2}}\n"
        "  schedule.warmup: {low: 0%, high: 5%}\n  model.layers: {choices: [2, 12]}"
    )


def test_many_dimensions_are_checked_by_a_spread_of_their_combinations() -> None:
    keys = ["schedule.final", "optimizer.weight_decay", "model.dropout", "model.rotary_base", "sampling.temperature"]
    keys += ["optimizer.learning_rate", "evaluation.every", "model.feedforward", "ema"]
    base = (
        "  model: {width: 64, head_width: 32, dropout: 0.5, rotary_base: 0.5}\n  ema: 0.5\n  evaluation: {every: 50%}\n"
    )
    base += "  optimizer: {learning_rate: 0.5, weight_decay: 0.5}\n  sampling: {temperature: 0.5}\n"
    base += "  schedule: {final: 50%}"
    search = "  model.width: {choices: [64, 96, 128]}\n  model.head_width: {choices: [32, 64]}\n"
    search += "\n".join(f"  {key}: {{low: 0.3, high: 0.8, step: 0.1}}" for key in keys)
    search = search.replace(
        "  model.feedforward: {low: 0.3, high: 0.8, step: 0.1}", "  model.tied: {choices: [true, false]}"
    )
    with pytest.raises(WrongInput, match="width 96 is not divisible by head_width 64"):
        searching(search, base)


@pytest.mark.parametrize(
    ("search", "base", "message"),
    [
        ("  model.layers: {low: 2, high: 4}\n", "  model: {layers: = 2}", "is derived in base (= 2) and searched"),
        ("  model.width: = 64 * model.layers\n", "  model: 5", "base.model: allowed: a section with layers"),
        ("  model.width: {choices: [768]}\n", "  model: null", "base.model: allowed: a section with layers"),
        ("  model.layers: = model.layers\n", "", "depend on each other in a circle: model.layers"),
        (
            "  schedule.warmup: {low: 0, high: 10%, when: {schedule.cooldown: 1}}\n"
            "  schedule.cooldown: {low: 0, high: 50%, when: {schedule.warmup: 1}}\n",
            "",
            "conditions depend on each other in a circle",
        ),
        (
            "  model.tied: {choices: [true], when: {model.layers: 13}}\n",
            "",
            "is never so: model.layers is not searched",
        ),
        (
            "  model.tied: {choices: [true], when: {model.layers: 13}}\n  model.layers: {choices: [12, 24]}\n",
            "",
            "search.model.tied.when.model.layers: allowed: one of 12, 24, found 13",
        ),
        (
            "  model.tied: {choices: [true], when: {model.width: 64}}\n  model.width: = 64 * model.layers\n",
            "",
            "model.width is derived; a condition reads searched keys",
        ),
    ],
)
def test_a_space_that_contradicts_itself_is_refused(search: str, base: str, message: str) -> None:
    with pytest.raises(WrongInput) as error:
        searching(search, base)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_corners_of_a_section_hold_its_smallest_and_its_largest_value() -> None:
    space = sweep_of().space
    layers = {corner["model.layers"] for corner in space.corners_that_change("model")}
    assert layers == {2, 4, 8}
    batches = {corner["batch.examples"] for corner in space.corners_that_change("batch", "model", "data")}
    assert {1024, 8192} <= batches


def test_a_conditional_sweep_runs_from_end_to_end(tmp_path: Path) -> None:
    text = RICH.replace("trainable: gpt", "trainable: surface").replace("  data: {sequence_length: 128}\n", "")
    for line in ("model.layers", "model.feedforward", "model.tied", "sampling.temperature", "model.width"):
        text = "\n".join(row for row in text.splitlines() if not row.strip().startswith(f"{line}:"))
    text = text.replace("{layers: 4, width: 128, head_width: 32}", "{width: 128}")
    text = text.replace(", when: {model.layers: [4, 6, 8]}", "").replace("searcher: random", "searcher: tpe")
    sweep = check(files.parse(text.replace("trials: 200", "trials: 30"), "made.yaml"), "made")
    record = simulate(sweep, tmp_path / "history.jsonl", slots=2)
    assert len(record.trials) == 30
    assert {("schedule.cooldown" in trial.parameters) for trial in record.trials.values()} == {True, False}
