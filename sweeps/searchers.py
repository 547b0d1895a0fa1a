"""Searchers: what proposes the next configuration. To add one, write a class and name it in SEARCHERS.

Configuration 0 is always the base. A searcher either lists its configurations beforehand (`Listing`), or proposes
one after another as an Optuna sampler (`Sampling`): made anew for every proposal from the sweep's seed and the
proposal's number, so that a resumed sweep proposes what an undisturbed one would have. The study that it looks at
is a projection of the history.

What a searcher cannot serve it refuses when the file is read. Optuna is imported only where it proposes.
"""

import hashlib
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .files import Document
from .settings import SweepSettings
from .space import Parameters, Space
from .validation import nearest

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from .sweep import Sweep

_MOST = 100_000
"""Configurations that a grid may have."""


class Searcher(ABC):  # noqa: B024 - of either kind, `Listing` or `Sampling`
    """What every searcher says of itself."""

    learns = False
    """Whether the results of trials change what it proposes; only then is there a use in `start_from`."""

    def refuse(self, space: Space) -> None:  # noqa: B027 - most serve every space
        """Raise `WrongInput` for a space that cannot be served."""

    def settled(self, document: Document, settings: SweepSettings, space: Space) -> SweepSettings:
        """The settings with what the searcher decides itself. Raises `WrongInput` where the file says otherwise."""
        return settings


class Listing(Searcher):
    """Knows its configurations, and so their number, beforehand."""

    @abstractmethod
    def configurations(self, space: Space) -> list[Parameters]:
        """All of them in the order in which they run, the base first."""

    def settled(self, document: Document, settings: SweepSettings, space: Space) -> SweepSettings:
        """`trials` is their number."""
        amount = len(self.configurations(space))
        if "trials" in document.values and settings.trials != amount:
            message = f"this {settings.searcher} has {amount:,} configurations, found {document.written(('trials',))}"
            raise document.wrong(("trials",), f"{message}; leave trials out")
        return settings.model_copy(update={"trials": amount})


class Sampling(Searcher):
    """Proposes one configuration after another."""

    @abstractmethod
    def sampler(self, sweep: "Sweep", group: int, told: int) -> "BaseSampler":
        """The sampler of proposal `group` (from 1); the first `told` trials of its study are earlier sweeps'."""


class Tpe(Sampling):
    """Tree-structured Parzen estimator (Bergstra et al. 2011), over all parameters together.

    `group` splits conditional spaces; `constant_liar` keeps parallel trials apart. Stopped trials count with
    what they reached, violated constraints as bad.
    """

    learns = True

    def sampler(self, sweep: "Sweep", group: int, told: int) -> "BaseSampler":
        """Optuna's."""
        from optuna.samplers import TPESampler

        seed = proposal_seed(sweep.space.seed, group)
        return TPESampler(multivariate=True, group=True, constant_liar=True, n_startup_trials=startup(sweep), seed=seed)


class GaussianProcess(Sampling):
    """Gaussian process with expected improvement: few, costly trials over few, unconditional parameters."""

    learns = True

    def refuse(self, space: Space) -> None:
        """Conditional dimensions: Optuna's would fall back to random draws of them."""
        _refuse_conditions(space, "gp")

    def sampler(self, sweep: "Sweep", group: int, told: int) -> "BaseSampler":
        """Optuna's, with every trial that is over told so that it learns from it; Sobol points first."""
        from .gp import GaussianProcessSampler
        from .sobol import SobolSampler

        first = SobolSampler(sweep.space, group - 1, proposal_seed(sweep.space.seed, 0))
        return GaussianProcessSampler(first, startup(sweep), proposal_seed(sweep.space.seed, group))


class Cmaes(Sampling):
    """CMA-ES: many cheap trials over numbers. Knows no constraints: what broke one ranks last."""

    learns = True

    def refuse(self, space: Space) -> None:
        """Choices have no order to step along; conditional dimensions no place in a covariance."""
        for dimension in space.dimensions:
            if dimension.kind == "choice":
                raise space.document.wrong(
                    ("search", dimension.key, "choices"),
                    "cmaes searches numbers only; give low and high, or use searcher: tpe",
                )
        _refuse_conditions(space, "cmaes")

    def sampler(self, sweep: "Sweep", group: int, told: int) -> "BaseSampler":
        """Ours, whose state follows from the trials."""
        from .cma import CmaSampler

        return CmaSampler(sweep.space, told, proposal_seed(sweep.space.seed, group))


class Qmc(Sampling):
    """Scrambled Sobol points: random search without its gaps and clusters, best stopped after a power of two."""

    def sampler(self, sweep: "Sweep", group: int, told: int) -> "BaseSampler":
        """Ours: the point is a function of the proposal's number."""
        from .sobol import SobolSampler

        return SobolSampler(sweep.space, group - 1, proposal_seed(sweep.space.seed, 0))


class Random(Sampling):
    """Uniform (or log-uniform) draws, the baseline of every other searcher."""

    def sampler(self, sweep: "Sweep", group: int, told: int) -> "BaseSampler":
        """Optuna's."""
        from optuna.samplers import RandomSampler

        return RandomSampler(seed=proposal_seed(sweep.space.seed, group))


