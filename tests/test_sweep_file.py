"""What a sweep file may say: every mistake gets one line with its place; what is resolved reads back."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rigsweep.sweeps import files
from rigsweep.sweeps.files import WrongInput
from rigsweep.sweeps.searchers import SEARCHERS
from rigsweep.sweeps.sweep import Sweep, changed, check, find, load
from rigsweep.trainables import registry

GOOD = """\
trainable: gpt
base:
  data: {sequence_length: 128}
  model: {layers: 4, width: 96, head_width: 32}
  optimizer: {learning_rate: 1e-3, betas: [0.9, 0.95]}
  schedule: {warmup: 2%}
  batch: {examples: 4096}
  budget: {examples: 400k}
search:
  optimizer.learning_rate: {low: 1e-4, high: 1e-2, log: true}
"""
SEARCHED = "  optimizer.learning_rate: {low: 1e-4, high: 1e-2, log: true}"


def sweep_of(text: str, *overrides: str) -> Sweep:
    document = files.parse(text, "made.yaml")
    files.override(document, *overrides)
    return check(document, "made")


def refusal_of(text: str, *overrides: str) -> str:
    with pytest.raises(WrongInput) as error:
        sweep_of(text, *overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def pairs(text: str) -> list[tuple[str, ...]]:
    """Lines by twos, the second indented."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return list(zip(lines[::2], lines[1::2], strict=True))


