"""Which trainables there are.

A trainable is two files: `<name>_settings.py` (what a file may say about it; imports nothing heavy; ends with
`SETTINGS`) and `<name>.py`, which ends with `TASK`, a class of the `Task` protocol, or has a `train(job, door)`
of its own where there is nothing to loop over. Nothing else has to know of it.
"""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .settings import Training

if TYPE_CHECKING:
    from .door import Door, Ending
    from .task import Task
    from .trial import Job

_SUFFIX = "_settings.py"


def names() -> list[str]:
    """The trainables' names, sorted."""
    return sorted(file.name.removesuffix(_SUFFIX) for file in Path(__file__).parent.glob(f"*{_SUFFIX}"))


@functools.cache
def settings_class(name: str) -> type[Training]:
    """The settings of a trainable. Imports nothing heavy."""
    return importlib.import_module(f".{name}_settings", __package__).SETTINGS


def prepare(name: str, training: Training, cache: Path, progress: "Callable[[str, int, int], None]") -> dict[str, Any]:
    """Prepare a training's data, once for all trials that share it; returns what there is of it, in words.

    `progress(stage, done_bytes, total_bytes)` is called now and then. Nothing to prepare: an empty answer.
    """
    module = importlib.import_module(f".{name}", __package__)
    return module.TASK.prepare(training, cache, progress) if hasattr(module, "TASK") else {}


def budget(name: str, training: Training, cache: Path) -> tuple[float, float]:
    """The examples and the training FLOPs of a whole budget; the data must be prepared."""
    from .derived import count, steps_for

    found = task(name, training, cache)
    module = importlib.import_module(f".{name}", __package__)
    parameters, flops_per_example = count(found) if found else module.count(training)
    examples = steps_for(training, flops_per_example, parameters) * training.batch.examples
    return examples, examples * flops_per_example


def task(name: str, training: Training, cache: Path) -> "Task | None":
    """The trainable's task; None where it has none."""
    module = importlib.import_module(f".{name}", __package__)
    return module.TASK(training, cache) if hasattr(module, "TASK") else None


def numbers(name: str, job: "Job") -> dict[str, Any]:
    """What a job comes to, as `derived.Derived` names it: steps, micro-batch, FLOPs; trains nothing."""
    from .derived import derive

    training, found = job.settings(), task(name, job.settings(), Path(job.cache))
    if found is None:
        module = importlib.import_module(f".{name}", __package__)
        return module.derived(training, job).as_dict()
    return derive(found, training, job).as_dict()


def memory(name: str, job: "Job") -> dict[str, Any] | None:
    """What a job takes of its card's memory, and on which rung of the ladder; None where there is no task."""
    from .ladder import choose

    module = importlib.import_module(f".{name}", __package__)
    if not hasattr(module, "TASK"):
        return None
    return choose(lambda training: module.TASK(training, Path(job.cache)), job, always=True).as_dict()


def load(name: str) -> "Callable[[Job, Door], Ending]":
    """What runs a job of this trainable: the one loop, scoring what was trained, or the trainable's own `train`."""
    module = importlib.import_module(f".{name}", __package__)
    if not hasattr(module, "TASK"):
        return module.train

    def run(job: "Job", door: "Door") -> "Ending":
        from .ladder import train
        from .scoring import score, score_grid

        def task_of(training: Training) -> "Task":
            return module.TASK(training, Path(job.cache))

        if job.scoring:
            return score(task_of(job.settings()), job, door)
        ending = train(task_of, job, door)
        return score_grid(task_of, job, door) if job.grid and ending.state == "complete" else ending

    return run
