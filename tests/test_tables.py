"""What a person sees of a sweep in a terminal."""

from typing import Any

import pytest
from rich.console import Console

from rigsweep.sweeps.history import Record, Report, Trial
from rigsweep.sweeps.summary import summarise
from rigsweep.sweeps.tables import LiveShow, outcome, ranked, summary_panel, trials_table

from .simulator import sweep_of


def trial_of(number: int = 3, state: Any = "running", **warnings: str) -> Trial:
    trial = Trial(number, number, 0, {"model.width": 64}, proposed=0.0, state=state)
    trial.warnings = {rule.replace("_", "-"): reason for rule, reason in warnings.items()}
    return trial


def shown(part: Any) -> str:
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(part)
    return capture.get()


def test_where_a_trial_stands_has_what_was_warned_of() -> None:
    assert outcome(trial_of()) == "running"
    assert outcome(trial_of(low_mfu="it is 12%", no_progress="none")) == "running ⚠ low-mfu, no-progress"
    ended = trial_of(state="diverged", gradient_norm="it rose")
    ended.reason = "the loss followed"
    assert outcome(ended) == "diverged ⚠ gradient-norm: the loss followed"


def test_the_table_of_trials_shows_warnings() -> None:
    table = trials_table(sweep_of(), [trial_of(low_mfu="it is 12%")], {}, best=None)
    assert "running ⚠ low-mfu" in shown(table)


def test_the_summary_says_each_warning_once_with_its_trials() -> None:
    sweep = sweep_of()
    trials = [trial_of(n, "complete", low_mfu=f"the MFU is {n}%") for n in range(12)]
    trials.append(trial_of(12, "complete", no_progress="the loss is flat"))
    record = Record(trials={trial.number: trial for trial in trials})
    for trial in trials:
        trial.value = 1.0
    lines = [line.strip() for line in shown(summary_panel(sweep, record, summarise(sweep, record))).splitlines()]
    assert [line for line in lines if "⚠" in line] == [
        "warning  ⚠ low-mfu (trials 0, 1, 2, 3, 4, 5, 6, 7 …): the MFU is 0%",
        "warning  ⚠ no-progress (trial 12): the loss is flat",
    ]


def test_without_a_terminal_a_warning_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    show = LiveShow(sweep_of())
    with show:
        show.event("warned", trial_of(low_mfu="it is 12%", no_progress="the loss is flat"))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("trial 3: ⚠ no-progress: the loss is flat")


def test_complete_trials_are_ranked_by_their_value_whatever_their_budgets() -> None:
    def complete(number: int, examples: int, value: float) -> Trial:
        trial = Trial(number, number, 0, {}, proposed=0.0, state="complete", value=value)
        trial.reports[examples] = Report(examples, examples, 0.0, 1.0, {"validation/loss": value}, 0.0)
        return trial

    short, long = complete(0, 100, 1.0), complete(1, 200, 2.0)
    assert ranked(sweep_of(), [long, short]) == [short, long]
