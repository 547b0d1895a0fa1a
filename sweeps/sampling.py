"""Draw from a run that was trained."""

from pathlib import Path

from ..trainables import checkpoints, registry
from . import files, folders
from .files import WrongInput
from .validation import validate
from .weights import find_trial, newest_checkpoint


def sample_run(
    run: str, runs: Path, cache: Path, overrides: tuple[str, ...] = (), out: Path = Path()
) -> tuple[dict[str, str], dict[str, Path]]:
    """Texts and pictures by name, from the newest weights of a run (of the EMA where there is one).

    Pictures are written to the folder `out`, which is made, and told by their paths.

    `overrides` change settings under `sampling.` and the `seed`. Raises `WrongInput`.
    """
    import torch
    from PIL import Image

    folder, number = find_trial(run, runs)
    sweep, trial = folders.read_sweep(folder), folders.record_of(folder).trials[number]
    for override in overrides:
        if not override.startswith(("sampling.", "seed=")):
            raise WrongInput(
                f"--set {override}: a sample is drawn with other settings under `sampling.`, or another seed"
            )
    document = files.Document(str(folder / "sweep.yaml"), {"base": sweep.space.base})
    files.override(document, *(f"base.{override}" for override in overrides))
    training = sweep.training(trial.parameters, trial.number - trial.group * sweep.settings.repeats)
    values = training.model_dump() | {k: v for k, v in document.values["base"].items() if k in ("sampling", "seed")}
    training = validate(type(training), values, document, ("base",))
    task = registry.task(sweep.settings.trainable, training, cache)
    if task is None:
        raise WrongInput(f"{run}: a {sweep.settings.trainable} draws no samples")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = task.build().to(device)
    checkpoints.load_weights(checkpoints.weights_of(newest_checkpoint(folder, number)), model)
    drawn = task.sample(model, device)
    pictures = {}
    try:
        for name, picture in drawn.images.items():
            out.mkdir(parents=True, exist_ok=True)
            pictures[name] = out / f"{folder.name}-{number}-{name}.png"
            Image.fromarray(picture).save(pictures[name])
    except OSError as error:
        raise WrongInput(f"--out {out}: {error.strerror or error}") from error
    return dict(drawn.texts), pictures
