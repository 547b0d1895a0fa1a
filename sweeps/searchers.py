"""Searchers: what proposes the next configuration. To add one, write a function and name it in SEARCHERS.

A searcher is an Optuna sampler, made anew for every proposal from (sweep seed, number of the proposal), so
that a resumed sweep proposes what an undisturbed one would have. The study that it looks at is a projection
of the history, kept in memory; `Study` feeds it event by event.
"""

import hashlib
import logging
import warnings
from collections.abc import Callable, Mapping

import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from .sweep import Sweep

optuna.logging.set_verbosity(logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def tpe(sweep: Sweep, seed: int) -> BaseSampler:
    """Tree-structured Parzen estimator (Bergstra et al. 2011), over all parameters together.

    `group` splits conditional spaces; `constant_liar` keeps parallel trials apart. Stopped trials count with
    what they reached, violated constraints as bad.
    """
    return TPESampler(
        multivariate=True,
        group=True,
        constant_liar=True,
        n_startup_trials=min(10, max(3, sweep.settings.trials // 4)),
        seed=seed,
    )


def random(sweep: Sweep, seed: int) -> BaseSampler:  # noqa: ARG001 - every searcher has the same signature
    """Uniform (or log-uniform) draws, the baseline of every other searcher."""
    return RandomSampler(seed=seed)


SEARCHERS: Mapping[str, Callable[[Sweep, int], BaseSampler]] = {"tpe": tpe, "random": random}


def proposal_seed(sweep_seed: int, group: int) -> int:
    """The seed of a proposal: a function of the sweep's seed and the proposal's number alone."""
    digest = hashlib.blake2b(f"{sweep_seed}/{group}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")
