"""The controller in the simulator: what it decides, and that a sweep that was killed decides the same."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rigsweep.sweeps.controller import Controller
from rigsweep.sweeps.history import ENDS, VERSION, History, Record, fold, read
from rigsweep.sweeps.simulation import ClosedForm, rungs_of
from rigsweep.sweeps.sweep import Sweep
from rigsweep.trainables.surface_settings import SurfaceTraining

from .simulator import SWEEP, cut, no_fault, outcome, simulate, sweep_of

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

Make = Callable[..., Controller]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


@pytest.fixture
def controller_of(path: Path) -> Iterator[Make]:
    """Controllers on one history, one after the other, as after kills."""
    histories: list[History] = []

    def make(*overrides: str) -> Controller:
        for history in histories:
            history.close()
        histories.append(History(path))
        histories[-1].append("opened", version=VERSION)
        sweep = sweep_of(SWEEP, *overrides)
        return Controller(sweep, histories[-1], rungs_of(sweep))

    yield make
    for history in histories:
        history.close()


def begin(controller: Controller) -> int:
    number = controller.next_trial()
    assert number is not None
    controller.started(number, "here", ["card"], process=1)
    return number


def report(controller: Controller, number: int, examples: int, loss: float, **more: float) -> bool:
    metrics = {"validation/loss": loss, **more}
    flops = examples * 6.0 * 64**2
    told = {"examples": examples, "total": 100_000, "flops": flops, "seconds": 1.0, "metrics": metrics}
    return controller.reported(number, told | {"checkpoint": None})


def events(path: Path, number: int) -> list[str]:
    return [event["event"] for event in read(path) if event.get("trial") == number]


# What it decides.


def test_a_warning_is_heard_once_a_rule_also_over_a_kill(path: Path, controller_of: Make) -> None:
    controller = controller_of()
    told: list[str] = []
    controller.tell = lambda kind, _: told.append(kind)
    number = begin(controller)
    for reason in ("7 times its usual", "9 times its usual"):
        controller.warned(number, "gradient-norm", reason, 4096)
    controller.warned(number, "low-mfu", "the MFU is 12%", 8192)
    controller = controller_of()
    controller.next_trial()
    controller.started(number, "here", ["card"], process=2)
    controller.warned(number, "low-mfu", "the MFU is 12%", 8192)
    controller.ended(number, "diverged", "the loss followed", "gradient-norm")
    controller.warned(number, "no-progress", "too late", 9000)
    trial = fold(path).trials[number]
    assert trial.warnings == {"gradient-norm": "7 times its usual", "low-mfu": "the MFU is 12%"}
    assert (trial.state, trial.rule) == ("diverged", "gradient-norm")
    assert told == ["proposed", "started", "warned", "warned"]
    assert events(path, number).count("warned") == 2


def test_an_objective_that_is_not_finite_names_its_rule(path: Path, controller_of: Make) -> None:
    controller = controller_of()
    number = begin(controller)
    assert report(controller, number, 1000, math.nan)
    assert fold(path).trials[number].rule == "non-finite-loss"


def test_the_base_is_trial_0_and_is_never_stopped_by_comparison(tmp_path: Path) -> None:
    # A base that is the worst of all, several at once so that it is compared late.
    for slots in (1, 3):
        sweep = sweep_of(SWEEP, "base.optimizer.learning_rate=0.1", "base.optimizer.weight_decay=0.5")
        record = simulate(sweep, tmp_path / f"{slots}.jsonl", slots=slots)
        assert record.trials[0].parameters["optimizer.learning_rate"] == 0.1
        assert record.trials[0].state == "complete"
        assert Counter(trial.state for trial in record.trials.values())["stopped"] >= 5


def test_no_repeat_of_the_base_is_stopped_by_comparison(path: Path) -> None:
    record = simulate(sweep_of(SWEEP, "base.optimizer.learning_rate=0.1", "repeats=2", "trials=8"), path, slots=2)
    assert [record.trials[number].state for number in (0, 1)] == ["complete", "complete"]


def test_a_stopped_trial_has_a_reason_and_the_value_of_its_last_evaluation(path: Path) -> None:
    record = simulate(sweep_of(), path)
    stopped = [trial for trial in record.trials.values() if trial.state == "stopped"]
    assert stopped
    for trial in stopped:
        assert trial.last is not None
        assert trial.value == trial.last.metrics["validation/loss"]
        assert trial.examples < 100_000
        assert "place " in trial.reason
        assert f"at {trial.examples:,} examples" in trial.reason


def test_a_lost_trial_goes_on_first_and_once(controller_of: Make, path: Path) -> None:
    controller = controller_of()
    number = begin(controller)
    report(controller, number, 25_000, 3.0)
    other = begin(controller)
    controller.lost(number, "its process was killed")
    assert controller.record.trials[number].state == "interrupted"
    assert begin(controller) == number, "it comes before a new one"
    controller.lost(other, "its process was killed")
    assert begin(controller) == other
    controller.lost(number, "its lane died")
    trial = controller.record.trials[number]
    assert (trial.state, trial.reason, trial.value) == ("failed", "its lane died, for the second time", None)
    assert controller.next_trial() == 2, "it does not come again"


def test_a_trial_that_was_lost_before_a_resume_fails_when_it_is_lost_again(controller_of: Make) -> None:
    controller = controller_of()
    controller.lost(begin(controller), "its process was killed")
    controller = controller_of()
    controller.lost(begin(controller), "its process was killed")
    assert controller.record.trials[0].state == "failed"


def test_a_trial_that_does_not_leave_in_time_is_interrupted_however_often(controller_of: Make) -> None:
    for _ in range(3):
        controller = controller_of()
        number = begin(controller)
        controller.closing = "Ctrl-C"
        controller.lost(number, "it made no progress for 60 s")
        assert (controller.record.trials[0].state, controller.record.trials[0].lost) == ("interrupted", 0)


def test_a_trial_whose_code_raised_has_failed_at_once(controller_of: Make) -> None:
    controller = controller_of()
    number = begin(controller)
    controller.ended(number, "failed", "ValueError: no")
    assert (controller.record.trials[number].state, controller.next_trial()) == ("failed", 1)


def test_the_first_end_of_a_trial_counts(controller_of: Make, path: Path) -> None:
    controller = controller_of()
    number = begin(controller)
    report(controller, number, 100_000, 3.0)
    controller.ended(number, "complete", "reached its budget")
    controller.ended(number, "failed", "late")
    controller.ended(number, "interrupted", "late")
    controller.lost(number, "late")
    assert report(controller, number, 100_000, 1.0), "and what still runs is to stop"
    trial = controller.record.trials[number]
    assert (trial.state, trial.reason, trial.value) == ("complete", "reached its budget", 3.0)
    assert events(path, number) == ["proposed", "started", "report", "ended"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_objective_that_is_not_finite_ends_its_trial_as_diverged(controller_of: Make, value: float) -> None:
    controller = controller_of()
    number = begin(controller)
    report(controller, number, 25_000, 3.0)
    assert report(controller, number, 50_000, value)
    trial = controller.record.trials[number]
    assert (trial.state, trial.value, trial.examples) == ("diverged", None, 25_000)
    assert trial.reason == f"validation/loss is not finite ({value}) after 50,000 examples"


def test_another_metric_that_is_not_finite_is_left_out(controller_of: Make) -> None:
    controller = controller_of()
    number = begin(controller)
    assert not report(controller, number, 25_000, 3.0, other=math.nan, third=1.0)
    last = controller.record.trials[number].last
    assert last is not None
    assert last.metrics == {"validation/loss": 3.0, "third": 1.0}


def test_an_evaluation_without_the_objective_is_kept_and_not_compared(controller_of: Make) -> None:
    controller = controller_of()
    for loss in (1.0, 2.0):
        number = begin(controller)
        told = {"examples": 5_000, "total": 100_000, "flops": 1.0, "seconds": 1.0, "checkpoint": None}
        assert not controller.reported(number, told | {"metrics": {"validation/accuracy": 0.5}})
        # The rung at 10,000 examples is still to be compared at.
        assert report(controller, number, 10_000, loss) == (loss == 2.0)


def test_a_trial_that_ends_without_its_objective_has_failed(controller_of: Make) -> None:
    controller = controller_of()
    number = begin(controller)
    controller.ended(number, "complete", "reached its budget")
    trial = controller.record.trials[number]
    assert (trial.state, trial.reason) == ("failed", "no evaluation of validation/loss at its end")


def test_a_proposal_that_cannot_be_trained_is_a_failed_trial_and_the_next_comes(
    controller_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = controller_of()
    monkeypatch.setattr(
        controller.study, "propose", lambda group: {"optimizer.learning_rate": -1.0 if group < 2 else 1.0}
    )
    monkeypatch.setattr(controller.study, "apply", lambda event, record: None)
    assert controller.next_trial() == 2
    reasons = [controller.record.trials[number].reason for number in (0, 1)]
    assert reasons == ["cannot be trained: allowed: more than 0, found -1.0"] * 2


def test_repeats_differ_in_the_seed_and_the_searcher_sees_their_mean(path: Path) -> None:
    sweep = sweep_of(SWEEP, "repeats=3", "trials=3", "early_stopping.rule=none", "base.seed=5")
    record = simulate(sweep, path)
    assert len(record.trials) == 9
    for group, trials in record.groups().items():
        assert [trial.seed for trial in trials] == [5, 6, 7]
        assert len({json.dumps(trial.parameters) for trial in trials}) == 1
        assert len({trial.value for trial in trials}) == 3, "there is noise"
        history = History(path)
        study = Controller(sweep, history, ()).study.study
        history.close()
        told = study.get_trials()[group]
        assert told.value == pytest.approx(sum(trial.value or 0 for trial in trials) / 3, rel=1e-12)
        assert told.intermediate_values[100_000] == pytest.approx(told.value, rel=1e-12)


def test_no_more_trials_begin_once_it_is_closing(controller_of: Make) -> None:
    controller = controller_of()
    begin(controller)
    controller.closing = "Ctrl-C"
    assert controller.next_trial() is None
    controller.ended(0, "interrupted", "asked to leave")
    controller.close("interrupted", "Ctrl-C")
    assert controller.record.closed is not None
    assert controller.record.trials[0].state == "interrupted"


def test_limits_say_when_they_are_reached(controller_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("rigsweep.sweeps.controller.time.monotonic", lambda: now[0])
    controller = controller_of("limits.wall_time=1h", "limits.device_time=90m")
    begin(controller)
    begin(controller)
    now[0] += 2000
    assert controller.device_seconds() == 4000
    assert controller.over_limit(started=100.0) is None
    now[0] += 1000
    assert controller.over_limit(started=100.0) == "the limit of 5,400 s device time"
    controller.ended(0, "failed", "")
    controller.ended(1, "failed", "")
    now[0] += 600
    assert controller.device_seconds() == 6000, "what is over costs no more"
    assert controller.over_limit(started=100.0) == "the limit of 3,600 s wall time"


def test_time_spent_before_a_resume_counts_for_the_device_limit(
    controller_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("rigsweep.sweeps.controller.time.monotonic", lambda: now[0])
    controller = controller_of()
    begin(controller)
    now[0] += 50
    controller.close("interrupted", "Ctrl-C")
    now[0] += 1000
    assert controller_of().device_seconds() == 50


# Going on.


def test_interrupted_trials_come_first_after_a_resume(controller_of: Make) -> None:
    controller = controller_of()
    for _ in range(3):
        begin(controller)
    report(controller, 1, 100_000, 2.0)
    controller.ended(1, "complete", "reached its budget")
    controller = controller_of()
    assert [controller.record.trials[number].state for number in range(3)] == ["interrupted", "complete", "interrupted"]
    assert [controller.next_trial() for _ in range(3)] == [0, 2, 3]


def test_a_lost_trial_goes_on_before_others_that_wait(controller_of: Make) -> None:
    controller = controller_of()
    for _ in range(3):
        begin(controller)
    controller = controller_of()
    assert begin(controller) == 0
    controller.lost(0, "its process was killed")
    assert [controller.next_trial() for _ in range(3)] == [0, 1, 2]


def test_a_trial_that_was_proposed_and_never_began_begins_after_a_resume(controller_of: Make) -> None:
    assert controller_of().next_trial() == 0
    assert controller_of().next_trial() == 0


def test_a_process_that_died_between_an_evaluation_and_the_stop_stops_that_trial_at_once(
    tmp_path: Path, path: Path
) -> None:
    sweep = sweep_of()
    whole = simulate(sweep, tmp_path / "whole.jsonl")
    lines = list(read(tmp_path / "whole.jsonl"))
    stop = next(i for i, event in enumerate(lines) if event.get("state") == "stopped")
    assert lines[stop - 1]["event"] == "report"
    number = lines[stop]["trial"]
    simulate(sweep, cut(tmp_path / "whole.jsonl", path, stop), most_events=0)
    trial = fold(path).trials[number]
    assert (trial.state, trial.reason) == ("stopped", whole.trials[number].reason)
    assert events(path, number).count("started") == 1, "it is not run again"


@pytest.mark.parametrize("torn", [b"", b'{"event": "report", "time": 17'])
def test_a_sweep_that_was_killed_at_any_event_makes_the_same_decisions(tmp_path: Path, torn: bytes) -> None:
    """One trial at a time, with noise: parameters, seeds, states, reasons, values and evaluations are the same."""
    sweep = sweep_of()
    whole = tmp_path / "whole.jsonl"
    expected = outcome(simulate(sweep, whole))
    amount = len(whole.read_bytes().splitlines())
    assert {trial["state"] for trial in expected.values()} == {"complete", "stopped"}
    # A torn line is the same to every event: every fifth is enough.
    for event in range(0, amount + 1, 5 if torn else 1):
        resumed = simulate(sweep, cut(whole, tmp_path / f"{event}.jsonl", event, torn))
        assert outcome(resumed) == expected, f"killed after event {event}"


HARD = SWEEP.replace("rule: asha,", "rule: asha, by: flops, within: model.width,").replace(
    "trials: 16", "trials: 12\nrepeats: 2"
)


def everything_goes_wrong(training: SurfaceTraining, share: float, attempt: int) -> str | None:
    rate = training.optimizer.learning_rate
    if training.model.width == 128:
        return "out_of_memory"
    if rate > 5e-3:
        return "diverged"
    if rate < 3e-4:
        return "failed"
    return "lost" if attempt == 0 and share > 0.2 and training.seed == 0 else None


def test_repeats_losses_and_faults_change_nothing_of_that(tmp_path: Path) -> None:
    sweep = sweep_of(HARD)
    whole = tmp_path / "whole.jsonl"
    record = simulate(sweep, whole, fault=everything_goes_wrong)
    expected = outcome(record)
    assert {trial["state"] for trial in expected.values()} >= {"complete", "out_of_memory", "diverged", "failed"}
    assert any(trial.lost for trial in record.trials.values())
    for event in range(1, len(whole.read_bytes().splitlines()), 3):
        resumed = simulate(sweep, cut(whole, tmp_path / f"{event}.jsonl", event), fault=everything_goes_wrong)
        assert outcome(resumed) == expected, f"killed after event {event}"


def test_a_sweep_that_is_killed_again_and_again_comes_to_the_same_end(tmp_path: Path, path: Path) -> None:
    sweep = sweep_of(SWEEP, "trials=10")
    expected = outcome(simulate(sweep, tmp_path / "whole.jsonl"))
    for _ in range(200):
        record = simulate(sweep, path, most_events=2)
        if record.closed:
            break
    assert outcome(record) == expected


def check_whole(sweep: Sweep, record: Record, path: Path) -> None:
    """No trial is lost or doubled, and each ends once."""
    amount = sweep.settings.trials * sweep.settings.repeats
    assert sorted(record.trials) == list(range(amount))
    kinds = Counter((event["event"], event.get("trial")) for event in read(path))
    for number, trial in record.trials.items():
        assert trial.state in ENDS
        assert kinds["proposed", number] == 1
        assert kinds["ended", number] == 1
        assert kinds["started", number] >= 1
        assert trial.reason
    rungs = rungs_of(sweep)
    for trial in record.trials.values():
        answers: Any = ClosedForm(sweep).answers(trial, rungs)
        told = {report["examples"]: report["metrics"] for report in answers}
        reports = {examples: report.metrics for examples, report in trial.reports.items()}
        assert reports.items() <= told.items()
        assert trial.state != "complete" or reports.keys() == told.keys()


@pytest.mark.parametrize("slots", [2, 5])
def test_several_at_once_lose_and_double_nothing_wherever_the_driver_was_killed(tmp_path: Path, slots: int) -> None:
    sweep = sweep_of()
    whole = tmp_path / "whole.jsonl"
    check_whole(sweep, simulate(sweep, whole, slots=slots), whole)
    for event in range(0, len(whole.read_bytes().splitlines()), 4):
        path = cut(whole, tmp_path / f"{event}.jsonl", event)
        check_whole(sweep, simulate(sweep, path, slots=slots), path)


def test_two_thousand_trials_lose_and_double_nothing_when_the_driver_is_killed_half_way(tmp_path: Path) -> None:
    sweep = sweep_of(SWEEP, "searcher=random", "trials=2000")
    whole = tmp_path / "whole.jsonl"
    simulate(sweep, whole, slots=2, most_events=4000)
    path = cut(whole, tmp_path / "resumed.jsonl", len(whole.read_bytes().splitlines()) - 3, b'{"event": "rep')
    check_whole(sweep, simulate(sweep, path, slots=2), path)


def test_more_trials_can_be_asked_for_at_a_resume_and_fewer(path: Path) -> None:
    assert len(simulate(sweep_of(SWEEP, "trials=4"), path).trials) == 4
    assert len(simulate(sweep_of(SWEEP, "trials=6"), path).trials) == 6
    assert len(simulate(sweep_of(SWEEP, "trials=2"), path).trials) == 6


def test_a_sweep_of_thousands_of_trials_looks_at_each_a_constant_number_of_times(path: Path) -> None:
    """No event may walk through all trials, or a long sweep would become slower the longer it is."""
    sweep = sweep_of(SWEEP, "searcher=random", "trials=600", "base.evaluation.every=100%")
    looks = 0

    class Counted(dict[int, Any]):
        def __iter__(self) -> Iterator[int]:
            nonlocal looks
            looks += len(self)
            return super().__iter__()

        def values(self) -> Any:
            nonlocal looks
            looks += len(self)
            return super().values()

        def items(self) -> Any:
            nonlocal looks
            looks += len(self)
            return super().items()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rigsweep.sweeps.history.Record", lambda: Record(trials=Counted()))
        simulate(sweep, path, slots=4, fault=no_fault)
    assert len(fold(path).trials) == 600
    assert looks <= 600 * 3