def instead(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


MISTAKES = r"""
layers: 4 -> layer: 4
    4: base.model.layer: no such key; did you mean layers?
layers: 4 -> foo: 4
    4: base.model.foo: no such key; allowed: layers, width, head_width, feedforward,
layers: 4 -> layers: 4, layers: 5
    4: base.model.layers: is given twice (first in line 4)
search: -> serch: {}\nsearch:
    9: serch: no such key; did you mean search?
budget: {examples: 400k} -> bugdet: {examples: 400k}
    8: base.bugdet: no such key; did you mean budget?
{examples: 400k} -> {exmples: 400k}
    8: base.budget.exmples: no such key; did you mean examples?
budget: {examples: 400k} -> # no budget
    2: base.budget: is missing: a section with examples, flops, tokens
layers: 4 -> layers: four
    4: base.model.layers: allowed: a whole number, found four
layers: 4 -> layers: 4.5
    4: base.model.layers: allowed: a whole number, found 4.5
layers: 4 -> layers: true
    4: base.model.layers: allowed: a whole number, found true
layers: 4 -> layers:
    4: base.model.layers: allowed: a whole number, found nothing
layers: 4 -> layers: null
    4: base.model.layers: allowed: a whole number, found null
layers: 4 -> layers: [4]
    4: base.model.layers: allowed: a whole number, found a list
layers: 4 -> layers: 0
    4: base.model.layers: allowed: more than 0, found 0
layers: 4 -> layers: "4k"
    4: base.model.layers: allowed: a whole number, found 4k; write it without quotes
[0.9, 0.95] -> [0.9]
    5: base.optimizer.betas: allowed: a list of at least 2 values, found 1
[0.9, 0.95] -> [0.9, 0.95, 1]
    5: base.optimizer.betas: allowed: a list of at most 2 values, found 3
[0.9, 0.95] -> 0.9
    5: base.optimizer.betas: allowed: a list, found 0.9
[0.9, 0.95] -> [0.9, x]
    5: base.optimizer.betas.1: allowed: a number, found x
search: -> question: 5\nsearch:
    9: question: allowed: text (in quotes), found 5
{examples: 400k} -> 5
    8: base.budget: allowed: a section with examples, flops, tokens_per_parameter, found 5
search:\n  optimizer.learning_rate: {low: 1e-4, high: 1e-2, log: true} -> search: [a]
    9: search: allowed: a section, found a list
{examples: 400k} -> {examples: 400k, flops: 2e15}
    8: base.budget: give exactly one of examples, flops,
layers: 4 -> layers: 40x
    4: base.model.layers: allowed: a whole number, found 40x; units are k M B, %, and
search: -> hang: 8 hours\nsearch:
    9: hang: allowed: a number, found 8 hours; units are k M B, %, and s m h d
examples: 400k -> examples: 10m
    8: base.budget.examples: is not a time, found 10m (m is minutes; a million is M)
search: -> trials: 2h\nsearch:
    9: trials: is not a time, found 2h (h is hours)
search: -> trials: 2GB\nsearch:
    9: trials: is not a size in bytes, found 2GB
warmup: 2% -> warmup: 110%
    6: base.schedule.warmup: allowed: at most 100%, found 110%
warmup: 2% -> warmup: 1.1
    6: base.schedule.warmup: allowed: at most 1, found 1.1
warmup: 2% -> warmup: -1%
    6: base.schedule.warmup: allowed: at least 0%, found -1%
warmup: 2% -> warmup: .nan
    6: base.schedule.warmup: a finite number is expected, found .nan
warmup: 2% -> warmup: .inf
    6: base.schedule.warmup: a finite number is expected, found .inf
warmup: 2% -> warmup: 1e999
    6: base.schedule.warmup: a finite number is expected, found 1e999
gpt -> gtp
    1: trainable: allowed: gpt, points, surface, unet, found gtp; did you mean gpt?
warmup: 2% -> decay: cosin
    6: base.schedule.decay: allowed: cosine, constant, linear, found cosin; did you mean
search: -> searcher: tpee\nsearch:
    9: searcher: allowed: tpe, random, grid, gp, cmaes, qmc, ablation, list, found tpee; did you mean tpe?
search: -> early_stopping: {rule: ahsa}\nsearch:
    9: early_stopping.rule: allowed: forecast, asha, median, none, found ahsa; did you mean asha?
search: -> early_stopping: none\nsearch:
    9: early_stopping: allowed: a section with rule, by, grace, reduction, chance, within, found none
search: -> objective: {metric: validation/los}\nsearch:
    9: objective.metric: allowed: validation/loss, validation/bits_per_byte, found validation/los; did you mean
search: -> objective: {metric: validation/loss, goal: minimise}\nsearch:
    9: objective.goal: allowed: minimize, maximize, found minimise; did you mean minimize?
search: -> objective: {metric: validation/loss, goal: maximize}\nsearch:
    9: objective.goal: validation/loss is to minimize, found maximize; write goal: minimize
search: -> objective: [{metric: x}]\nsearch:
    9: objective: several objectives are not supported yet
search: -> cards_per_trial: 1.5\nsearch:
    9: cards_per_trial: several workers take a whole card each: allowed: a number of cards, a share of one
search: -> cards_per_trial: 0\nsearch:
    9: cards_per_trial: allowed: a number of cards, a share of one such as 0.5, auto, or {min: 1, max: 2}
search: -> cards_per_trial: some\nsearch:
    9: cards_per_trial: allowed: a number of cards, a share of one such as 0.5, auto, or {min: 1, max: 2}, found some
search: -> cards_per_trial: {min: 2, max: 1}\nsearch:
    9: cards_per_trial
search: -> early_stopping: {grace: 100%}\nsearch:
    9: early_stopping.grace: allowed: less than 100%, found 100%
search: -> early_stopping: {reduction: 1}\nsearch:
    9: early_stopping.reduction: allowed: at least 2, found 1
search: -> early_stopping: {within: optimizer.learning_rate}\nsearch:
    9: early_stopping.within: optimizer.learning_rate is a range, of which no two trials share a value
search: -> early_stopping: {within: model.widht}\nsearch:\n  model.width: {choices: [96]}
    9: early_stopping.within: model.widht is not a searched key; did you mean model.width?
width: 96 -> width: 100
    4: base.model: width 100 is not divisible by head_width 32
examples: 4096 -> examples: 4095
    2: base: batch.examples 4095 is not a multiple of data.sequence_length 128
"""
"""What is written instead of what; beneath it, how the answer begins, after the file's name."""


@pytest.mark.parametrize(("change", "message"), pairs(MISTAKES))
def test_a_mistake_gets_its_place_what_was_found_and_what_is_allowed(change: str, message: str) -> None:
    old, new = change.replace("\\n", "\n").split(" -> ")
    assert refusal_of(instead(old, new)).startswith(f"made.yaml:{message}")


SEARCH_MISTAKES = """
optimizer.learning_rate: {low: 1e-2, high: 1e-4}
    optimizer.learning_rate.low: low must be below high, found low 1e-2, high 1e-4
optimizer.learning_rate: {low: 1e-3, high: 1e-3}
    optimizer.learning_rate.low: low must be below high, found low 1e-3, high 1e-3
optimizer.learning_rate: {low: 0, high: 1e-2, log: true}
    optimizer.learning_rate.low: a logarithmic range starts above 0, found low 0
optimizer.learning_rate: {low: 1e-4}
    optimizer.learning_rate.high: is missing
optimizer.learning_rate: {low: 1e-4, hihg: 1}
    optimizer.learning_rate.hihg: no such key; did you mean high?
optimizer.learning_rate: {choises: [1e-3]}
    optimizer.learning_rate.choises: no such key; did you mean choices?
optimizer.learning_rate: {low: 1e-4, high: big}
    optimizer.learning_rate.high: allowed: a number, found big
optimizer.learning_rate: {low: 1e-4, high: .inf}
    optimizer.learning_rate.high: a finite number is expected, found .inf
optimizer.learning_rate: {low: true, high: 2}
    optimizer.learning_rate.low: allowed: a number, found true
optimizer.learning_rate: {low: 1e-2, high: 1e-1}
    optimizer.learning_rate: the base's value 1e-3 is outside the search (1e-2 to 1e-1)
optimizer.learning_rate: {choices: [1e-2]}
    optimizer.learning_rate: the base's value 1e-3 is outside the search (one of 0.01)
optimizer.learning_rate: {low: 1e-4, high: 1e-2, log: true, step: 1e-4}
    optimizer.learning_rate.step: a logarithmic range has no step
optimizer.learning_rate: 5
    optimizer.learning_rate: give {low: …, high: …}, {choices: […]} or = an expression, found 5
optimizer.learning_rate:
    optimizer.learning_rate: give {low: …, high: …}, {choices: […]} or = an expression, found nothing
optimizer.learning_rate: {choices: []}
    optimizer.learning_rate.choices: is empty; give at least one value
optimizer.learning_rate: {choices: 5}
    optimizer.learning_rate.choices: allowed: a list, found 5
optimizer.learning_rate: {choices: [1e-3, fast]}
    optimizer.learning_rate.choices.1: allowed: a number, found fast
optimizer.learning_rate: {choices: [1e-3, -1]}
    optimizer.learning_rate.choices.1: allowed: more than 0, found -1
optimizer.learning_rate: {choices: [1e-3, 1e-3]}
    optimizer.learning_rate.choices.1: is there twice: 1e-3
optimizer.learning_rate: {choices: [1e-3], low: 1}
    optimizer.learning_rate.low: stands beside choices
optimizer.betas: {choices: [[0.9, 0.95], [0.9]]}
    optimizer.betas.choices.1: allowed: a list of at least 2 values, found 1
optimizer.betas: {low: 0, high: 1}
    optimizer.betas: is not a number; give {choices: […]}
model.tied: {choices: [true, 3]}
    model.tied.choices.1: allowed: true or false, found 3
model.layers: {choices: [4, true]}
    model.layers.choices.1: allowed: a whole number, found true
model.layers: {choices: [4, 10m]}
    model.layers.choices.1: is not a time, found 10m
model.layers: {low: 4, high: 10h}
    model.layers.high: is not a time, found 10h (h is hours)
model.layers: {low: 2.5, high: 8}
    model.layers.low: allowed: a whole number, as model.layers is one, found 2.5
model.layers: {low: 2, high: 9, step: 2}
    model.layers.high: is not a whole number of steps of 2 above low; the last one is at 8
model.layers: {low: 2, high: 8, step: 9}
    model.layers.step: allowed: more than 0, at most high − low, found 9
schedule.decay: {choices: [cosine, linaer]}
    schedule.decay.choices.1: allowed: cosine, constant, linear, found linaer; did you mean linear?
schedule.warmup: {low: 0%, high: 110%}
    schedule.warmup.high: allowed: at most 100%, found 110%
schedule.warmup: {choices: [2%, 110%]}
    schedule.warmup.choices.1: allowed: at most 100%, found 110%
schedule.warmup: {low: 3%, high: 10%}
    schedule.warmup: the base's value 2% is outside the search (3% to 10%)
optimizer.learningrate: {low: 1, high: 2}
    optimizer.learningrate: no such key; did you mean optimizer.learning_rate?
learning_rate: {low: 1, high: 2}
    learning_rate: no such key; did you mean optimizer.learning_rate?
guidance: {low: 1, high: 2}
    guidance: no such key; allowed: seed, optimizer.name, optimizer.learning_rate
optimizer: {learning_rate: {low: 1, high: 2}}
    optimizer: is a section; search one of its keys: optimizer.name,
model.width: {choices: [96, 100]}
    model.width: width 100 is not divisible by head_width 32 (with model.width = 100)
model.width: = 24 * model.layers + 1
    model.width: width 97 is not divisible by head_width 32 (model.width = 24 * model.layers + 1)
model.width: = 24 * model.layer
    model.width: = 24 * model.layer: model.layer: no such key; did you mean model.layers?
model.width: = 24 *
    model.width: = 24 *: cannot be read; write for example `= 32 * model.layers`
model.width: = open('x')
    model.width: = open('x'): may hold numbers, dotted keys, + - * / // % **, parentheses, min
model.width: = model.layers / 3
    model.width: allowed: a whole number, found 1.3333333333333333 (= model.layers / 3)
model.width: = 1 / (model.layers - 4)
    model.width: = 1 / (model.layers - 4): cannot be computed: division by zero
model.tied: {choices: [true], when: {model.layer: 4}}
    model.tied.when.model.layer: no such key; did you mean model.layers?
model.tied: {choices: [true], when: model.layers}
    model.tied.when: allowed: a section, found model.layers
"""
"""What is searched instead of the learning rate; beneath it, how the answer begins."""


@pytest.mark.parametrize(("search", "message"), pairs(SEARCH_MISTAKES))
def test_a_mistake_in_a_search_gets_its_place_what_was_found_and_what_is_allowed(search: str, message: str) -> None:
    assert refusal_of(instead(SEARCHED, f"  {search}")).startswith(f"made.yaml:10: search.{message}")


REFUSED = r"""
grid {low: 1e-4, high: 1e-2, log: true}
    10: search.optimizer.learning_rate: this range has no grid; give choices
grid {low: 1e-4, high: 1e-2}
    10: search.optimizer.learning_rate: this range has no grid; give step or choices
grid {low: 1e-4, high: 1e-2, step: 1e-8}
    9: search: has more than 100,000 combinations; give fewer values
ablation {low: 1e-4, high: 1e-2}
    10: search.optimizer.learning_rate: this range has no grid; give step or choices
ablation {choices: [1e-3]}
    9: search: lists nothing but the base's own values; give others
ablation {choices: [1e-3, 1e-2]}\n  seed: {choices: [5], when: {model.layers: 2}}\n  model.layers: {choices: [2, 4]}
    11: search.seed.when: cannot be changed alone: it exists only where model.layers is 2, which the base is not
ablation {choices: [1e-3, 1e-2]}\nearly_stopping: {rule: asha}
    11: early_stopping.rule: an ablation runs every trial to its end, found asha; leave the rule out
ablation {choices: [1e-3, 1e-2]}\ntrials: 16
    11: trials: this ablation has 2 configurations, found 16; leave trials out
grid {choices: [1e-3, 1e-2]}\ntrials: 1k
    11: trials: this grid has 2 configurations, found 1k; leave trials out
cmaes {choices: [1e-3, 1e-2]}
    10: search.optimizer.learning_rate.choices: cmaes searches numbers only; give low and high, or use searcher: tpe
cmaes {low: 1e-4, high: 1e-2}\n  model.layers: {low: 1, high: 4}\n  seed: {low: 0, high: 9, when: {model.layers: 4}}
    12: search.seed.when: cmaes searches no conditional keys; use searcher: tpe
gp {low: 1e-4, high: 1e-2}\n  model.layers: {low: 1, high: 4}\n  seed: {low: 0, high: 9, when: {model.layers: 4}}
    12: search.seed.when: gp searches no conditional keys; use searcher: tpe
random {low: 1e-4, high: 1e-2}\nstart_from: other
    11: start_from: random learns nothing from other trials; leave it out, or use tpe, gp, cmaes
grid {choices: [1e-3]}\nstart_from: [other]
    11: start_from: grid learns nothing from other trials; leave it out, or use tpe, gp, cmaes
tpe {low: 1e-4, high: 1e-2}\nstart_from: 5
    11: start_from: allowed: a list, found 5
tpe {low: 1e-4, high: 1e-2}\nstart_from: [a, 5]
    11: start_from.1: allowed: text (in quotes), found 5
"""
"""A searcher and what it is to search; beneath it, how the answer begins."""


@pytest.mark.parametrize(("told", "message"), pairs(REFUSED))
def test_a_searcher_refuses_what_it_cannot_serve(told: str, message: str) -> None:
    searcher, _, search = told.replace("\\n", "\n").partition(" ")
    text = instead(SEARCHED, f"  optimizer.learning_rate: {search}") + f"searcher: {searcher}\n"
    assert refusal_of(text).startswith(f"made.yaml:{message}")


def test_a_condition_on_what_is_not_searched_is_none() -> None:
    text = instead(SEARCHED, f"{SEARCHED}\n  schedule.final: {{low: 0, high: 1, when: {{schedule.decay: cosine}}}}")
    assert sweep_of(text, "searcher=gp").space.conditional() == []


def test_a_searcher_that_lists_its_configurations_counts_the_trials() -> None:
    text = instead(SEARCHED, "  optimizer.learning_rate: {choices: [1e-4, 1e-3]}\n  model.layers: {low: 1, high: 5}")
    grid, ablation = sweep_of(text, "searcher=grid"), sweep_of(text, "searcher=ablation", "repeats=3")
    assert (grid.settings.trials, grid.settings.early_stopping.rule) == (10, "forecast")
    assert (ablation.settings.trials, ablation.settings.early_stopping.rule) == (6, "none")
    assert sweep_of(text, "searcher=grid", "trials=10").settings == grid.settings


def test_a_file_without_search_may_name_any_searcher() -> None:
    for searcher in SEARCHERS:
        assert sweep_of(instead(f"search:\n{SEARCHED}\n", ""), f"searcher={searcher}").settings.trials == 16


def test_widths_and_head_widths_that_do_not_fit_are_refused_when_both_are_searched() -> None:
    search = "  model.width: {low: 64, high: 128, step: 32}\n  model.head_width: {choices: [32, 64]}"
    assert refusal_of(instead(SEARCHED, search)) == (
        "made.yaml:11: search.model.head_width: width 96 is not divisible by head_width 64 "
        "(with model.width = 96, model.head_width = 64)"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("base.modle.width=5", "base.modle: no such key; did you mean model?"),
        ("base.model.widht=5", "base.model.widht: no such key; did you mean width?"),
        ("base.schedule.warmup=120%", "base.schedule.warmup: allowed: at most 100%, found 120%"),
        ("trials=lots", "trials: allowed: a whole number, found lots"),
        ("serch.x=5", "serch: no such key; did you mean search?"),
        ("search.model.widht={choices: [96]}", "search.model.widht: no such key; did you mean model.width?"),
        (
            "search.optimizer.learning_rate.hihg=1",
            "search.optimizer.learning_rate.hihg: no such key; did you mean high?",
        ),
        (
            "search.model.width={choices: [64]}",
            "search.model.width: the base's value 96 is outside the search (one of 64)",
        ),
        ("search.model.tied={choices: [true, 5]}", "search.model.tied.choices.1: allowed: true or false, found 5"),
        ("early_stopping.rule=quick", "early_stopping.rule: allowed: forecast, asha, median, none, found quick"),
    ],
)
def test_a_mistake_in_an_override_is_named_by_it(override: str, message: str) -> None:
    assert refusal_of(GOOD, override) == f"--set {override}: {message}"


