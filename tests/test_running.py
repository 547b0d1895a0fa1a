"""Sweeps from their file to their summary: real Ray, Optuna and MLflow; closed-form trials, and a small GPT."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import optuna
import pytest

from rigsweep.cluster.node_settings import Node
from rigsweep.sweeps import folders
from rigsweep.sweeps.files import WrongInput
from rigsweep.sweeps.running import Outcome, run

pytestmark = [pytest.mark.usefixtures("one_ray"), pytest.mark.timeout(400)]

SURFACE = """
question: Does the house stand?
trainable: surface
base:
  optimizer: {learning_rate: 1e-3}
  batch: {examples: 100}
  budget: {examples: 10k}
  model: {noise: 0.01}
search:
  optimizer.learning_rate: {low: 1e-4, high: 1e-1, log: true}
  schedule.warmup: {low: 0%, high: 10%}
  model.width: {choices: [64, 128]}
trials: 12
early_stopping: {within: model.width}
"""

FAULTS = """
trainable: surface
base:
  seed: 2  # draws every fault
  optimizer: {learning_rate: 3e-3}
  batch: {examples: 100}
  budget: {examples: 10k}
search:
  model.fault: {choices: [null, raise, die, diverge, warn, out_of_memory]}
searcher: random
trials: 10
early_stopping: {rule: none}
"""

GPT = """
trainable: gpt
base:
  data: {corpus: CORPUS, vocabulary: characters, sequence_length: 32}
  model: {layers: 2, width: 32, head_width: 16}
  optimizer: {learning_rate: 3e-3}
  batch: {examples: 256}
  budget: {examples: 5120}
  evaluation: {every: 25%, examples: 1k}
  sampling: {tokens: 20}
search:
  optimizer.learning_rate: {low: 1e-4, high: 1e-2, log: true}
