"""The Optuna study of a sweep, as a projection of its history."""

import statistics
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.trial import TrialState, create_trial

from .history import Event, Record, Trial
from .searchers import SEARCHERS, proposal_seed
from .sweep import Sweep


class Study:
    """An Optuna study as the projection of a history.

    One Optuna trial per configuration (`group`): the searcher sees the mean of its repeats. Told as contract
    6 of the design says: complete → COMPLETE; stopped → PRUNED with intermediate values; diverged and out of
    memory → PRUNED with a violated constraint, so that the region is avoided; failed → FAIL.
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

    def propose(self, group: int) -> dict[str, Any]:
        """Parameters of configuration `group`; the study then has it as running."""
        if group == 0:  # the base
            parameters = self._sweep.space.base_parameters()
            self._add(group, parameters)
            return parameters
        seed = proposal_seed(self._sweep.space.base.get("seed", 0), group)
        self.study.sampler = SEARCHERS[self._sweep.settings.searcher](self._sweep, seed)
        trial = self.study.ask()
        assert trial.number == group == len(self._ids), "every configuration is one Optuna trial, in order"
        self._ids.append(trial._trial_id)
        return self._sweep.space.suggest(trial)

    def apply(self, event: Event, record: Record) -> None:
        """Take an event into account, after `record` has."""
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
        for group, repeats in record.groups().items():
            self._add(group, repeats[0].parameters)
            for trial in repeats:
                for examples in trial.reports:
                    self._report(trial, repeats, examples)

    def _add(self, group: int, parameters: Mapping[str, Any]) -> None:
        space = self._sweep.space
        self.study.add_trial(
            create_trial(
                state=TrialState.RUNNING,
                params=space.plain(dict(parameters)),
                distributions=space.distributions(dict(parameters)),
            )
        )
        assert len(self._ids) == group, "every configuration is one Optuna trial, in order"
        self._ids.append(self.study.get_trials(deepcopy=False)[group]._trial_id)

    def _report(self, trial: Trial, repeats: list[Trial], examples: int) -> None:
        metric = self._sweep.settings.objective.metric
        reports = [other.reports[examples] for other in repeats if examples in other.reports]
        values = [report.metrics[metric] for report in reports if metric in report.metrics]
        if values:
            self.study._storage.set_trial_intermediate_value(self._ids[trial.group], examples, statistics.fmean(values))

    def _tell(self, group: int, repeats: list[Trial]) -> None:
        optuna_id, storage = self._ids[group], self.study._storage
        states = {trial.state for trial in repeats}
        # Both keys on every trial: Optuna's samplers compare trials by them.
        for key, state in (("memory", "out_of_memory"), ("health", "diverged")):
            storage.set_trial_system_attr(optuna_id, f"constraints:{key}", 1.0 if state in states else -1.0)
        storage.set_trial_user_attr(optuna_id, "reason", max(repeats, key=lambda t: t.state != "complete").reason)
        values = [trial.value for trial in repeats if trial.value is not None]
        if states == {"complete"}:
            storage.set_trial_state_values(optuna_id, TrialState.COMPLETE, [statistics.fmean(values)])
        elif states & {"stopped", "diverged", "out_of_memory"}:
            storage.set_trial_state_values(optuna_id, TrialState.PRUNED)
        else:
            storage.set_trial_state_values(optuna_id, TrialState.FAIL)