def test_an_override_after_a_search_that_is_no_section_is_still_answered() -> None:
    assert "model.width" in refusal_of(instead(f"search:\n{SEARCHED}", "search: 5"), "search.model.width=1")


def test_the_first_mistake_of_the_file_is_told_and_a_missing_key_last() -> None:
    text = (
        instead("layers: 4", "layer: 4").replace("warmup: 2%", "warmup: 2").replace("  budget: {examples: 400k}\n", "")
    )
    assert refusal_of(text).startswith("made.yaml:4: base.model.layer: no such key")


def test_numbers_of_a_file_become_settings() -> None:
    sweep = sweep_of(GOOD, "limits.wall_time=8h", "hang=10m")
    training: Any = sweep.training({})
    assert (training.budget.examples, training.schedule.warmup) == (400_000, 0.02)
    assert (sweep.settings.limits.wall_time, sweep.settings.hang) == (28_800, 600)


# What is resolved.

TRICKY = """
question: "400k"
trainable: gpt
base:
  seed: 7
  data: {corpus: [a.txt, '10%', "true", "nan"], column: '2h', sequence_length: 128, validation: last 10%}
  model: {layers: 4, width: = 32 * model.layers, head_width: 32, tied: false}
  optimizer: {clip_norm: null, betas: [0.9, 0.999]}
  schedule: {warmup: 7%, decay: linear}
  batch: {examples: 4096, micro: null}
  budget: {flops: 2e15}
  ema: 0.999
  sampling: {prompt: "= 1e5", top_p: null}
search:
  model.layers: {low: 2, high: 8, step: 2}
  model.feedforward: = max(2, 8 - model.layers)
  schedule.decay: {choices: [linear, cosine]}
  schedule.cooldown: {low: 10%, high: 90%, when: {schedule.decay: linear}}
  optimizer.clip_norm: {choices: [null, 1.0]}
  optimizer.betas: {choices: [[0.9, 0.999], [0.9, 0.95]]}
  optimizer.weight_decay: {low: 1e-5, high: 1, log: true}
objective: {metric: validation/bits_per_byte}
limits: {wall_time: 8h}
early_stopping: {within: model.layers, grace: 7%}
"""


