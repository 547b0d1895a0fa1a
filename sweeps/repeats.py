"""The repeats of a configuration taken together: what a searcher sees of them."""

import statistics

from .history import Trial


def outcome(repeats: list[Trial]) -> tuple[str, float | None, str]:
    """What became of a configuration whose repeats are all over: its state, the mean of their values, a reason."""
    states = {trial.state for trial in repeats}
    worst = ("out_of_memory", "diverged", "stopped", "failed", "complete")
    state = next(state for state in worst if state in states)
    values = [trial.value for trial in repeats if trial.value is not None]
    reason = max(repeats, key=lambda trial: trial.state != "complete").reason
    return state, statistics.fmean(values) if values else None, reason


def mean_at(repeats: list[Trial], examples: int, metric: str) -> float | None:
    """The mean of a metric over those repeats that were evaluated after so many examples."""
    reports = [trial.reports[examples] for trial in repeats if examples in trial.reports]
    values = [report.metrics[metric] for report in reports if metric in report.metrics]
    return statistics.fmean(values) if values else None
