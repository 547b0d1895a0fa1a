"""Energy and cost of trials: what is recorded, what follows from prices, where a sweep ends, how it is shown."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rigsweep.cluster.cards import Card
from rigsweep.cluster.node_settings import Hardware, Node, Power, Prices
from rigsweep.sweeps import folders, report, views
from rigsweep.sweeps.controller import Controller
from rigsweep.sweeps.files import WrongInput
from rigsweep.sweeps.history import VERSION, History, fold, read
from rigsweep.sweeps.money import Rates, prices_of, rates_of, refuse_unmeasured, refuse_unpriced
from rigsweep.sweeps.planning import plan_sweep, plan_table
from rigsweep.sweeps.simulation import ClosedForm, Simulation, rungs_of
from rigsweep.sweeps.summary import summarise
from rigsweep.sweeps.sweep import Sweep, changed
from rigsweep.sweeps.tables import summary_panel, trials_table

from .simulator import SWEEP, sweep_of

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
CPU = Card(0, "cpu", "CPU, 1 thread", "cpu-0", 2**30, threads=1)
PHASES = {"start_up": 1.0, "computing": 7.0, "evaluation": 2.0}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Driven:
    """A controller on a history, both by one clock, driven by hand."""

    def __init__(self, path: Path, rates: Rates, *overrides: str):
        self.clock, self.path = Clock(), path
        self._histories: list[History] = []
        self.open(rates, *overrides)

    def open(self, rates: Rates, *overrides: str) -> None:
        """Begin, or go on after the process was gone."""
        self.close()
        self.sweep = sweep_of(SWEEP, "early_stopping.rule=none", *overrides)
        self._histories = [History(self.path, clock=lambda: 1e9 + self.clock.now)]
        cards = [{"identity": f"GPU-{i}", "name": "RTX 3090", "index": i} for i in range(2)]
        self._histories[0].append("opened", version=VERSION, sweep="simulated", cards=cards, rates=rates.as_dict())
        self.controller = Controller(self.sweep, self._histories[0], rungs_of(self.sweep), clock=self.clock)

    def begin(self, card: int = 0) -> int:
        number = self.controller.next_trial()
        assert number is not None
        self.controller.started(number, "here", ["RTX 3090"], 1, [f"GPU-{card}"])
        return number

    def report(self, number: int, examples: int) -> None:
        told = {"examples": examples, "total": 100_000, "flops": 1.0, "seconds": 1.0, "checkpoint": None}
        self.controller.reported(number, told | {"metrics": {"validation/loss": 3.0}})

    def close(self) -> None:
        for history in self._histories:
            history.close()


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Callable[..., Driven]]:
    made: list[Driven] = []

    def make(rates: Rates, *overrides: str) -> Driven:
        made.append(Driven(tmp_path / "history.jsonl", rates, *overrides))
        return made[-1]

    yield make
    for one in made:
        one.close()


def usage(joules: float | None, phases: dict[str, float] = PHASES) -> dict[str, Any]:
    return {"energy_joules": joules, "phases": phases}


def shown(renderable: Any) -> str:
    console = Console(width=240, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


# What is recorded.


def test_an_end_has_the_energy_and_the_phases_that_were_last_heard(driven: Callable[..., Driven]) -> None:
    run = driven(Rates())
    number = run.begin()
    run.controller.heard(number, usage(100.0))
    run.controller.heard(number, usage(250.0))
    run.report(number, 100_000)
    run.controller.ended(number, "complete", "reached its budget")
    *_, end = read(run.path)
    assert (end["energy_joules"], end["phases"]) == (250.0, PHASES)
    trial = fold(run.path).trials[number]
    assert (trial.energy_joules, trial.phases) == (250.0, PHASES)


def test_energy_adds_up_over_attempts_whatever_was_told_of_each_in_between(driven: Callable[..., Driven]) -> None:
    run = driven(Rates())
    number = run.begin()
    run.controller.heard(number, usage(100.0))
    run.report(number, 25_000)
    run.controller.heard(number, usage(150.0))
    run.controller.lost(number, "its worker process died")
    assert run.begin(card=1) == number
    run.controller.heard(number, usage(30.0))
    run.report(number, 50_000)
    run.open(Rates())  # the sweep's process was killed: what the last report said is what is known
    assert run.controller.record.trials[number].energy_joules == 180.0
    assert run.begin() == number
    run.controller.heard(number, usage(20.0))
    run.report(number, 100_000)
    run.controller.ended(number, "complete", "reached its budget")
    trial = fold(run.path).trials[number]
    assert trial.energy_joules == 200.0
    assert trial.phases == {phase: 3 * seconds for phase, seconds in PHASES.items()}


def test_what_was_heard_of_one_attempt_is_not_the_next_ones(driven: Callable[..., Driven]) -> None:
    run = driven(Rates())
    number = run.begin()
    run.controller.heard(number, usage(100.0))
    run.controller.lost(number, "its worker process died")
    run.controller.heard(number, usage(170.0))  # too late
    assert run.begin() == number
    run.controller.lost(number, "its worker process died")
    assert fold(run.path).trials[number].energy_joules == 100.0


def test_nothing_measured_is_not_zero(driven: Callable[..., Driven]) -> None:
    run = driven(Rates(kwh=0.25))
    number = run.begin()
    run.controller.heard(number, usage(None))
    run.clock.now += 10
    run.controller.ended(number, "failed", "ValueError: no")
    trial = summarise(run.sweep, fold(run.path))["trials"][number]
    assert (trial["energy_kwh"], trial["cost"]) == (None, None)
    assert "energy_joules" not in list(read(run.path))[-1]


# What it costs.


def test_the_reference_box_pays_by_the_card_hour_what_its_cards_do_not_measure() -> None:
    node = Node(
        prices=Prices(kwh=0.25, currency="£"), power=Power(box_watts=1000), hardware=Hardware(card="RTX 3090", count=2)
    )
    card = Card(0, "cuda", "RTX 3090", "planned-0", 24 * 2**30, threads=1)
    rates = rates_of(sweep_of(), node, [card])
    assert (rates.card_watts, rates.per_card_hour) == (500, 0.125)
    assert rates.cost(None, 3600) == pytest.approx(0.125)
    assert rates.energy_joules(None, 3600) == 1.8e6


def test_measured_energy_goes_before_what_is_assumed_and_the_cpus_share_is_added() -> None:
    rates = Rates(kwh=0.5, cpu_watts=100, card_watts=500)
    assert rates.energy_joules(1.0e6, 1000) == 1.1e6
    assert rates.cost(3.5e6, 1000) == pytest.approx(0.5)


def test_a_card_hour_is_paid_whatever_it_drew() -> None:
    rates = Rates(kwh=0.25, card_hour=2.0)
    assert rates.cost(None, 1800) == rates.cost(5e6, 1800) == 1.0
    assert rates.cost(None, 0) is None


def test_the_sweeps_prices_go_before_the_nodes() -> None:
    node = Node(prices=Prices(kwh=0.25))
    assert prices_of(sweep_of(), node).kwh == 0.25
    assert prices_of(sweep_of(SWEEP, "prices={card_hour: 0.4}"), node) == Prices(card_hour=0.4)


def test_an_amount_is_written_as_one_says_it() -> None:
    rates = Rates(currency="£")
    assert [rates.money(amount) for amount in (0.125, 12.3456, 0, 0.000421)] == [
        "£0.125",
        "£12.35",
        "£0.00",
        "£0.000421",
    ]


def test_prices_may_change_on_a_resume_and_hold_for_all_of_the_sweep(driven: Callable[..., Driven]) -> None:
    assert not changed(sweep_of(), sweep_of(SWEEP, "prices={kwh: 0.3}", "limits.cost=4"))
    run = driven(Rates(kwh=0.25))
    number = run.begin()
    run.clock.now += 3600
    run.controller.heard(number, usage(3.6e6))
    run.controller.ended(number, "failed", "ValueError: no")
    assert summarise(run.sweep, fold(run.path))["cost"] == pytest.approx(0.25)
    run.open(Rates(kwh=0.5, currency="€"))
    told = summarise(run.sweep, fold(run.path))
    assert (told["cost"], told["energy_kwh"], told["currency"]) == (pytest.approx(0.5), 1.0, "€")


def test_the_prices_of_a_sweep_survive_in_its_folder(tmp_path: Path) -> None:
    sweep = sweep_of(SWEEP, "prices={kwh: 0.3, currency: £}", "limits.cost=2")
    folders.write_settings(sweep, tmp_path)
    again = folders.read_sweep(tmp_path)
    assert (again.settings.prices, again.settings.limits.cost) == (Prices(kwh=0.3, currency="£"), 2)


# Where a sweep ends.


def test_a_sweep_ends_at_its_cost_limit_running_trials_included(driven: Callable[..., Driven]) -> None:
    run = driven(Rates(card_hour=3.6, currency="£"), "limits.cost=0.1")
    first, second = run.begin(), run.begin(card=1)
    run.clock.now += 30
    run.controller.ended(first, "failed", "ValueError: no")
    assert run.controller.cost() == pytest.approx(0.06)
    run.clock.now += 39
    assert run.controller.over_limit(0) is None
    run.clock.now += 1
    assert run.controller.cost() == pytest.approx(0.1)
    assert run.controller.over_limit(0) == "the cost limit of £0.1"
    assert run.controller.record.trials[second].state == "running"


def test_a_cost_limit_counts_the_energy_that_running_trials_were_last_heard_to_have_used(
    driven: Callable[..., Driven],
) -> None:
    run = driven(Rates(kwh=1.0), "limits.cost=1")
    number = run.begin()
    run.clock.now += 10
    run.controller.heard(number, usage(2.0e6))
    run.report(number, 25_000)
    run.controller.heard(number, usage(3.5e6))
    assert run.controller.cost() == pytest.approx(3.5 / 3.6)
    assert run.controller.over_limit(0) is None
    run.controller.heard(number, usage(3.7e6))
    assert run.controller.over_limit(0) == "the cost limit of $1.00"


def test_a_simulated_sweep_spends_no_more_than_its_limit_by_much(tmp_path: Path) -> None:
    sweep = sweep_of(SWEEP, "limits.cost=0.5", "early_stopping.rule=none")
    with Simulation(sweep, tmp_path / "history.jsonl", ClosedForm(sweep), rungs_of(sweep), slots=2) as simulation:
        rates = Rates(card_hour=3.6)
        simulation.controller.record.opened["rates"] = rates.as_dict()
        controller = simulation.controller
        while not controller.closing and simulation.step():
            controller.closing = controller.over_limit(0.0)
    assert controller.closing == "the cost limit of $0.5"
    assert 0.5 <= controller.cost() < 0.8
    assert 0 < sum(trial.over for trial in controller.record.trials.values()) < 16


def test_a_cost_limit_without_any_price_is_refused_in_one_line() -> None:
    sweep = sweep_of(SWEEP + "limits: {cost: 5}\n")
    with pytest.raises(WrongInput) as error:
        refuse_unpriced(sweep, Node())
    assert str(error.value).startswith("simulated.yaml:19: limits.cost: no price is known; give `prices: {card_hour")
    refuse_unpriced(sweep, Node(prices=Prices(kwh=0.2)))
    refuse_unpriced(sweep_of(), Node())


def test_a_cost_limit_by_energy_that_nothing_measures_is_refused_in_one_line() -> None:
    sweep = sweep_of(SWEEP, "limits.cost=5", "prices.kwh=0.2")
    with pytest.raises(WrongInput, match=r"limits\.cost: the energy of CPU, 1 thread cannot be measured; give prices"):
        refuse_unmeasured(sweep, rates_of(sweep, Node(), [CPU]), [CPU])
    node = Node(power=Power(box_watts=60))
    refuse_unmeasured(sweep, rates_of(sweep, node, [CPU]), [CPU])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prices.kwh=-0.1", "--set prices.kwh=-0.1: prices.kwh: allowed: at least 0, found -0.1"),
        ("limits.cost=0", "--set limits.cost=0: limits.cost: allowed: more than 0, found 0"),
        ("prices.kw=1", "--set prices.kw=1: prices.kw: no such key; did you mean kwh?"),
    ],
)
def test_wrong_prices_are_refused_in_one_line(override: str, message: str) -> None:
    with pytest.raises(WrongInput) as error:
        sweep_of(SWEEP, override)
    assert str(error.value) == message


# How it is shown.


def spent(run: Driven) -> None:
    """A trial that took an hour and a kilowatt-hour, and one that is waiting."""
    number = run.begin()
    run.clock.now += 3600
    run.controller.heard(number, usage(3.6e6))
    run.report(number, 100_000)
    run.controller.ended(number, "complete", "reached its budget")
    run.controller.next_trial()


def test_the_table_has_energy_and_cost_only_where_they_are_known(driven: Callable[..., Driven]) -> None:
    run = driven(Rates(kwh=0.25, currency="£"))
    spent(run)
    trials = list(run.controller.record.trials.values())
    priced = shown(trials_table(run.sweep, trials, {}, best=None, rates=Rates(kwh=0.25, currency="£")))
    assert "kWh" in priced
    assert "£0.25" in priced
    unpriced = shown(trials_table(run.sweep, trials, {}, best=None, rates=Rates()))
    assert "kWh" in unpriced
    assert "cost" not in unpriced
    trials[0].energy_joules = None
    assert "kWh" not in shown(trials_table(run.sweep, trials, {}, best=None, rates=Rates()))


def test_the_summary_says_whether_energy_was_measured(driven: Callable[..., Driven]) -> None:
    run = driven(Rates(kwh=0.25, currency="£"))
    spent(run)
    told = summarise(run.sweep, run.controller.record)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert "energy  1 kWh (measured), £0.25" in shown(summary_panel(run.sweep, run.controller.record, told))
    run.open(Rates(card_watts=500, card_hour=0.1))
    run.controller.record.trials[0].energy_joules = None
    told = summarise(run.sweep, run.controller.record)
    assert "0.5 kWh (estimated), $0.1" in shown(summary_panel(run.sweep, run.controller.record, told))


def test_the_report_has_energy_cost_and_what_the_cards_did(driven: Callable[..., Driven]) -> None:
    run = driven(Rates(kwh=0.25, currency="£"))
    spent(run)
    folders.write_settings(run.sweep, run.path.parent)
    run.close()
    folder, sweep = run.path.parent, folders.read_sweep(run.path.parent)
    record = folders.record_of(folder)
    page = report.render(report.tell(sweep, record, folder, views.told_of(sweep, folder, record, running=False)))
    assert "1 kWh (measured), £0.25" in page
    assert "What the cards did" in page
    assert "0: RTX 3090" in page
    assert '<i class="cause-computing" style="width: 0.19%">' in page
    assert "no trial to run" in page


def test_a_report_without_prices_or_cards_says_nothing_of_them(tmp_path: Path) -> None:
    from .test_report import made, page_of

    page = page_of(made(tmp_path, "plain"))
    assert "What the cards did" not in page
    assert "kWh" not in page


def test_a_plan_says_what_it_will_cost(tmp_path: Path) -> None:
    from rigsweep.sweeps.node_file import read_node

    def planned(sweep: Sweep, node: Node) -> tuple[dict[str, Any], str]:
        plan = plan_sweep(sweep, tmp_path, lambda *_: None, tmp_path / "runs", node=node)
        return plan, shown(plan_table(plan))

    box, sweep = read_node("two-3090"), sweep_of(SWEEP, "base.budget.examples=1B", "limits.cost=3")
    plan, text = planned(sweep, box)
    hours = plan["card_seconds_with_stopping"] / 3600
    assert plan["price_per_card_hour"] == 0.125
    assert plan["cost"] == pytest.approx(0.125 * hours)
    assert plan["energy_kwh"] == pytest.approx(0.5 * hours)
    assert "at £0.125 a card-hour" in text
    assert "kWh at 500 W a card" in text
    assert "cost limit  £3.00" in text
    plan, text = planned(sweep_of(), Node(hardware=box.hardware, prices=box.prices))
    assert (plan["cost"], plan["energy_kwh"]) == (None, None)
    assert "by the energy that the cards measure" in text
    plan, text = planned(sweep_of(), Node(hardware=box.hardware))
    assert plan["cost"] is None
    assert "cost" not in text