LISTS = instead(SEARCHED, "  optimizer.learning_rate: {choices: [1e-4, 1e-3]}\n  schedule.warmup: {choices: [2%, 5%]}")
WARM = f"{GOOD}searcher: gp\nstart_from: ['400k', runs/搜索]\n"


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        TRICKY,
        (find("quickstart")).read_text(encoding="utf-8"),
        f"{LISTS}searcher: grid\n",
        f"{LISTS}searcher: ablation\nrepeats: 2\n",
        WARM,
    ],
)
def test_what_is_resolved_reads_back_to_the_same_sweep(text: str) -> None:
    sweep = sweep_of(text)
    again = check(files.parse(sweep.resolved(), "resolved.yaml"), "made")
    assert again.training({}) == sweep.training({})
    assert again.settings.model_dump(exclude={"base"}) == sweep.settings.model_dump(exclude={"base"})
    assert (again.space.dimensions, again.space.base_parameters()) == (
        sweep.space.dimensions,
        sweep.space.base_parameters(),
    )
    assert again.resolved() == sweep.resolved()
    assert changed(sweep, again) == {}
    for corner in sweep.space.corners_that_change("model", "optimizer", "schedule"):
        assert again.training(corner) == sweep.training(corner)


def test_what_is_resolved_is_plain_yaml_for_other_readers() -> None:
    values = yaml.safe_load(sweep_of(TRICKY).resolved())
    assert values["question"] == "400k"
    assert values["base"]["optimizer"] == {
        "name": "adamw",
        "learning_rate": 0.001,
        "betas": [0.9, 0.999],
        "weight_decay": 0.1,
        "clip_norm": None,
        "fused": True,
    }
    assert values["base"]["data"]["corpus"] == ["a.txt", "10%", "true", "nan"]
    assert values["base"]["model"]["width"] == "= 32 * model.layers"