trials: 3
"""


class Quiet:
    """A show for nobody, which keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.events: list[tuple[str, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def preparing(self, stage: str, done: int, total: int) -> None:
        pass

    def event(self, kind: str, trial: Any) -> None:
        self.events.append((kind, trial.number))

    def refresh(self, controller: Any, progress: Any) -> None:
        pass


def run_text(
    text: str,
    tmp_path: Path,
    cache: Path,
    name: str = "probe",
    cards: int = 2,
    show: Quiet | None = None,
    node: Node | None = None,
) -> Outcome:
    file = tmp_path / f"{name}.yaml"
    file.write_text(text)
    sweep, _ = folders.open_sweep(str(file), (), tmp_path / "runs", resume=True, new=False)
    return run(sweep, tmp_path / "runs", cache, show or Quiet(), cards=cards, threads=1, node=node)


def runs_in_mlflow(runs: Path) -> list[tuple[str, str, str]]:
    """(name, status, state) of every run, straight from the store's file."""
    with sqlite3.connect(runs / "mlflow.db") as database:
        return database.execute(
            "select r.name, r.status, coalesce(t.value, '') from runs r "
            "left join tags t on t.run_uuid = r.run_uuid and t.key = 'rigsweep.state'"
        ).fetchall()


def test_a_sweep_runs_from_its_file_to_its_summary_study_and_mlflow(tmp_path: Path, cache: Path) -> None:
    outcome = run_text(SURFACE, tmp_path, cache)
    folder = tmp_path / "runs" / "probe"
    told = json.loads((folder / "summary.json").read_text())
    assert outcome.state == told["state"] == "complete"
    assert told == outcome.summary
    assert f"Best: trial {told['best']}" in (folder / "report.html").read_text()
    states = [trial["state"] for trial in told["trials"]]
    assert len(states) == 12
    assert set(states) == {"complete", "stopped"}
    assert states[0] == "complete", "the base is never stopped"
    best = told["trials"][told["best"]]
    assert best["state"] == "complete"
    assert best["value"] == min(trial["value"] for trial in told["trials"] if trial["state"] == "complete")
    assert all(trial["reason"] and trial["run_id"] and trial["cards"] for trial in told["trials"])
    assert told["device_seconds"] > 0

    study = optuna.load_study(study_name="probe", storage=f"sqlite:///{folder / 'study.db'}")
    told_to_optuna = {"complete": "COMPLETE", "stopped": "PRUNED"}
    assert [trial.state.name for trial in study.trials] == [told_to_optuna[state] for state in states]

    found = runs_in_mlflow(tmp_path / "runs")
    assert len(found) == 13, "a parent and a nested run a trial"
    statuses = {"complete": "FINISHED", "stopped": "KILLED"}
    trials = sorted(status for name, status, _ in found if name != "probe")
    assert trials == sorted(statuses[state] for state in states)


def test_every_fault_ends_its_trial_in_the_right_state_and_the_sweep_goes_on(tmp_path: Path, cache: Path) -> None:
    outcome = run_text(FAULTS, tmp_path, cache)
    assert outcome.state == "complete"
    expected = {
        None: ("complete", "reached its budget"),
        "raise": ("failed", "ValueError: a rehearsed error"),
        "die": ("complete", "reached its budget"),
        "diverge": ("diverged", "not finite"),
        "warn": ("complete", "reached its budget"),
        "out_of_memory": ("out_of_memory", "a rehearsed shortage"),
    }
    seen = set()
    for trial in outcome.summary["trials"]:
        fault = trial["parameters"]["model.fault"]
        seen.add(fault)
        state, reason = expected[fault]
        assert trial["state"] == state, (trial["number"], fault, trial["reason"])
        assert reason in trial["reason"]
        assert trial["rule"] == ("non-finite-loss" if fault == "diverge" else "")
        assert list(trial["warnings"]) == (["gradient-norm"] if fault == "warn" else [])
    assert seen == set(expected), "the seed draws every fault"
    log = next(t["number"] for t in outcome.summary["trials"] if t["parameters"]["model.fault"] == "raise")
    assert "Traceback" in (tmp_path / "runs" / "probe" / "trials" / str(log) / "log.txt").read_text()


def test_a_gpt_trains_samples_and_is_tracked(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a corpus may be named from where the sweep is started
    corpus = Path("corpus.txt")
    corpus.write_text("\n\n".join(f"The {i}th hen lays {i * i} eggs, and sings of it." for i in range(400)))
    outcome = run_text(GPT.replace("CORPUS", str(corpus)), tmp_path, cache, "hens")
    folder = tmp_path / "runs" / "hens"
    assert outcome.state == "complete"
    best = outcome.summary["trials"][outcome.summary["best"]]
    assert best["value"] < 3.3, "far better than a guess among the characters"
    trial = folder / "trials" / str(best["number"])
    rows = [json.loads(line) for line in (trial / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["examples"] == 5120
    measured = {"loss", "validation/loss", "validation/bits_per_byte", "optimizer/gradient_norm", "speed/mfu"}
    assert measured <= set(rows[-1])
    assert len(list((trial / "samples").glob("*.txt"))) >= 4
    assert (tmp_path / "runs" / "artifacts").exists()

    from rigsweep.sweeps.sampling import sample_run

    texts, _ = sample_run("hens", tmp_path / "runs", cache, ("sampling.prompt=The 1", "sampling.tokens=30"))
    assert texts["sample"].startswith("The 1")
    assert len(texts["sample"]) >= 30
    assert sample_run(best["run_id"], tmp_path / "runs", cache) == sample_run(
        f"hens/{best['number']}", tmp_path / "runs", cache
    )


def test_a_limit_interrupts_a_resume_finishes_and_a_finished_sweep_is_left_alone(tmp_path: Path, cache: Path) -> None:
    text = SURFACE.replace("noise: 0.01", "noise: 0.01, seconds_per_step: 0.05").replace("trials: 12", "trials: 3")
    stopped = run_text(f"{text}limits: {{wall_time: 1s}}\n", tmp_path, cache)
    assert stopped.state == "interrupted"
    assert "wall time" in stopped.reason
    assert {trial["state"] for trial in stopped.summary["trials"]} <= {"interrupted", "proposed"}

    finished = run_text(text, tmp_path, cache)
    assert finished.state == "complete"
    assert len(finished.summary["trials"]) == 3

    history = (tmp_path / "runs" / "probe" / "history.jsonl").read_text()
    again = run_text(text, tmp_path, cache)
    assert again.summary == finished.summary
    assert (tmp_path / "runs" / "probe" / "history.jsonl").read_text() == history


def test_train_goes_on_with_an_edited_file_and_records_what_changed(tmp_path: Path, cache: Path) -> None:
    text = SURFACE[: SURFACE.index("search:")]
    folder = tmp_path / "runs" / "once"

    def train(told: str) -> Outcome:
        (tmp_path / "once.yaml").write_text(told)
        sweep, edited = folders.open_sweep(
            str(tmp_path / "once.yaml"), (), tmp_path / "runs", resume=True, new=False, training=True
        )
        return run(sweep, tmp_path / "runs", cache, Quiet(), cards=1, threads=1, edited=edited)

    assert train(text).state == "complete"
    assert train(text.replace("10k", "12k")).state == "complete"
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    (edited,) = [event for event in history if event["event"] == "edited"]
    assert edited["changed"] == {"base.budget.examples": [10_000, 12_000]}
    assert folders.record_of(folder).trials[0].examples == 12_000


def test_a_second_process_is_refused_while_a_sweep_runs(tmp_path: Path, cache: Path) -> None:
    from rigsweep.sweeps.history import History

    folder = tmp_path / "runs" / "probe"
    history = History(folder / "history.jsonl")
    (folder / "sweep.yaml").write_text("held")
    sweep = folders.check(folders.files.parse(SURFACE, "probe.yaml"), "probe")
    with pytest.raises(WrongInput, match="running in another process"):
        run(sweep, tmp_path / "runs", cache, Quiet(), cards=1, threads=1)
    history.close()


@pytest.mark.slow
def test_a_sweep_starts_from_another_and_keeps_what_it_was_told(tmp_path: Path, cache: Path) -> None:
    small = SURFACE.replace("trials: 12", "trials: 4")
    wrong = f"{small}start_from: frist\n"
    run_text(small, tmp_path, cache, name="first")
    with pytest.raises(WrongInput, match=r"second.yaml:15: start_from: .*no such sweep; did you mean first\?"):
        run_text(wrong, tmp_path, cache, name="second")
    assert not (tmp_path / "runs" / "second").exists(), "nothing was begun"
    outcome = run_text(wrong.replace("frist", "first"), tmp_path, cache, name="second")
    assert (outcome.state, len(outcome.summary["trials"])) == ("complete", 4)
    folder = tmp_path / "runs" / "second"
    assert [trial["trial"] for trial in folders.record_of(folder).told] == [f"first/{number}" for number in range(4)]
    assert len(optuna.load_study(study_name="second", storage=f"sqlite:///{folder / 'study.db'}").trials) == 8
    again = run_text(wrong.replace("frist", "first").replace("trials: 4", "trials: 5"), tmp_path, cache, name="second")
    assert len(again.summary["trials"]) == 5
    assert len(folders.record_of(folder).told) == 4
