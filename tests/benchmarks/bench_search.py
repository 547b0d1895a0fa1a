"""Searching: `tpe` with the settings' own early stopping against random search and Optuna's own TPE, in closed form.

Five surfaces, each a function from a training to its loss at a share of the budget, with a search space of three to
seven keys, conditional ones among them, and noise on every evaluation. All searchers begin at the same base and
have 64 configurations, one trial at a time. Device time is in full budgets: a trial that is stopped after 10% of
its budget costs 0.1. A search stands at any time where its complete trial with the best (noisy) final value stands;
its *true loss* is that trial's final loss without noise.

- *reaching random's best*: the device time after which the true loss of `tpe` with stopping is at most that of
  random search without stopping after 64 trials, over the 64 budgets that random search took; the median over
  20 seeds (one that never gets there counts as infinite). Goal: at most a third.
- *against Optuna*: the gain of the true loss over the base after 64 trials, over that of Optuna's `TPESampler` with
  its defaults, asked and told without stopping (so after 64 budgets, where ours has spent less than half of them);
  medians over 20 seeds. Goal: at least 0.95 on every surface.
"""

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from rigsweep.sweeps import files
from rigsweep.sweeps.history import Trial
from rigsweep.sweeps.simulation import Answer, Simulation
from rigsweep.sweeps.study import Study
from rigsweep.sweeps.sweep import Sweep, check

SEEDS = 20
DEFAULT, NEVER = "", "rule: none"
TRIALS = 64
STEPS = 20

Surface = Callable[[Any, float], float]
Course = list[tuple[float, float]]
"""Of each complete trial: the device time at its end, and its true loss if it is then the best by what was measured."""


def log_distance(value: float, best: float) -> float:
    """In decades."""
    return math.log10(value / best)


def power_law(floor: float, share: float, rate: float = 0.6) -> float:
    """A loss that falls towards its floor as a power of the budget."""
    return floor + 2.0 * (1 + 60 * share) ** -rate


def bowl(training: Any, share: float) -> float:
    """Learning rate, warm-up and weight decay about one optimum; the width moves the best learning rate."""
    optimizer, width = training.optimizer, training.model.width
    off = log_distance(optimizer.learning_rate, 3e-3 / math.sqrt(width / 64))
    decay = log_distance(optimizer.weight_decay, 0.1)
    floor = 2.0 - 0.1 * math.log2(width / 64) + 0.6 * off**2 + 0.1 * decay**2
    return power_law(floor + 4 * (training.schedule.warmup - 0.03) ** 2, share)


def valley(training: Any, share: float) -> float:
    """What counts is learning rate times weight decay, and only weakly either alone; a cliff at high rates."""
    rate, decay = training.optimizer.learning_rate, training.optimizer.weight_decay
    along, across = log_distance(rate / decay, 3e-2), log_distance(rate * decay, 3e-4)
    cliff = 3.0 * max(0.0, log_distance(rate, 2e-2)) ** 2
    return power_law(2.0 + 0.5 * across**2 + 0.03 * along**2 + cliff, share)


def schedules(training: Any, share: float) -> float:
    """Each decay of the schedule has another best learning rate, and one has a key of its own."""
    schedule = training.schedule
    best = {"cosine": 3e-3, "linear": 1e-3, "constant": 3e-4}[schedule.decay]
    floor = 2.0 + 0.5 * log_distance(training.optimizer.learning_rate, best) ** 2
    if schedule.decay == "linear":
        floor += 1.5 * (schedule.cooldown - 0.5) ** 2 - 0.12
    elif schedule.decay == "cosine":
        floor += 2.0 * (schedule.final - 0.05) ** 2
    else:
        floor += 0.1
    return power_law(floor, share)


def crossing(training: Any, share: float) -> float:
    """Low rates lead early and high ones end better: curves cross, which misleads a stopper."""
    off = log_distance(training.optimizer.learning_rate, 1e-2)
    floor = 2.0 + 0.4 * off**2 + 6 * (training.schedule.warmup - 0.05) ** 2
    floor += 0.2 * abs(math.log2(training.model.width / 128))
    return floor + 2.0 * (1 + 60 * share) ** -(0.6 - 0.06 * off)


def many(training: Any, share: float) -> float:
    """Seven keys of which three matter, two only where there is a moving average."""
    optimizer, schedule = training.optimizer, training.schedule
    floor = 2.0 + 0.5 * log_distance(optimizer.learning_rate, 2e-3) ** 2
    floor += 0.15 * log_distance(optimizer.weight_decay, 0.03) ** 2 + 0.5 * (schedule.final - 0.1) ** 2
    floor += 1.0 * (schedule.warmup - 0.04) ** 2 - 0.05 * math.log2(training.model.width / 64)
    if schedule.decay == "linear":
        floor += 0.8 * (schedule.cooldown - 0.3) ** 2 - 0.08
    return power_law(floor, share, rate=0.5)