def test_the_order_of_the_searched_keys_is_part_of_a_sweep() -> None:
    keys = ["  optimizer.learning_rate: {choices: [1e-4, 1e-3]}", "  model.layers: {low: 1, high: 5}"]
    one, two = (sweep_of(instead(SEARCHED, "\n".join(order)), "searcher=ablation") for order in (keys, keys[::-1]))
    assert list(changed(one, two)) == ["search"]
    assert changed(one, one) == {}


def test_what_changed_between_two_files_is_told_but_for_what_may_change() -> None:
    before = sweep_of(GOOD)
    assert changed(before, sweep_of(GOOD, "trials=99", "limits.wall_time=1h", "question=Why?")) == {}
    assert changed(before, sweep_of(GOOD, "base.optimizer.clip_norm=null")) == {"base.optimizer.clip_norm": [1.0, None]}
    assert changed(before, sweep_of(GOOD, "search.optimizer.learning_rate.high=0.1")) == {
        "search.optimizer.learning_rate.high": [0.01, 0.1]
    }


# Grace and rungs.


def test_grace_is_at_least_the_largest_warm_up_that_can_be_proposed() -> None:
    assert sweep_of(GOOD).grace == 0.1
    assert sweep_of(GOOD, "base.schedule.warmup=20%").grace == 0.2
    assert sweep_of(GOOD, "search.schedule.warmup={low: 0%, high: 30%}").grace == 0.3
    assert sweep_of(GOOD, "search.schedule.warmup={choices: [2%, 25%]}").grace == 0.25
    derived = "search.schedule.warmup== model.layers / 20"
    assert sweep_of(GOOD, "search.model.layers={choices: [4, 8]}", derived).grace == 0.4
    assert sweep_of(GOOD, "early_stopping.grace=50%").grace == 0.5


