"""What early stopping saves and what it loses: the frontier over rules, on recorded and on crossing curves.

`quickstart_curves.json` has 16 trials of the quickstart's space, drawn at random and trained to their end. To record
them anew (half an hour on two slow cores):

    rigsweep sweep quickstart --runs R --set searcher=random --set early_stopping.rule=none \
        --set base.evaluation.every=2.5%
    python tests/benchmarks/bench_saving.py R/quickstart

Other programs ran beside some of the trials, so that the seconds of each are smoothed: all trials of a width take the
same time for an example, the median of theirs. The curves are replayed in 1,000 orders, the base first. *Kept*: in so
many orders the best trial, or one whose final loss is within 1% of it, ran to its end.

The recorded curves hardly cross after 10% of the budget, and a rule tuned to them alone would be too sure of itself.
So each is also tried on closed-form curves that do: a higher learning rate or a longer warm-up starts slower and ends
better, with noise; ten draws of 16 trials. The guess in `forecast` was chosen on others (smaller and larger effects
of both, that fade sooner and later), not on these.

Where trials are compared within groups, each group's best has to run to its end: no rule that keeps them can spend
less than one that knows every end, which stands last.
"""

import json
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rigsweep.sweeps import folders, saving
from rigsweep.sweeps.history import Report, Trial
from rigsweep.sweeps.sweep import Sweep, load

DATA = Path(__file__).with_name("quickstart_curves.json")
METRIC, WITHIN = "validation/loss", "model.width"
ORDERS, DRAWS = 1000, 10
SPENT, KEPT = 0.50, 0.90


def rows() -> Iterator[tuple[object, ...]]:
    """A row a rule and number of slots; the default's has the goal."""
    sweep = load("quickstart")
    default = saving.with_stopping(sweep, rule=None, grace=None, chance=None, within=None)
    curves, crossing = recorded_curves(), [crossing_curves(draw) for draw in range(DRAWS)]
    for one in frontier(sweep):
        for slots in (1, 2):
            told = saving.save(one, curves, saving.orders(curves, ORDERS, 0), slots=slots)
            crossed = [saving.save(one, own, saving.orders(own, ORDERS // DRAWS, 0), slots=slots) for own in crossing]
            asked = saving.describe(one) == saving.describe(default)
            yield (
                f"{saving.describe(one)}; {slots} at once",
                f"{told.spent[0]:.2f} of the device time ({told.spent[1]:.2f} to {told.spent[2]:.2f})",
                f"kept {told.close_kept:.0%} (the best itself {told.best_kept:.0%})",
                f"crossing curves: {statistics.fmean(c.spent[0] for c in crossed):.2f}, "
                f"kept {statistics.fmean(c.close_kept for c in crossed):.0%}",
                f"at most {SPENT:.2f}, kept {KEPT:.0%}" if asked else "",
                (told.spent[0] <= SPENT and told.close_kept >= KEPT) if asked else None,
            )
    for within in (None, WITHIN):
        known = statistics.median(foreseen(curves, order, within) for order in saving.orders(curves, ORDERS, 0))
        name = "a rule that knows every end" + (f", within {within}" if within else "")
        yield name, f"{known:.2f} of the device time", "", "", "", None


def frontier(sweep: Sweep) -> list[Sweep]:
    """The sweep under each rule to compare."""
    found: list[Sweep] = []
    for within in (None, WITHIN):
        found += saving.variants(sweep, ["forecast"], within=[within], chance=["5%", "10%", "20%"])
        found += saving.variants(sweep, ["asha"], within=[within], grace=["10%", "20%"], reduction=[2, 3, 4])
        found += saving.variants(sweep, ["median"], within=[within], grace=["10%", "20%"])
    return found


def foreseen(curves: Sequence[saving.Curve], order: Sequence[saving.Curve], within: str | None) -> float:
    """The share of the device time if whatever does not beat the best before it (in its group) ended at 10%."""
    spent, best = 0.0, dict[object, float]()
    for curve in order:
        group, final = curve.trial.parameters.get(within or ""), curve.reports[-1].metrics[METRIC]
        runs = curve.trial.number == 0 or final < best.get(group, math.inf)
        spent += curve.reports[-1 if runs else 0].seconds
        best[group] = min(best.get(group, math.inf), final)
    return spent / sum(curve.reports[-1].seconds for curve in curves)


def recorded_curves() -> list[saving.Curve]:
    """The recorded trials at every 10% of their budget, as the quickstart evaluates them."""
    kept = json.loads(DATA.read_text())
    pace: dict[int, list[float]] = {}
    for trial in kept["trials"]:
        pace.setdefault(trial["parameters"][WITHIN], []).append(trial["seconds"][-1] / kept["examples"][-1])
    return [
        saving.Curve(
            Trial(trial["number"], trial["number"], 0, trial["parameters"], proposed=0.0, state="complete"),
            tuple(
                Report(
                    examples,
                    kept["examples"][-1],
                    examples * trial["flops_per_example"],
                    examples * statistics.median(pace[trial["parameters"][WITHIN]]),
                    {METRIC: loss},
                    time=0.0,
                )
                for examples, loss in zip(kept["examples"], trial["validation_loss"], strict=True)
            )[3::4],
        )
        for trial in kept["trials"]
    ]


def crossing_curves(seed: int) -> list[saving.Curve]:
    """Sixteen trials whose order changes until about a third of the budget."""
    generator = random.Random(seed)
    curves = []
    for number in range(16):
        rate, warmup, width = (
            10 ** generator.uniform(-4, -2),
            generator.uniform(0, 0.1),
            generator.choice([64, 96, 128]),
        )
        if number == 0:
            rate, warmup, width = 1e-3, 0.02, 96
        off = math.log10(rate / (6e-3 / math.sqrt(width / 64)))
        end = 5.2 + 0.5 * off**2 - 0.1 * math.log2(width / 64) + generator.gauss(0, 0.02)
        slow = 0.3 * (off + 2) + 12 * warmup
        reports = []
        for tenth in range(1, 11):
            share = tenth / 10
            loss = end + (8.3 - end) * ((1 + 12 * share) ** -0.8 - 13**-0.8) + slow * math.exp(-share / 0.2)
            examples = 30_000 * tenth
            metrics = {METRIC: loss + generator.gauss(0, 0.01)}
            reports.append(Report(examples, 300_000, examples * 6.0 * width**2, share * width, metrics, time=0.0))
        parameters = {"optimizer.learning_rate": rate, "schedule.warmup": warmup, WITHIN: width}
        curves.append(saving.Curve(Trial(number, number, 0, parameters, proposed=0.0), tuple(reports)))
    return curves


def keep(folder: Path) -> None:
    """Write the complete trials of a sweep's folder as data of the benchmark."""
    curves = saving.complete_curves(folders.read_sweep(folder), folders.record_of(folder))
    examples = [report.examples for report in curves[0].reports]
    assert all([report.examples for report in curve.reports] == examples for curve in curves)
    trials = [
        {
            "number": curve.trial.number,
            "parameters": curve.trial.parameters,
            "flops_per_example": curve.reports[-1].flops / examples[-1],
            "seconds": [round(report.seconds, 2) for report in curve.reports],
            "validation_loss": [round(report.metrics[METRIC], 4) for report in curve.reports],
        }
        for curve in curves
    ]
    lines = ",\n  ".join(json.dumps(trial) for trial in trials)
    DATA.write_text(f'{{"examples": {json.dumps(examples)},\n "trials": [\n  {lines}]}}\n')


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
