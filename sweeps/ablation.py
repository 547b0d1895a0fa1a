"""What an ablation says: each change alone against the base, paired by seed.

A change and the base see the same data in the same order where they share a seed, so it is the differences
that are looked at, one a seed: their mean, and its 95% interval by Student's t (1908), which holds where they
scatter about normally. Of five changes that change nothing, one interval or more leaves out zero in a quarter
of all ablations; so "better" and "worse" are said after Holm's correction (1979, "A simple sequentially
rejective multiple test procedure") over all changes of the sweep: wrong about any of them in at most 5% of
ablations. What stands out alone but not among the others is "unclear": more seeds decide it.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from .history import Record, Trial
from .space import Parameters, word
from .sweep import Sweep

Verdict = Literal["better", "worse", "tie", "unclear"]

_LEVEL = 0.95
_ROUNDING = 1e-5
"""Differences below this share of the value come from float32 sums in another order."""


@dataclass(frozen=True)
class Change:
    """One change against the base. Without a verdict, `reason` says why; a ratio is the change's over the base's."""

    group: int
    key: str
    """The searched key that is changed."""
    before: Any
    after: Any
    seeds: int
    """Seeds with which both are complete: all that follows is of these."""
    base: float | None = None
    """The base's mean objective."""
    value: float | None = None
    """The change's mean objective."""
    difference: float | None = None
    """`value` - `base`."""
    interval: tuple[float, float] | None = None
    """Of the difference, 95%; None with one seed."""
    p_value: float | None = None
    """That chance alone makes such a difference, corrected for the number of changes."""
    verdict: Verdict | None = None
    reason: str = ""
    speed: float | None = None
    """Ratio of examples a second."""
    memory: float | None = None
    """Ratio of training's peak memory: of tensors on a GPU, of the whole process, PyTorch included, on a CPU."""
    card_time: float | None = None
    """Ratio of card-seconds over the whole trial, compiling and evaluating included."""

    @property
    def what(self) -> str:
        """`model.qk_norm: true → false`."""
        return f"{self.key}: {word(self.before)} → {word(self.after)}"

    @property
    def outcome(self) -> str:
        """The verdict, or why there is none; `better (2 of 3 seeds)`."""
        return f"{self.verdict} ({self.reason})" if self.verdict and self.reason else self.verdict or self.reason

    @property
    def difference_text(self) -> str:
        """`-0.0123 ± 0.0045`, to two digits of the uncertainty; empty without a difference."""
        if self.difference is None:
            return ""
        half = (self.interval[1] - self.interval[0]) / 2 if self.interval else 0.0
        if not half:
            return f"{self.difference:+.3g}" if self.difference else "0"
        digits = 1 - math.floor(math.log10(half))
        if digits > 6:
            return f"{self.difference:+.1e} ± {half:.0e}"
        return f"{self.difference:+.{max(0, digits)}f} ± {half:.{max(0, digits)}f}"


def is_ablation(sweep: Sweep) -> bool:
    """Whether a sweep is one."""
    return sweep.settings.searcher == "ablation"


def compare(sweep: Sweep, record: Record) -> list[Change]:
    """Every change that has been begun, in the order of the file, with what is known of it so far."""
    groups = record.groups()
    if 0 not in groups:
        return []
    base = groups.pop(0)
    changes = [_compare(sweep, base, members) for _, members in sorted(groups.items())]
    return _judged(changes, sweep.settings.trials - 1, sweep)


def as_dict(change: Change) -> dict[str, Any]:
    """For `summary.json`."""
    return asdict(change) | {"interval": list(change.interval) if change.interval else None}


def _compare(sweep: Sweep, base: list[Trial], members: list[Trial]) -> Change:
    """A change by itself; its verdict waits for the others."""
    repeats = sweep.settings.repeats
    before, after = ({trial.number % repeats: trial for trial in side} for side in (base, members))
    key, old, new = _changed(sweep, base[0].parameters, members[0].parameters)
    both = [(before[k], after[k]) for k in sorted(before.keys() & after.keys())]
    pairs = [(one, other) for one, other in both if _is_complete(one) and _is_complete(other)]
    lost = _ends_without_value(members, repeats)
    change = Change(members[0].group, key, old, new, len(pairs), reason=lost or _seeds(base, len(pairs), repeats))
    if not pairs:
        return change
    values = [(one.value or 0.0, other.value or 0.0) for one, other in pairs]
    differences = [other - one for one, other in values]
    interval, p_value = _student(differences) if len(pairs) > 1 else (None, None)
    return replace(
        change,
        base=statistics.fmean(one for one, _ in values),
        value=statistics.fmean(other for _, other in values),
        difference=statistics.fmean(differences),
        interval=interval,
        p_value=None if lost else p_value,  # what survived is no fair sample
        speed=_ratio(pairs, _speed),
        memory=_ratio(pairs, _memory),
        card_time=_ratio(pairs, lambda trial: trial.seconds),
    )


