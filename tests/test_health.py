"""Health rules on recorded trainings (`record_series.py`): silent on healthy ones, right about sick ones."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rigsweep.trainables.health import (
    RULES,
    Facts,
    Finding,
    Kept,
    LossAboveChance,
    LowMFU,
    MaskedAttentionRow,
    MemoryGrowing,
    NonFiniteGradient,
    NonFiniteLoss,
    NonFiniteWeights,
    NoProgress,
    Recompiling,
    Report,
    Rule,
    Step,
    TargetsLeaked,
    WaitingForData,
)

SERIES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "series.json").read_text())
HEALTHY = [name for name in SERIES if name.startswith("healthy/")]
FACTS = Facts(1000, 20, 4096, 1e-3, 1.0, "fp32", chance=math.log(4096))


def steps_of(name: str) -> Iterator[Step]:
    series = SERIES[name]
    for number, (loss, norm) in enumerate(zip(series["loss"], series["gradient_norm"], strict=True), 1):
        yield Step(number, number * series["facts"]["batch_examples"], float(loss), float(norm))


def reports_of(name: str) -> list[Report]:
    """With steps so long that waiting would matter."""
    return [
        Report(step, waiting_for_data=waiting, mfu=mfu, seconds_per_step=1000.0, memory_bytes=mib * 2**20)
        for step, waiting, mfu, mib in SERIES[name]["reports"]
    ]


def heard(name: str, rules: list[Rule] | None = None, after: int = 0) -> list[tuple[int, str, str]]:
    """(step, rule, state) of all that rules have to say of a recorded training, up to its end."""
    rules = rules or [rule(Facts(**SERIES[name]["facts"])) for rule in RULES]
    found: list[tuple[int, str, str]] = []
    for step in steps_of(name):
        for rule in rules:
            if step.number > after and (finding := rule.step(step)):
                found.append((step.number, rule.name, finding.state))
                if finding.state:
                    return found
    for report in reports_of(name):
        found += [(report.step, rule.name, said.state) for rule in rules if (said := rule.report(report))]
    return found


def test_there_are_twenty_healthy_trainings_or_more() -> None:
    assert len(HEALTHY) >= 20
    assert len({tuple(SERIES[name]["loss"]) for name in HEALTHY}) == len(HEALTHY)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_training_hears_nothing(name: str) -> None:
    assert heard(name) == []


@pytest.mark.parametrize(
    ("name", "rule", "state", "first", "last"),
    [
        ("nan-at-1", "non-finite-loss", "diverged", 1, 1),
        ("nan-at-500", "non-finite-loss", "diverged", 500, 500),
        ("rate-far-too-high", "loss-above-chance", "diverged", 12, 30),
        ("rate-too-high-characters", "loss-above-chance", "diverged", 12, 30),
        ("growing-rate", "loss-above-chance", "diverged", 200, 240),
        ("growing-rate-no-norms", "loss-above-chance", "diverged", 200, 240),
        ("leaked", "targets-leaked", "failed", 1, 1),
        ("leaked-characters", "targets-leaked", "failed", 1, 1),
        ("scrambled-for-good", "gradient-norm", "diverged", 215, 240),
    ],
)
def test_a_sick_training_ends_with_its_rule_in_time(name: str, rule: str, state: str, first: int, last: int) -> None:
    step, found, as_ = heard(f"sick/{name}")[-1]
    assert (found, as_) == (rule, state)
    assert first <= step <= last


def test_a_gradient_that_blows_up_and_recovers_is_a_warning_within_a_few_steps() -> None:
    (warning,) = {(rule, state) for _, rule, state in heard("sick/scrambled-and-recovers")}
    assert warning == ("gradient-norm", "")
    assert 200 <= heard("sick/scrambled-and-recovers")[0][0] <= 206


def test_a_short_kick_of_the_learning_rate_ends_nothing() -> None:
    assert [state for *_, state in heard("sick/kicked-and-recovers") if state] == []


def test_before_the_loss_confirms_it_the_gradient_has_warned() -> None:
    said = heard("sick/scrambled-for-good")
    assert [(rule, state) for _, rule, state in said] == [("gradient-norm", ""), ("gradient-norm", "diverged")]
    assert said[1][0] - said[0][0] >= 15


def test_a_flat_loss_is_a_warning_and_no_end() -> None:
    assert heard("sick/flat") == [(30, "no-progress", "")]


@pytest.mark.parametrize("name", ["scrambled-for-good", "flat", "leaked", "growing-rate", "rate-far-too-high"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.7])
def test_a_training_that_goes_on_is_judged_as_one_that_was_never_left(name: str, share: float) -> None:
    name = f"sick/{name}"
    cut = int(share * len(SERIES[name]["loss"]))
    before = [rule(Facts(**SERIES[name]["facts"])) for rule in RULES]
    said = []
    for step in list(steps_of(name))[:cut]:
        said += [(step.number, rule.name, found.state) for rule in before if (found := rule.step(step))]
        if said and said[-1][2]:
            return
    kept = json.loads(json.dumps({rule.name: rule.state() for rule in before}))
    after = [rule(Facts(**SERIES[name]["facts"])) for rule in RULES]
    for rule in after:
        rule.restore(kept[rule.name])
    assert said + heard(name, after, after=cut) == heard(name)


def test_rules_have_names_of_their_own() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert all(rule.__doc__ for rule in RULES)


# What is not finite.


def reason(finding: Finding | None) -> str:
    assert finding is not None
    return finding.reason


def test_what_is_not_finite_says_in_which_order_to_look() -> None:
    step = Step(3, 12_288, math.nan, 1.0)
    bf16 = Facts(1000, 20, 4096, 1e-3, None, "bf16")
    assert reason(NonFiniteLoss(bf16).step(step)) == (
        "the loss is not finite (nan) after 12,288 examples; look in this order: a few steps in fp32, a tenth of the "
        "learning rate (0.0001), the data, clipping, which is off"
    )
    assert "fp32" not in reason(NonFiniteLoss(FACTS).step(step))
    assert reason(NonFiniteLoss(FACTS).step(step)).endswith("the data, clipping below 1")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_ends_the_training_under_a_finite_loss(value: float) -> None:
    found = NonFiniteGradient(FACTS).step(Step(3, 12_288, 2.5, value))
    assert found is not None
    assert (found.state, found.keep_batch) == ("diverged", True)
    assert f"({value}) after 12,288 examples, though the loss is 2.5" in found.reason


def test_neither_evaluations_nor_weights_that_are_not_finite_are_kept() -> None:
    good = Kept(4096, weights_are_finite=True, evaluation={"validation/loss": 2.0})
    bad_value = Kept(4096, weights_are_finite=True, evaluation={"validation/loss": math.inf})
    bad_weights = Kept(4096, weights_are_finite=False, evaluation={})
    assert all(rule(FACTS).kept(good) is None for rule in RULES)
    assert reason(NonFiniteLoss(FACTS).kept(bad_value)).startswith("validation/loss is not finite (inf)")
    assert reason(NonFiniteWeights(FACTS).kept(bad_weights)).startswith("a weight is not finite after 4,096 examples")


# Chance.


def test_only_a_fresh_training_of_a_task_that_knows_chance_can_have_leaked_targets() -> None:
    low = Step(1, 4096, 1.0, 1.0)
    found = TargetsLeaked(FACTS).step(low)
    assert found is not None
    assert found.state == "failed", "it must neither win its sweep nor blame its parameters"
    assert "1 where knowing nothing gives 8.32" in found.reason
    assert TargetsLeaked(Facts(1000, 20, 4096, 1e-3, 1.0, "fp32", chance=None)).step(low) is None
    assert TargetsLeaked(Facts(1000, 20, 4096, 1e-3, 1.0, "fp32", fresh=False, chance=8.3)).step(low) is None
    assert TargetsLeaked(FACTS).step(Step(2, 8192, 1.0, 1.0)) is None, "by then something was learnt"


def test_a_first_batch_of_few_examples_is_not_judged_alone() -> None:
    facts = Facts(1000, 20, 16, 1e-3, 1.0, "fp32", chance=4.6)
    odd = [2.0, 4.5, 4.6, 4.4, 4.5, 4.5, 4.4, 4.6, 4.5, 4.4, 2.0]
    rule, bad = TargetsLeaked(facts), TargetsLeaked(facts)
    assert [rule.step(Step(n, 16 * n, loss, 1.0)) for n, loss in enumerate(odd, 1)] == [None] * 11
    assert [bool(bad.step(Step(n, 16 * n, 2.0, 1.0))) for n in range(1, 12)] == [False] * 9 + [True, False]


def test_a_loss_above_chance_is_borne_during_the_warm_up_and_for_a_moment() -> None:
    rule = LossAboveChance(FACTS)
    high, low = FACTS.chance + 1.0, FACTS.chance - 1.0  # pyright: ignore
    losses = [high] * 20 + [low] + [high] * 19 + [low] + [high] * 20
    found = [rule.step(Step(n, n, loss, 1.0)) for n, loss in enumerate(losses, 1)]
    assert [n for n, finding in enumerate(found, 1) if finding] == [61]


def test_no_progress_is_not_asked_of_weights_that_have_learnt() -> None:
    facts = Facts(100, 2, 4096, 1e-3, 1.0, "fp32", fresh=False)
    rule = NoProgress(facts)
    assert [rule.step(Step(n, n, 2.0, 1.0)) for n in range(1, 101)] == [None] * 100


def test_little_progress_is_progress() -> None:
    facts = Facts(100, 2, 4096, 1e-3, 1.0, "fp32")
    rule = NoProgress(facts)
    assert [rule.step(Step(n, n, 5 - 0.001 * n, 1.0)) for n in range(1, 101)] == [None] * 100


# Speed and memory.


def report(step: int, **changes: Any) -> Report:
    plain = {"waiting_for_data": 0.01, "mfu": 0.4, "seconds_per_step": 0.5, "memory_bytes": 2e9, "compilations": 2}
    return Report(step, **(plain | changes))  # pyright: ignore


def said(rule: Rule, reports: list[Report]) -> list[int]:
    return [r.step for r in reports if rule.report(r)]


def test_waiting_for_data_has_to_last_and_to_matter() -> None:
    waits = [report(n, waiting_for_data=0.3) for n in range(1, 11)]
    assert said(WaitingForData(FACTS), waits)[0] == 5
    assert said(WaitingForData(FACTS), [report(n, waiting_for_data=0.9 * (n % 5 == 0)) for n in range(1, 40)]) == []
    short = [report(n, waiting_for_data=0.3, seconds_per_step=0.01) for n in range(1, 11)]
    assert said(WaitingForData(FACTS), short) == [], "three seconds of a whole training"
    assert "30% of the time is spent waiting for data, some 150 s" in reason(last(WaitingForData, waits))


def last(rule: type[Rule], reports: list[Report], facts: Facts = FACTS) -> Finding | None:
    judge = rule(facts)
    return [judge.report(r) for r in reports][-1]


def test_a_low_mfu_is_of_gpus_only() -> None:
    gpu = Facts(1000, 20, 4096, 1e-3, 1.0, "bf16", kind="cuda")
    slow = [report(n, mfu=0.0 if n == 1 else 0.12) for n in range(1, 11)]
    assert said(LowMFU(gpu), slow)[0] == 5
    assert said(LowMFU(FACTS), slow) == []
    assert said(LowMFU(gpu), [report(n, mfu=0.0 if n < 3 else 0.4) for n in range(1, 11)]) == []
    assert reason(last(LowMFU, slow, gpu)).startswith("the MFU is 12%; try compile: true")


def test_compiling_at_the_start_is_no_recompiling() -> None:
    start = [report(n, compilations=min(n, 3)) for n in range(1, 30)]
    assert said(Recompiling(FACTS), start) == []
    again = [report(n, compilations=n) for n in range(1, 30)]
    assert said(Recompiling(FACTS), again)[0] == 6
    given_up = [report(n, compilations=9, runs_eagerly=True) for n in range(1, 3)]
    assert said(Recompiling(FACTS), given_up)[0] == 1


def test_memory_that_grows_and_grows_is_told_apart_from_memory_that_fills() -> None:
    growing = [report(10 * n, memory_bytes=2e9 + 2e7 * n) for n in range(1, 40)]
    assert said(MemoryGrowing(FACTS), growing)[0] == 140
    assert reason(last(MemoryGrowing, growing)).startswith("memory grows by 2 MB a step and is 2.78 GB; at the end")
    filling = [report(10 * n, memory_bytes=2e9 + 1e8 * min(n, 8)) for n in range(1, 40)]
    assert said(MemoryGrowing(FACTS), filling) == []
    saw = [report(10 * n, memory_bytes=2e9 + 3e8 * (n % 3)) for n in range(1, 40)]
    assert said(MemoryGrowing(FACTS), saw) == []


def test_a_mask_that_lets_nothing_through_is_seen() -> None:
    open_ = torch.ones(4, 8, 8, dtype=torch.bool).tril()
    closed = open_.clone()
    closed[1, 2:4] = False
    rule = MaskedAttentionRow(FACTS)
    assert rule.batch({"tokens": torch.zeros(4, 8), "mask": open_}) is None
    assert reason(rule.batch({"mask": closed})).startswith("2 of 32 rows of `mask` are masked as a whole")
    assert reason(rule.batch({"attention_mask": torch.tensor([[1, 1], [0, 0]])})).startswith("1 of 2 rows")
