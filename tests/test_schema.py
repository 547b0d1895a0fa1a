"""The JSON Schema: valid, takes the ready sweeps as any YAML reader reads them, underlines mistakes."""

import copy
import json
from typing import Any

import pytest
import yaml

from rigsweep.sweeps.schema import sweep_schema
from rigsweep.sweeps.sweep import READY, find
from rigsweep.sweeps.validation import all_keys
from rigsweep.trainables import registry

jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def validator() -> Any:
    return jsonschema.Draft202012Validator(sweep_schema())


@pytest.fixture
def quickstart() -> dict[str, Any]:
    return yaml.safe_load(find("quickstart").read_text(encoding="utf-8"))


def test_it_is_a_valid_schema_and_plain_json() -> None:
    schema = sweep_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize("name", sorted(file.stem for file in READY.glob("*.yaml")))
def test_it_takes_every_ready_sweep(validator: Any, name: str) -> None:
    validator.validate(yaml.safe_load(find(name).read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("base", "model", "widht"), 5),
        (("base", "modle"), {}),
        (("serch",), {}),
        (("search", "model.widht"), {"choices": [1]}),
        (("search", "model.width", "choises"), [1]),
        (("search", "model.width", "choices"), []),
        (("trainable",), "gtp"),
        (("searcher",), "tpee"),
        (("early_stopping", "rule"), "ahsa"),
        (("base", "model", "layers"), "four"),
        (("base", "model", "layers"), [4]),
        (("base", "schedule", "decay"), "cosin"),
        (("base", "budget"), 5),
    ],
)
def test_a_mistake_is_underlined(validator: Any, quickstart: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    assert validator.is_valid(quickstart)
    changed = copy.deepcopy(quickstart)
    section = changed
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    assert not validator.is_valid(changed)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("base", "budget", "examples"), "1.5M"),
        (("base", "budget"), {"flops": "2e15"}),
        (("base", "optimizer", "clip_norm"), None),
        (("base", "model", "layers"), "= model.width / 24"),
        (("search", "model.layers"), "= model.width / 24"),
        (("search", "model.layers"), {"low": 2, "high": 8, "step": 2, "when": {"model.tied": True}}),
        (("search", "optimizer.betas"), {"choices": [[0.9, 0.95], [0.9, 0.999]]}),
        (("limits",), {"wall_time": "8h"}),
        (("hang",), "10m"),
    ],
)
def test_what_a_file_may_say_is_taken(
    validator: Any, quickstart: dict[str, Any], keys: tuple[str, ...], value: Any
) -> None:
    section = quickstart
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    validator.validate(quickstart)


def test_a_sweep_from_a_run_may_change_how_it_samples_and_is_scored(validator: Any) -> None:
    sweep = {
        "from": "digits/3",
        "base": {"quality": {"samples": 500}},
        "search": {"sampling.steps": {"choices": [5, 10]}},
    }
    validator.validate(sweep)
    assert not validator.is_valid(sweep | {"base": {"model": {"base": 32}}})
    assert not validator.is_valid(sweep | {"search": {"optimizer.learning_rate": {"choices": [1e-3]}}})
    assert not validator.is_valid({"search": sweep["search"]}), "neither a run nor a training"


def test_every_trainable_has_its_own_keys(validator: Any) -> None:
    for name in registry.names():
        keys = all_keys(registry.settings_class(name))
        searched = {key: {"choices": [1]} for key in keys}
        validator.validate({"trainable": name, "base": {"budget": {"examples": 1000}}, "search": searched})
    assert not validator.is_valid({"trainable": "surface", "base": {"budget": {"examples": 1}, "data": {}}})