class Grid(Listing):
    """Each combination of the values once; after the base in a shuffled order, so that a limit leaves a spread."""

    def refuse(self, space: Space) -> None:
        """Ranges that list no values, and more combinations than anyone runs."""
        _refuse_ranges(space)
        if len(list(itertools.islice(space.configurations(), _MOST + 1))) > _MOST:
            raise space.document.wrong(("search",), f"has more than {_MOST:,} combinations; give fewer values")

    def configurations(self, space: Space) -> list[Parameters]:
        """The order is a function of the sweep's seed."""
        base = space.base_parameters()
        others = [found for found in space.configurations() if not _same(space, found, base)]
        random.Random(proposal_seed(space.seed, 0)).shuffle(others)  # noqa: S311 - an order, the same one every time
        return [base, *others]


class List(Listing):
    """The configurations that the file itself lists."""

    def refuse(self, space: Space) -> None:
        """A configuration without some of the searched keys, or with others, or with values outside the search."""
        listed = space.document.values.get("configurations") or []
        if not listed:
            raise space.document.wrong(("configurations",), "is empty; list the searched keys of each trial")
        for i, told in enumerate(listed):
            searched = {dimension.key: dimension for dimension in space.dimensions}
            if told.keys() != searched.keys():
                found = ", ".join(map(str, told)) or "nothing"
                raise space.document.wrong(("configurations", i), f"give {', '.join(searched)}; found {found}")
            for key, value in told.items():
                if not searched[key].holds(value):
                    allowed = searched[key].allowed()
                    raise space.document.wrong(("configurations", i, key), f"allowed: {allowed}, found {value}")

    def configurations(self, space: Space) -> list[Parameters]:
        """The base, and those of the file that are others, in its order."""
        base = space.base_parameters()
        found = [space.active(told) for told in space.document.values["configurations"]]
        return [base, *(told for told in found if not _same(space, told, base))]


class Ablation(Listing):
    """The base, and each listed value of each key alone, in the order of the file; every trial to its end."""

    def refuse(self, space: Space) -> None:
        """Ranges that list no values; keys that the base does not have; nothing to change."""
        _refuse_ranges(space)
        for dimension in space.dimensions:
            if not dimension.active(space.values):
                told = " and ".join(f"{key} is {' or '.join(map(str, values))}" for key, values in dimension.when)
                raise space.document.wrong(
                    ("search", dimension.key, "when"),
                    f"cannot be changed alone: it exists only where {told}, which the base is not",
                )
        if len(self.configurations(space)) == 1:
            raise space.document.wrong(("search",), "lists nothing but the base's own values; give others")

    def configurations(self, space: Space) -> list[Parameters]:
        """A change that takes a condition away takes its key away."""
        base = space.base_parameters()
        listed = [base]
        order = {key: i for i, key in enumerate(space.document.values["search"])}
        for dimension in sorted(space.dimensions, key=lambda dimension: order[dimension.key]):
            for i in range(dimension.amount or 0):
                changed = space.active(base | {dimension.key: dimension.value(i)})
                if not _same(space, changed, base):
                    listed.append(changed)
        return listed

    def settled(self, document: Document, settings: SweepSettings, space: Space) -> SweepSettings:
        """`trials` is the number of changes and one; nothing is stopped early."""
        given = document.values.get("early_stopping") or {}
        if given.get("rule", "none") != "none":
            raise document.wrong(
                ("early_stopping", "rule"),
                f"an ablation runs every trial to its end, found {given['rule']}; leave the rule out",
            )
        stopping = settings.early_stopping.model_copy(update={"rule": "none"})
        return super().settled(document, settings.model_copy(update={"early_stopping": stopping}), space)


SEARCHERS: Mapping[str, Searcher] = {
    "tpe": Tpe(),
    "random": Random(),
    "grid": Grid(),
    "gp": GaussianProcess(),
    "cmaes": Cmaes(),
    "qmc": Qmc(),
    "ablation": Ablation(),
    "list": List(),
}


def settled(document: Document, settings: SweepSettings, space: Space) -> SweepSettings:
    """The settings of a file as its searcher means them. Raises `WrongInput` where it cannot serve the file."""
    name = settings.searcher
    if name not in SEARCHERS:
        message = f"allowed: {', '.join(SEARCHERS)}, found {name}{nearest(name, list(SEARCHERS))}"
        raise document.wrong(("searcher",), message)
    searcher = SEARCHERS[name]
    if settings.start_from and not searcher.learns:
        able = ", ".join(other for other, found in SEARCHERS.items() if found.learns)
        raise document.wrong(("start_from",), f"{name} learns nothing from other trials; leave it out, or use {able}")
    if not space.dimensions:  # a training file
        return settings
    searcher.refuse(space)
    return searcher.settled(document, settings, space)


def proposal_seed(sweep_seed: int, group: int) -> int:
    """The seed of a proposal: a function of the sweep's seed and the proposal's number alone."""
    digest = hashlib.blake2b(f"{sweep_seed}/{group}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def startup(sweep: "Sweep") -> int:
    """How many trials a model of the space asks for before it is believed."""
    return min(10, max(3, sweep.settings.trials // 4))


def _refuse_ranges(space: Space) -> None:
    for dimension in space.dimensions:
        if dimension.amount is None:
            advice = "give choices" if dimension.log else "give step or choices"
            raise space.document.wrong(("search", dimension.key), f"this range has no grid; {advice}")


def _refuse_conditions(space: Space, name: str) -> None:
    for dimension in space.conditional():
        raise space.document.wrong(
            ("search", dimension.key, "when"), f"{name} searches no conditional keys; use searcher: tpe"
        )


def _same(space: Space, one: Parameters, other: Parameters) -> bool:
    """Whether two configurations have the same values; steps agree to rounding."""

    def places(parameters: Parameters) -> dict[str, int]:
        return {d.key: d.index(parameters[d.key]) for d in space.dimensions if d.key in parameters}

    return places(one) == places(other)