RATE = "optimizer.learning_rate: {low: 1.0e-5, high: 1.0e-1, log: true}"
DECAY = "optimizer.weight_decay: {low: 1.0e-3, high: 10, log: true}"
WARMUP = "schedule.warmup: {low: 0%, high: 10%}"
WIDTH = "model.width: {choices: [32, 64, 128, 256]}"
DECAYS = "schedule.decay: {choices: [cosine, linear, constant]}"
COOLDOWN = "schedule.cooldown: {low: 5%, high: 90%, when: {schedule.decay: linear}}"
FINAL = "schedule.final: {low: 0%, high: 100%, when: {schedule.decay: cosine}}"

SURFACES: dict[str, tuple[Surface, tuple[str, ...]]] = {
    "bowl": (bowl, (RATE, DECAY, WARMUP, WIDTH)),
    "valley": (valley, (RATE, DECAY)),
    "schedules": (schedules, (RATE, DECAYS, COOLDOWN, FINAL)),
    "crossing": (crossing, (RATE, WARMUP, WIDTH)),
    "many": (many, (RATE, DECAY, WARMUP, WIDTH, DECAYS, COOLDOWN, "schedule.final: {low: 0%, high: 100%}")),
}


def sweep_of(name: str, searcher: str, stopping: str, seed: int) -> Sweep:
    """The sweep of a surface; everything that is not said is the settings' default."""
    search = "\n".join(f"  {line}" for line in SURFACES[name][1])
    text = f"""
trainable: surface
base:
  seed: {seed}
  optimizer: {{learning_rate: 1.0e-4, weight_decay: 0.1}}
  batch: {{examples: 1k}}
  budget: {{examples: {STEPS}k}}
search:
{search}
searcher: {searcher}
trials: {TRIALS}
early_stopping: {{{stopping}}}
"""
    return check(files.parse(text, name), name)


def measured(surface: Surface, training: Any, step: int, number: int) -> float:
    """An evaluation, with noise that is a function of the sweep's seed, the trial and the step."""
    noise = np.random.default_rng((training.seed, number, step)).normal() * 0.02
    return surface(training, step / STEPS) + noise


class Noisy:
    """A surface as the simulation's curves: an evaluation at every rung, and at every tenth of the budget."""

    def __init__(self, sweep: Sweep, surface: Surface):
        self._sweep, self._surface = sweep, surface

    def answers(self, trial: Trial, rungs: tuple[float, ...]) -> Iterator[Answer]:
        """The evaluations of a trial; its seconds are steps."""
        training = self._sweep.training(trial.parameters)
        for step in sorted({math.ceil(rung / 1000) for rung in rungs} | set(range(2, STEPS + 1, 2))):
            yield {
                "examples": step * 1000,
                "total": STEPS * 1000,
                "flops": float(step),
                "seconds": float(step),
                "checkpoint": None,
                "metrics": {"validation/loss": measured(self._surface, training, step, trial.number)},
            }


def course_of(name: str, searcher: str, stopping: str, seed: int) -> Course:
    """A sweep through the controller, its history and its study, without Ray or training."""
    surface, sweep = SURFACES[name][0], sweep_of(name, searcher, stopping, seed)
    rungs = sweep.rungs([STEPS * 1000.0])
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "history.jsonl"
        with Simulation(sweep, path, Noisy(sweep, surface), rungs) as simulation:
            trials = simulation.run().trials.values()
    spent, best, course = 0.0, math.inf, []
    for trial in trials:
        spent += trial.examples / (STEPS * 1000)
        if trial.state == "complete" and trial.value is not None and trial.value < best:
            best = trial.value
            course.append((spent, surface(sweep.training(trial.parameters), 1.0)))
    return course


def course_of_optuna(name: str, seed: int) -> Course:
    """Optuna's TPE as it comes, asked and told."""
    surface, sweep = SURFACES[name][0], sweep_of(name, "tpe", NEVER, seed)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    study.enqueue_trial(sweep.space.plain(sweep.space.base_parameters()))
    best, course = math.inf, []
    for number in range(TRIALS):
        trial = study.ask()
        training = sweep.training(sweep.space.suggest(trial))
        value = measured(surface, training, STEPS, number)
        study.tell(trial, value)
        if value < best:
            best = value
            course.append((number + 1.0, surface(training, 1.0)))
    return course


def rows() -> Iterator[tuple[object, ...]]:
    """Two rows a surface."""
    assert Study  # sets Optuna's verbosity
    for name in SURFACES:
        times, gains, others = [], [], []
        base = SURFACES[name][0](sweep_of(name, "tpe", NEVER, 0).training({}), 1.0)
        for seed in range(SEEDS):
            ours = course_of(name, "tpe", DEFAULT, seed)
            random = course_of(name, "random", NEVER, seed)
            times.append(next((at for at, loss in ours if loss <= random[-1][1]), math.inf))
            gains.append(base - ours[-1][1])
            others.append(base - course_of_optuna(name, seed)[-1][1])
        time, gain, other = (statistics.median(values) for values in (times, gains, others))
        what = f"searching, {name}: budgets until random's best of {TRIALS}"
        yield what, f"{time:.1f}", f"{TRIALS} (random)", f"{time / TRIALS:.2f}", "at most 0.33", time <= TRIALS / 3
        what = f"searching, {name}: gain over the base"
        yield (
            what,
            f"{gain:.3f}",
            f"{other:.3f} (Optuna's TPE)",
            f"{gain / other:.3f}",
            "at least 0.95",
            gain >= 0.95 * other,
        )