def _changed(sweep: Sweep, base: Parameters, parameters: Parameters) -> tuple[str, Any, Any]:
    """The key that was changed. Where it brings others with it, it is the first: conditions come last."""
    for dimension in sweep.space.dimensions:
        old, new = base.get(dimension.key), parameters.get(dimension.key)
        if old != new:
            return dimension.key, old, new
    return "nothing", None, None


def _is_complete(trial: Trial) -> bool:
    return trial.state == "complete" and trial.value is not None


def _ends_without_value(trials: list[Trial], repeats: int) -> str:
    """`1 of 3 diverged`; empty where none of the trials has ended so."""
    ends = Counter(trial.state.replace("_", " ") for trial in trials if trial.over and not _is_complete(trial))
    return ", ".join(f"{n} of {repeats} {state}" for state, n in ends.items())


def _seeds(base: list[Trial], pairs: int, repeats: int) -> str:
    """Of how many seeds a comparison is, if not of all."""
    if not pairs and (lost := _ends_without_value(base, repeats)):
        return f"the base: {lost}"
    if pairs == repeats == 1:
        return "one seed"
    return f"{pairs} of {repeats} seeds" if pairs < repeats else ""


def _student(differences: list[float]) -> tuple[tuple[float, float], float]:
    """The 95% interval of the mean difference, and the two-sided p-value of it being zero."""
    from scipy.special import stdtr, stdtrit  # what scipy.stats.t is made of, and loads in a tenth of the time

    mean, freedom = statistics.fmean(differences), len(differences) - 1
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    if not error:
        return (mean, mean), float(mean == 0)
    half = float(stdtrit(freedom, (1 + _LEVEL) / 2)) * error
    return (mean - half, mean + half), 2 * float(stdtr(freedom, -abs(mean) / error))


def _judged(changes: list[Change], family: int, sweep: Sweep) -> list[Change]:
    """The changes with their verdicts; what has no p-value yet counts as one that will be found equal."""
    corrected = holm({c.group: c.p_value for c in changes if c.p_value is not None}, family)
    return [_verdict(replace(c, p_value=corrected.get(c.group)), sweep) for c in changes]


def holm(p_values: dict[int, float], family: int) -> dict[int, float]:
    """P-values corrected for a family of so many comparisons (Holm 1979), of which these are known."""
    corrected: dict[int, float] = {}
    largest = 0.0
    for rank, (name, p_value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (family - rank) * p_value))
        corrected[name] = largest
    return corrected


def _verdict(change: Change, sweep: Sweep) -> Change:
    if change.interval is None or change.p_value is None or change.difference is None:
        return change
    low, high = change.interval
    same = abs(change.difference) <= _ROUNDING * abs(change.base or 0.0)
    if same or low <= 0 <= high:
        return replace(change, verdict="tie")
    if change.p_value > 1 - _LEVEL:
        return replace(change, verdict="unclear", reason="add seeds")
    return replace(change, verdict="better" if sweep.sign * change.difference < 0 else "worse")


def _ratio(pairs: list[tuple[Trial, Trial]], of: Callable[[Trial], float | None]) -> float | None:
    """The median over the pairs of the change's quantity over the base's."""
    both = [(of(one), of(other)) for one, other in pairs]
    ratios = [other / one for one, other in both if one and other]
    return statistics.median(ratios) if ratios else None


def _speed(trial: Trial) -> float | None:
    found = _metric(trial, "speed/examples_per_second")
    return statistics.median(found) if found else None


def _memory(trial: Trial) -> float | None:
    # The peak before the first evaluation, which needs memory of its own that no switch changes.
    first = trial.reports[min(trial.reports)] if trial.reports else None
    return first.metrics.get("memory/peak_bytes") if first else None


def _metric(trial: Trial, name: str) -> list[float]:
    return [report.metrics[name] for report in trial.reports.values() if name in report.metrics]
