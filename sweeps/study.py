"""The Optuna study of a sweep, as a projection of its history."""

import functools
import logging
import warnings
from typing import Any

import optuna
from optuna.trial import TrialState, create_trial

from .history import Event, Record, Trial
from .needs import shape_of
from .repeats import mean_at, outcome
from .searchers import SEARCHERS, Listing, Sampling
from .space import Parameters
from .sweep import Sweep

_DRAWS = 20
"""How often a searcher is asked for a shape that may fit, before it is given what it insists on."""
_LEAST_EXCESS = 0.05
"""Of a trial that ran out of memory although, by the estimate, it should have fitted."""

optuna.logging.set_verbosity(logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


class Study:
    """An Optuna study as the projection of a history.

    One Optuna trial per configuration (`group`): the searcher sees the mean of its repeats. Told as contract
    6 of the design says: complete → COMPLETE; stopped → PRUNED with intermediate values; diverged and out of
    memory → PRUNED with a violated constraint, so that the region is avoided; failed → FAIL. Trials of earlier
    sweeps come before, in the same way, with the user attribute `start_from`.
    """

    def __init__(self, sweep: Sweep):
        self._sweep = sweep
        self._begin()

    def _begin(self) -> None:
        self.study = optuna.create_study(
            storage=optuna.storages.InMemoryStorage(),
            study_name=self._sweep.name,
            direction=self._sweep.settings.objective.goal,
        )
        self._ids: list[int] = []
        """Optuna's ids of the configurations."""
        self._told = 0
        """How many trials of earlier sweeps come before."""
        self._too_large: set[str] = set()
        """Shapes that have run out of memory."""

    @functools.cached_property
    def _listed(self) -> list[Parameters]:
        """The configurations that are known beforehand."""
        searcher, space = SEARCHERS[self._sweep.settings.searcher], self._sweep.space
        return searcher.configurations(space) if isinstance(searcher, Listing) else [space.base_parameters()]

    def propose(self, group: int) -> dict[str, Any]:
        """Parameters of configuration `group`; the study then has it as running."""
        searcher = SEARCHERS[self._sweep.settings.searcher]
        if group < len(self._listed):
            self._add(group, self._listed[group])
            return self._listed[group]
        assert isinstance(searcher, Sampling), f"{group} is beyond the configurations that are listed"
        if self._too_large:
            parameters = self._draw_what_may_fit(searcher, group)
            self._add(group, parameters)
            return parameters
        self.study.sampler = searcher.sampler(self._sweep, group, self._told)
        trial = self.study.ask()
        self._is_next(group, trial.number, trial._trial_id)
        parameters = self._sweep.space.suggest(trial)
        # What a sampler notes of itself is not in the history: a resumed sweep has to do without it.
        storage, optuna_id = self.study._storage, trial._trial_id
        for key in storage.get_trial_system_attrs(optuna_id):
            storage.set_trial_system_attr(optuna_id, key, "")
        return parameters

    def _draw_what_may_fit(self, searcher: Sampling, group: int) -> Parameters:
        """Parameters of a shape that has not run out of memory, if the searcher comes upon one.

        It learns the region from the violated constraints, but goes on drawing from it now and then.
        """
        drafts = optuna.create_study(storage=optuna.storages.InMemoryStorage(), direction=self.study.direction)
        if searcher.learns:
            drafts.add_trials(self.study.get_trials(deepcopy=False))
        parameters: Parameters = {}
        for draw in range(_DRAWS):
            # Beyond the sweep's own proposals there are as many seeds, and Sobol points, as one likes.
            drafts.sampler = searcher.sampler(self._sweep, group + draw * self._sweep.settings.trials, self._told)
            parameters = self._sweep.space.suggest(drafts.ask())
            if shape_of(self._sweep, parameters) not in self._too_large:
                break
        return parameters

    def apply(self, event: Event, record: Record) -> None:
        """Take an event into account, after `record` has."""
        if event["event"] == "opened" and event.get("told"):
            self._start_from(event["told"])
        if event["event"] == "edited":
            self._again(record)
        if event["event"] not in ("proposed", "report", "ended"):
            return
        trial = record.trials[event["trial"]]
        if event["event"] == "proposed":
            if trial.group >= len(self._ids):
                self._add(trial.group, trial.parameters)
            return
        # Numbers go by configuration; looking through all trials would make long sweeps slow.
        every = self._sweep.settings.repeats
        numbers = range(trial.group * every, trial.group * every + every)
        repeats = [record.trials[number] for number in numbers if number in record.trials]
        if event["event"] == "report":
            self._report(trial, repeats, event["examples"])
        elif all(other.over for other in repeats) and len(repeats) == every:
            self._tell(trial.group, repeats)

    def _again(self, record: Record) -> None:
        """Trials that were over go on, which Optuna's cannot: begin a study anew."""
        self._begin()
        self._start_from(record.told)
        for group, repeats in record.groups().items():
            self._add(group, repeats[0].parameters)
            for trial in repeats:
                for examples in trial.reports:
                    self._report(trial, repeats, examples)

    def _start_from(self, told: list[dict[str, Any]]) -> None:
        """Tell the trials of earlier sweeps, as `start_from.py` wrote them into the history."""
        for earlier in told:
            state = _STATES[earlier["state"]]
            self._create(
                earlier["parameters"],
                state,
                value=earlier["value"] if state == TrialState.COMPLETE else None,
                intermediate_values={int(examples): value for examples, value in earlier["reports"].items()},
                system_attrs=_constraints({earlier["state"]}),
                user_attrs={"start_from": earlier["trial"], "reason": earlier["reason"]},
            )
        self._told += len(told)

    def _add(self, group: int, parameters: Parameters) -> None:
        number, optuna_id = self._create(parameters, TrialState.RUNNING)
        self._is_next(group, number, optuna_id)

    def _create(self, parameters: Parameters, state: TrialState, **told: Any) -> tuple[int, int]:
        """A new trial of the study; returns its number there and its id."""
        space = self._sweep.space
        distributions = space.distributions(parameters)
        self.study.add_trial(
            create_trial(state=state, params=space.plain(parameters), distributions=distributions, **told)
        )
        made = self.study.get_trials(deepcopy=False)[-1]
        return made.number, made._trial_id

    def _is_next(self, group: int, number: int, optuna_id: int) -> None:
        assert number - self._told == group == len(self._ids), "every configuration is one Optuna trial, in order"
        self._ids.append(optuna_id)

    def _report(self, trial: Trial, repeats: list[Trial], examples: int) -> None:
        value = mean_at(repeats, examples, self._sweep.settings.objective.metric)
        if value is not None:
            self.study._storage.set_trial_intermediate_value(self._ids[trial.group], examples, value)

    def _tell(self, group: int, repeats: list[Trial]) -> None:
        optuna_id, storage = self._ids[group], self.study._storage
        state, value, reason = outcome(repeats)
        too_large = [trial for trial in repeats if trial.state == "out_of_memory"]
        if too_large and (shape := shape_of(self._sweep, too_large[0].parameters)):
            self._too_large.add(shape)
        shares = [trial.memory_share for trial in too_large if trial.memory_share is not None]
        excess = max(_LEAST_EXCESS, max(shares) - 1) if shares else 1.0
        for key, violation in _constraints({trial.state for trial in repeats}, excess).items():
            storage.set_trial_system_attr(optuna_id, key, violation)
        storage.set_trial_user_attr(optuna_id, "reason", reason)
        values = [value] if value is not None and state == "complete" else None
        storage.set_trial_state_values(optuna_id, _STATES[state], values)


_STATES = {
    "complete": TrialState.COMPLETE,
    "stopped": TrialState.PRUNED,
    "diverged": TrialState.PRUNED,
    "out_of_memory": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}


def _constraints(states: set[str], excess: float = 1.0) -> dict[str, float]:
    """Both keys, for every trial: Optuna's samplers compare trials by them, and rank those that break one.

    `excess` is what a trial takes over its card's memory, in cards.
    """
    return {
        "constraints:memory": excess if "out_of_memory" in states else -1.0,
        "constraints:health": 1.0 if "diverged" in states else -1.0,
    }
