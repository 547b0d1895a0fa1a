"""A UNet that draws images: flow matching or diffusion of pixels, by class where the images have them."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..datasets.images import PreparedImages, prepare
from ..datasets.settings import ImageData
from . import pictures
from .draws import normals, uniforms
from .errors import WrongSettings
from .generative import GuidedSampling
from .paths import path_of
from .quality import Scorer, kid_bootstrap, scores
from .quality_options import Quality
from .samplers import CALLS_PER_STEP, calls_of, draw, guided
from .settings import Training
from .task import Batch, Role, Samples, Score, evaluating
from .unet_network import UNet, role
from .unet_settings import UNetTraining
from .workers import ALONE, Workers

_NOISE, _TIME, _CLASS, _SAMPLES, _CHAIN = range(5)
"""Streams of random draws."""
_HELD_OUT = 2**32 - 1
"""The seed of what validation images are mixed with: the same for all trials."""
_REFERENCE = 50_000
"""Training images, at most, beside which drawn ones are scored."""
_RESAMPLES = 1000
_CALL_ROWS = 256
"""Images that are drawn at once."""
_ROWS, _COLUMNS = 6, 10
"""Of the picture of samples; columns are classes, where there are any."""
_SCALES, _CALLS, _SAMPLERS = (0.0, 1.0, 2.0, 4.0, 6.0), (2, 4, 10, 20), ("euler", "heun")
"""What pictures compare: guidance scales; network calls, by samplers."""


class UNetTask:
    """Images drawn from noise along a path (see `Task`)."""

    examples_per_row = 1

    def __init__(self, training: UNetTraining, cache: Path) -> None:
        """Opens the images, which are prepared first where `cache` does not have them yet."""
        self.training, self.path, self._cache = training, path_of(training.path), cache
        self.images = _images(training.data, cache)
        _check(training, self.images)
        self.shape = (self.images.channels, self.images.size, self.images.size)

    @classmethod
    def prepare(cls, training: Training, cache: Path, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
        """Prepare the images; what there is of them, for a person."""
        assert isinstance(training, UNetTraining)
        images = prepare(training.data, cache, progress)
        _check(training, images)
        told = {
            "images": f"{training.data.source}, {images.size} × {images.size} × {images.channels}",
            "rows": f"{images.train_rows:,} for training, {images.validation_rows:,} for validation",
            "classes": f"{images.classes}" if images.classes else "none",
        }
        if images.damaged:
            told["damaged"] = f"{images.damaged:,} left out, listed in {images.folder / 'damaged.jsonl'}"
        return told | {"prepared in": str(images.folder)}

    def build(self) -> UNet:
        """A UNet with the weights of the training's seed, on the current default device."""
        training = self.training
        return UNet(
            training.model,
            self.images.channels,
            self.images.size,
            self.images.classes,
            outputs=self.path.outputs,
            seed=training.seed,
            recompute=training.recompute,
        )

    def batch(self, first_row: int, rows: int) -> Batch:
        """{"image": uint8 [rows, channels, size, size]; "label" and "row", its place in the global order: [rows]}."""
        pixels, labels = self.images.rows(first_row, rows, self.training.seed)
        return _batch(pixels, labels, np.arange(first_row, first_row + rows))

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """{"loss"}: what the path makes of the network's output at a random time, with some of the classes left out."""
        row = batch["row"]
        left_out = uniforms(self.training.seed, _CLASS, row, 1)[:, 0] < self.training.class_dropout
        label = torch.where(left_out, self.images.classes or 0, batch["label"])
        return {"loss": self._loss(model, batch["image"], label, row, self.training.seed)}

    def evaluate(self, model: nn.Module, device: torch.device, workers: Workers = ALONE) -> dict[str, float]:
        """The loss on validation images, with their classes, and how drawn images are scored."""
        amount = min(self.training.evaluation.examples, self.images.validation_rows)
        share = workers.share(amount)
        loss = torch.zeros((), device=device)
        with torch.no_grad(), evaluating(model):
            for start in range(share.start, share.stop, _CALL_ROWS):
                row = np.arange(start, min(start + _CALL_ROWS, share.stop))
                batch = _batch(*self.images.validation(row), row)
                batch = {name: value.to(device) for name, value in batch.items()}
                found = self._loss(model, batch["image"], batch["label"], batch["row"], _HELD_OUT)
                loss += found.float() * len(row) / amount
        told = {"validation/loss": workers.sum({"loss": loss})["loss"].item()}
        if self.training.quality:
            found = self.score(model, device).metrics
            told |= {name: value for name, value in found.items() if name.startswith("validation/")}
        return told

    def score(self, model: nn.Module, device: torch.device) -> Score:
        """Draw as many images as the settings ask for, of classes as frequent as in the data, and score them."""
        assert self.training.quality is not None, "nothing to score by"
        scorer = _scorer(self.training.quality, self.training.data, self._cache, device)
        rows, seed = torch.arange(self.training.quality.samples), self.training.sampling.seed
        labels = torch.from_numpy(self.images.rows(0, len(rows), seed)[1])
        drawn = self.draw(model, self.training.sampling, rows, labels, device)
        features = scorer.features(drawn)
        resamples = kid_bootstrap(features, scorer.reference.features, _RESAMPLES, seed=0)
        metrics, calls = scores(features, scorer.reference, self.training.quality), self._calls()
        return Score(metrics | ({"sampling/calls": calls} if calls else {}), *self.drawing(), resamples)

    def drawing(self) -> tuple[int, float]:
        """Images that are scored, and the FLOPs that they take."""
        amount = self.training.quality.samples if self.training.quality else 0
        return amount, amount * self._calls() * self.flops_formula_per_example() / 3

    def draw(
        self, model: nn.Module, sampling: GuidedSampling, rows: Tensor, labels: Tensor, device: torch.device
    ) -> np.ndarray:
        """Images uint8 (n, channels, height, width) of the classes `labels`; a row's noise is always the same."""
        width, null = int(np.prod(self.shape)), self.images.classes or 0

        def noise(stream: int, row: Tensor) -> Tensor:
            return normals(sampling.seed, stream, row, width).reshape(-1, *self.shape)

        found = []
        with torch.no_grad(), evaluating(model):
            for row, label in zip(rows.to(device).split(_CALL_ROWS), labels.to(device).split(_CALL_ROWS), strict=True):
                network = guided(self._network(model), label, null, sampling.guidance, sampling.interval)
                start = noise(_SAMPLES, row)
                x = draw(network, self.path, sampling, start, lambda step, row=row: noise(_CHAIN + step, row))
                found.append(((x.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu())
        return torch.cat(found).numpy()

    def sample(self, model: nn.Module, device: torch.device, workers: Workers = ALONE) -> Samples:
        """Pictures from noise that never changes: of every class, and by guidance scale and by calls of the sampler."""
        if not workers.first:
            return Samples()
        names = (self.images.class_names or [])[:_COLUMNS]
        columns = len(names) or _COLUMNS

        def rows(amount: int, **changes: Any) -> np.ndarray:
            places = torch.arange(amount * columns)
            sampling = self.training.sampling.model_copy(update=changes)
            return self.draw(model, sampling, places, places % columns, device).transpose(0, 2, 3, 1)

        drawn = rows(_ROWS)
        images = {"samples": pictures.grid(drawn, columns, column_labels=names)}
        if self.images.classes and self.training.class_dropout:
            by_scale = np.concatenate([rows(1, guidance=scale) for scale in _SCALES])
            labels = [f"w = {scale:g}" for scale in _SCALES]
            images["guidance"] = pictures.grid(by_scale, columns, labels, names)
        steps = [(kind, calls // CALLS_PER_STEP[kind]) for calls in _CALLS for kind in _SAMPLERS]
        by_calls = np.concatenate([rows(1, sampler=kind, steps=number) for kind, number in steps])
        images["calls"] = pictures.grid(
            by_calls, columns, [f"{kind}, {n * CALLS_PER_STEP[kind]} calls" for kind, n in steps], names
        )
        real = self.images.validation(np.arange(len(drawn)) % self.images.validation_rows)[0]
        return Samples(images=images, drawn=drawn, real=real.transpose(0, 2, 3, 1))

    def chance_loss(self) -> None:
        """There is no such figure."""

    def role(self, name: str, parameter: nn.Parameter) -> Role:
        """The role of a parameter of the UNet."""
        return role(name, parameter)

    def activation_bytes_per_row(self, precision: Literal["bf16", "fp32"]) -> int:
        """By formula; see `UNet`."""
        with torch.device("meta"):
            return self.build().activation_bytes_per_row(precision)

    def flops_formula_per_example(self) -> float:
        """By formula; see `UNet`."""
        with torch.device("meta"):
            return self.build().flops_per_row()

    def _loss(self, model: nn.Module, image: Tensor, label: Tensor, row: Tensor, seed: int) -> Tensor:
        """What the path makes of the network's output on images (uint8) at times and with noise of (seed, row)."""
        x_1 = image.float() / 127.5 - 1
        x_0 = normals(seed, _NOISE, row, x_1[0].numel()).reshape(x_1.shape)
        t = self.path.times(uniforms(seed, _TIME, row, 1)[:, 0], self.training.time)
        at = self.path.mix(x_0, x_1, t)
        return self.path.loss(self._network(model)(at.x_t, at.t, label), at)

    def _calls(self) -> int:
        """Network calls for one image; 0 where they are not known beforehand. Guidance takes two at once."""
        sampling = self.training.sampling
        return (calls_of(sampling, self.path) or 0) * (1 if sampling.guidance in (0, 1) else 2)

    def _network(self, model: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The model of x_t, t and labels, also where the images have none."""
        return model if self.images.classes else lambda x_t, t, _: model(x_t, t)


def _batch(pixels: np.ndarray, labels: np.ndarray, row: np.ndarray) -> dict[str, Tensor]:
    return {"image": torch.from_numpy(pixels), "label": torch.from_numpy(labels), "row": torch.from_numpy(row)}


@functools.lru_cache(maxsize=4)
def _images(data: ImageData, cache: Path) -> PreparedImages:
    # Once a process: a lane's next trial neither hashes the pixels again nor looks at the source.
    return prepare(data, cache)


@functools.lru_cache(maxsize=4)
def _scorer(quality: Quality, data: ImageData, cache: Path, device: torch.device) -> Scorer:
    """Beside training images as they are, none of them mirrored."""
    images = dataclasses.replace(_images(data, cache), flip=False)
    real = images.rows(0, min(images.train_rows, _REFERENCE), seed=0)[0]
    return Scorer(quality, real, cache, images.fingerprint, device)


def _check(training: UNetTraining, images: PreparedImages) -> None:
    if not images.classes and training.sampling.guidance != 1:
        told = f"{training.sampling.guidance:g} needs images with classes, which {training.data.source} has not"
        raise WrongSettings(f"sampling.guidance: {told}; draw with guidance 1")


TASK = UNetTask
