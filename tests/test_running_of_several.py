"""Sweeps whose trials take several cards, or share one: real Ray, real training."""

from pathlib import Path

import pytest

from rigsweep.cluster.node_settings import Node
from rigsweep.sweeps.files import WrongInput
from rigsweep.sweeps.history import read

from .test_running import GPT, run_text

pytestmark = [pytest.mark.usefixtures("one_ray"), pytest.mark.timeout(400)]

SURFACE = """
trainable: surface
base:
  optimizer: {learning_rate: 1e-3}
  batch: {examples: 100}
  budget: {examples: 3k}
  model: {seconds_per_step: 0.05}
search:
  optimizer.learning_rate: {low: 1e-4, high: 1e-1, log: true}
searcher: random
early_stopping: {rule: none}
"""
FAULTS = "  model.fault: {choices: [null, die, raise]}\nsearcher: grid"
TEXT = "".join(f"{i} sheep jumped over {i % 7} fences\n" for i in range(3000))


def test_trials_of_two_cards_each_run_with_early_stopping_to_the_end(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    text = GPT.replace("CORPUS", str(tmp_path / "text.txt")).replace("trials: 3", "trials: 8\ncards_per_trial: 2")
    outcome = run_text(text, tmp_path, cache)
    assert outcome.state == "complete"
    trials = outcome.summary["trials"]
    assert {trial["state"] for trial in trials} == {"complete", "stopped"}
    assert all(trial["cards"] == ["CPU, 1 thread"] * 2 for trial in trials)
    assert outcome.summary["device_seconds"] == pytest.approx(2 * sum(t["seconds"] for t in trials), rel=0.1)


@pytest.mark.slow
def test_what_dies_or_fails_on_the_second_worker_alone(tmp_path: Path, cache: Path) -> None:
    text = SURFACE.replace("seconds_per_step: 0.05", "seconds_per_step: 0.01, fault_worker: 1")
    text = text.replace("  optimizer.learning_rate: {low: 1e-4, high: 1e-1, log: true}\nsearcher: random", FAULTS)
    text += "cards_per_trial: 2\n"
    outcome = run_text(text, tmp_path, cache)
    assert outcome.state == "complete"
    seen = set()
    for trial in outcome.summary["trials"]:
        fault = trial["parameters"]["model.fault"]
        seen.add(fault)
        if fault == "raise":
            assert (trial["state"], trial["reason"]) == ("failed", "worker 1: ValueError: a rehearsed error")
        else:
            assert (trial["state"], trial["reason"]) == ("complete", "reached its budget"), fault
    assert seen == {None, "die", "raise"}


@pytest.mark.slow
def test_trials_that_take_half_a_card_run_four_at_a_time(tmp_path: Path, cache: Path) -> None:
    text = SURFACE.replace("seconds_per_step: 0.05", "seconds_per_step: 0.3")  # as long as a lane takes to start
    outcome = run_text(text + "trials: 8\ncards_per_trial: 0.5\n", tmp_path, cache)
    assert {trial["state"] for trial in outcome.summary["trials"]} == {"complete"}
    running, most = set(), 0
    for event in read(tmp_path / "runs" / "probe" / "history.jsonl"):
        if event["event"] == "started":
            running.add(event["trial"])
            assert event["share"] == 0.5
        elif event["event"] == "ended":
            running.discard(event["trial"])
        most = max(most, len(running))
    assert most == 4
    spent = outcome.summary["device_seconds"]
    assert spent < sum(trial["seconds"] for trial in outcome.summary["trials"]), "a shared second counts once"


@pytest.mark.slow
def test_out_of_memory_beside_a_neighbour_is_tried_once_more_alone(tmp_path: Path, cache: Path) -> None:
    text = SURFACE.replace("seconds_per_step: 0.05", "seconds_per_step: 0.2, fault_above: 2e-2, fault: out_of_memory")
    outcome = run_text(text + "trials: 8\ncards_per_trial: 0.5\n", tmp_path, cache)
    assert outcome.state == "complete"
    short = [trial for trial in outcome.summary["trials"] if trial["parameters"]["optimizer.learning_rate"] > 2e-2]
    assert short, "the seed draws a large rate"
    assert {trial["state"] for trial in short} == {"out_of_memory"}
    events = list(read(tmp_path / "runs" / "probe" / "history.jsonl"))
    alone = [event["trial"] for event in events if event["event"] == "interrupted" and event.get("alone")]
    assert alone
    assert len(alone) == len(set(alone)), "once"
    for number in alone:
        assert [e["share"] for e in events if e["event"] == "started" and e["trial"] == number] == [0.5, 1.0]


def test_more_cards_than_there_are_is_one_line(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(WrongInput, match="cards_per_trial: 3 cards a trial, but there are 2 here"):
        run_text(SURFACE + "cards_per_trial: 3\n", tmp_path, cache)
    with pytest.raises(WrongInput, match=r"from min|min|cards a trial"):
        run_text(SURFACE + "cards_per_trial: {min: 3, max: 4}\n", tmp_path, cache, name="other")


@pytest.mark.slow
def test_an_elastic_trial_takes_both_cards_where_both_are_free(tmp_path: Path, cache: Path) -> None:
    outcome = run_text(SURFACE + "trials: 2\ncards_per_trial: {min: 1, max: 2}\n", tmp_path, cache)
    assert [len(trial["cards"]) for trial in outcome.summary["trials"]] == [2, 2]


def test_a_width_that_cannot_fit_is_never_started_and_the_sweep_goes_on(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    text = GPT.replace("CORPUS", str(tmp_path / "text.txt")).replace("trials: 3", "trials: 4\nsearcher: grid")
    text = text.replace(
        "  optimizer.learning_rate: {low: 1e-4, high: 1e-2, log: true}\n",
        "  model.width: {choices: [32, 64, 1024, 1536]}\n",
    )
    outcome = run_text(text, tmp_path, cache, node=Node(memory=300e6))
    assert outcome.state == "complete"
    states = {trial["parameters"]["model.width"]: trial for trial in outcome.summary["trials"]}
    assert {width: trial["state"] for width, trial in states.items()} == {
        32: "complete",
        64: states[64]["state"],
        1024: "out_of_memory",
        1536: "out_of_memory",
    }
    for width in (1024, 1536):
        assert "GiB, and the card has 0.279 GiB" in states[width]["reason"]
        assert states[width]["examples"] == 0, "nothing was trained"