def test_rungs_are_a_ladder_from_the_grace_below_the_smallest_budget() -> None:
    asha = "early_stopping.rule=asha"
    sweep = sweep_of(GOOD, asha)
    assert sweep.rungs([400_000]) == (40_000, 120_000, 360_000)
    assert sweep.rungs([100_000, 400_000, 200_000]) == (10_000, 30_000, 90_000)
    assert sweep_of(GOOD, asha, "early_stopping.reduction=2").rungs([100.0]) == (10, 20, 40, 80)
    assert sweep_of(GOOD, asha, "early_stopping.grace=50%").rungs([100.0]) == (50,)
    assert sweep_of(GOOD, "early_stopping.rule=none").rungs([100.0]) == ()
    # A rung at the end would compare what is over.
    assert sweep_of(GOOD, asha, f"early_stopping.grace={1 / 9}").rungs([90.0]) == (10, 30)


def test_every_ready_sweep_is_a_sweep() -> None:
    for file in Path(find("quickstart")).parent.glob("*.yaml"):
        assert load(file.stem).name == file.stem


def test_a_name_that_is_no_sweep_is_answered_with_the_nearest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongInput, match=r"^quikstart: no such file or ready sweep; did you mean quickstart\?$"):
        load("quikstart")
    (tmp_path / "mine.yaml").write_text(GOOD)
    with pytest.raises(WrongInput, match=r"did you mean mine\.yaml\?$"):
        load("mime.yaml")


def test_the_goal_follows_from_the_metric() -> None:
    for metric, goal in registry.settings_class("surface").METRICS.items():
        sweep = sweep_of(f"trainable: surface\nbase: {{budget: {{examples: 1M}}}}\nobjective: {{metric: {metric}}}")
        assert (sweep.goal, sweep.settings.objective.goal) == (goal, goal)
        assert sweep.sign == {"minimize": 1, "maximize": -1}[goal]
        assert not changed(sweep, sweep_of(sweep.resolved()))
    assert sweep_of(GOOD).goal == "minimize"


def test_every_trainable_accepts_a_file_with_a_budget_alone() -> None:
    for name in registry.names():
        assert sweep_of(f"trainable: {name}\nbase: {{budget: {{examples: 1M}}}}").training({}).budget.examples == 10**6
