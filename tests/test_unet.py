"""The UNet's task: what is random in it is a row's own, what it draws repeats itself, and it learns digits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rigsweep.cluster import live_bytes
from rigsweep.trainables import fitting, registry
from rigsweep.trainables.draws import uniforms
from rigsweep.trainables.errors import WrongSettings
from rigsweep.trainables.flops import training_flops_per_example
from rigsweep.trainables.unet import UNetTask
from rigsweep.trainables.unet_settings import UNetTraining

CPU = torch.device("cpu")
SMALL = {
    "model": {"base": 16, "blocks": 1},
    "sampling": {"sampler": "euler", "steps": 2},
    "quality": {"features": "pca-8", "samples": 40},
    "budget": {"examples": 256},
}


def training(**told: Any) -> UNetTraining:
    return UNetTraining.model_validate(SMALL | told)


@pytest.fixture
def digits(cache: Path) -> UNetTask:
    return UNetTask(training(), cache)


def folder_of_images(place: Path, size: int, amount: int = 40) -> Path:
    """Images of one colour each, without classes."""
    place.mkdir()
    for number in range(amount):
        Image.new("RGB", (size, size), (number, 255 - number, 90)).save(place / f"{number}.png")
    return place


def test_micro_batches_change_nothing(digits: UNetTask) -> None:
    model = digits.build()
    whole = digits.loss(model, digits.batch(0, 64))["loss"]
    parts = [digits.loss(model, digits.batch(start, 16))["loss"] for start in range(0, 64, 16)]
    assert torch.stack(parts).mean().item() == pytest.approx(whole.item(), rel=1e-5)


def test_classes_are_left_out_in_the_share_that_is_told(cache: Path) -> None:
    seen: list[torch.Tensor] = []

    def network(x: torch.Tensor, t: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        seen.append(label)
        return torch.zeros_like(x)

    task = UNetTask(training(class_dropout=0.25), cache)
    batch = task.batch(0, 4000)
    task.loss(network, batch)  # pyright: ignore
    left_out = seen[0] == 10
    assert float(left_out.float().mean()) == pytest.approx(0.25, abs=0.02)
    assert torch.equal(seen[0][~left_out], batch["label"][~left_out])
    assert torch.equal(left_out, uniforms(0, 2, batch["row"], 1)[:, 0] < 0.25)
    seen.clear()
    UNetTask(training(class_dropout=0), cache).loss(network, batch)  # pyright: ignore
    assert torch.equal(seen[0], batch["label"])


def test_validation_keeps_the_classes_and_never_changes(cache: Path) -> None:
    task = UNetTask(training(quality=None), cache)
    other = UNetTask(training(quality=None, seed=5), cache)
    model = task.build()
    assert task.evaluate(model, CPU) == other.evaluate(model, CPU)


@pytest.mark.parametrize(("size", "padded"), [(8, 8), (16, 16), (28, 32), (32, 32), (64, 64)])
def test_every_size_trains_and_draws(tmp_path: Path, size: int, padded: int) -> None:
    source = str(folder_of_images(tmp_path / "images", size))
    task = UNetTask(training(data={"source": source}, class_dropout=0), tmp_path / "cache")
    model = task.build()
    batch = task.batch(0, 2)
    assert batch["image"].shape == (2, 3, size, size)
    loss = task.loss(model, batch)["loss"]
    loss.backward()
    assert loss.item() == pytest.approx(1.5, abs=1.2), "an untrained network predicts nothing"
    rows = torch.arange(2)
    drawn = task.draw(model, task.training.sampling, rows, torch.zeros(2).long(), CPU)
    assert drawn.shape == (2, 3, size, size) and drawn.dtype == np.uint8
    assert padded >= size


def test_a_row_is_drawn_alone_as_it_is_among_others(digits: UNetTask) -> None:
    model, rows = digits.build(), torch.arange(300)
    sampling = digits.training.sampling.model_copy(update={"guidance": 2.0})
    whole = digits.draw(model, sampling, rows, rows % 10, CPU)
    alone = digits.draw(model, sampling, rows[277:278], rows[277:278] % 10, CPU)
    assert np.abs(whole[277].astype(int) - alone[0]).max() <= 1, "but for the rounding of a product of another size"
    other = digits.draw(model, sampling.model_copy(update={"seed": 1}), rows[:1], rows[:1], CPU)
    assert not np.array_equal(other[0], whole[0])


def test_guidance_one_is_the_class_alone_and_zero_is_none(digits: UNetTask) -> None:
    model, rows = digits.build(), torch.arange(8)
    torch.nn.init.normal_(next(p for n, p in model.named_parameters() if "class" in n or "label" in n))
    labels, null = torch.full((8,), 3), torch.full((8,), 10)

    def drawn(scale: float, label: torch.Tensor) -> np.ndarray:
        return digits.draw(model, digits.training.sampling.model_copy(update={"guidance": scale}), rows, label, CPU)

    assert np.array_equal(drawn(0.0, labels), drawn(1.0, null))
    assert np.abs(drawn(1.0001, labels).astype(int) - drawn(1.0, labels)).max() <= 1


def test_pictures_are_the_same_every_time_and_of_every_class(digits: UNetTask) -> None:
    model = digits.build()
    one, again = digits.sample(model, CPU), digits.sample(model, CPU)
    assert tuple(one.images) == UNetTraining.PICTURES
    for name, picture in one.images.items():
        assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3
        assert np.array_equal(picture, again.images[name])
    assert one.drawn.shape == (60, 8, 8, 1) == one.real.shape


def test_images_without_classes_have_no_picture_of_guidance(tmp_path: Path) -> None:
    source = str(folder_of_images(tmp_path / "images", 8))
    task = UNetTask(training(data={"source": source}), tmp_path / "cache")
    assert tuple(task.sample(task.build(), CPU).images) == ("samples", "calls")
    assert set(task.evaluate(task.build(), CPU)) >= set(task.training.metrics())


def test_flops_are_those_of_the_formula(cache: Path) -> None:
    for model in ({"base": 32}, {"base": 32, "attention": True, "blocks": 1}):
        task = UNetTask(training(model=model), cache)
        assert training_flops_per_example(task) == pytest.approx(task.flops_formula_per_example(), rel=0.02)


def test_its_memory_is_traced_with_averages_and_all(digits: UNetTask) -> None:
    told = training(ema="power 10%", model={"base": 32})
    task, like = UNetTask(told, digits._cache), digits.batch(0, 1)

    def batch() -> dict[str, torch.Tensor]:
        return {name: torch.zeros((64, *value.shape[1:]), dtype=value.dtype) for name, value in like.items()}

    found = live_bytes.estimate(lambda: fitting.parts(task, told, "fp32", batch), accumulates=False)
    assert found.average_bytes == found.parameters_bytes > 0
    assert found.activations_bytes == pytest.approx(64 * task.activation_bytes_per_row("fp32"), rel=0.4)


def test_the_metrics_are_those_that_the_settings_name(digits: UNetTask) -> None:
    found = digits.evaluate(digits.build(), CPU)
    assert {name for name in found if not name.endswith("_se")} == set(digits.training.metrics())
    assert digits.training.scored_by() == "validation/kid_pca-8_40"
    assert training(quality=None).scored_by() is None
    score = digits.score(digits.build(), CPU)
    assert score.samples == 40 and len(score.resamples) == 1000 and score.flops > 0
    assert float(score.resamples.mean()) == pytest.approx(score.metrics["validation/kid_pca-8_40"], rel=0.3)


def test_guidance_is_refused_where_nothing_guides(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match=r"guidance 3 needs a model that was also trained without classes"):
        training(class_dropout=0, sampling={"guidance": 3})
    source = str(folder_of_images(tmp_path / "images", 8))
    guided = training(data={"source": source}, sampling={"guidance": 3})
    for refused in (lambda: UNetTask(guided, cache), lambda: registry.prepare("unet", guided, cache, lambda *_: None)):
        with pytest.raises(WrongSettings, match="needs images with classes"):
            refused()


@pytest.mark.parametrize("kind", ["straight", "ddpm", "nonequilibrium"])
def test_it_learns_digits(cache: Path, kind: str) -> None:
    """A few steps lower the loss, by whatever path; on the straight one they bring what is drawn nearer to the data."""
    quality = {"features": "pca-8", "samples": 100} if kind == "straight" else None
    task = UNetTask(training(path={"kind": kind}, sampling={"sampler": "auto", "steps": 5}, quality=quality), cache)
    model = task.build()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    before = task.evaluate(model, CPU)
    for step in range(60):
        sum(task.loss(model, task.batch(step * 32, 32)).values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = task.evaluate(model, CPU)
    assert after["validation/loss"] < 0.95 * before["validation/loss"]
    if quality:
        assert after["validation/kid_pca-8_100"] < 0.8 * before["validation/kid_pca-8_100"]
