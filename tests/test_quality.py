"""Quality of drawn images: metrics against closed forms, extractors against the libraries they stand for."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from pydantic import ValidationError
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from torch import Tensor, nn

from rigsweep.datasets.errors import DataError
from rigsweep.trainables import quality as quality_module
from rigsweep.trainables.features import extractor, principal_components
from rigsweep.trainables.quality import (
    Moments,
    Scorer,
    frechet_distance,
    kid,
    kid_bootstrap,
    moments_distance,
    neighbourhood,
    reference,
    scores,
    warn_of_few,
)
from rigsweep.trainables.quality_options import Quality, metric_name, metric_names, standard_error_name


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def digits() -> np.ndarray:
    return (load_digits().images * 15.9375).astype(np.uint8)[:, None]  # pyright: ignore


def noise(rows: int, channels: int = 1, side: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, channels, side, side), dtype=np.uint8)


# Settings and names


def test_names_say_extractor_and_samples() -> None:
    names = metric_names(Quality())
    assert names["validation/kid_pca-64_1000"] == names["validation/fd_pca-64_1000"] == "minimize"
    assert {name for name, goal in names.items() if goal == "maximize"} == {
        f"validation/{metric}_pca-64_1000" for metric in ("precision", "recall", "density", "coverage")
    }
    assert standard_error_name(Quality()) == "validation/kid_pca-64_1000_se"


@pytest.mark.parametrize(
    ("features", "name"),
    [
        ("pixels", "validation/fd_pixels_50"),
        ("facebook/dinov2-small", "validation/fd_dinov2-small_50"),
        ("/models/My_ViT (2)/", "validation/fd_my-vit--2-_50"),
        ("models/inception-2015-12-05.pt", "validation/fid_inception-2015-12-05_50"),
        ("W.PTH", "validation/fid_w_50"),
    ],
)
def test_an_extractor_is_called_by_the_last_part_of_its_path(features: str, name: str) -> None:
    assert metric_name("fd", Quality(features=features, samples=50)) == name


@pytest.mark.parametrize(
    ("features", "says"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        (" pixels", "neither a path nor a name"),
        ("https://example.org/model", "neither a path nor a name"),
        ("Pixels", "written `pixels`"),
        ("pca-0", "a number from 1 on"),
        ("pca-", "a number from 1 on"),
        ("pca", "a number from 1 on"),
        ("PCA-64", "a number from 1 on"),
        ("pca-6.4", "a number from 1 on"),
        ("inception.pkl", "is not read"),
        (".pt", "names nothing"),
        ("..", "names nothing"),
    ],
)
def test_wrong_features_are_answered_in_one_line(features: str, says: str) -> None:
    with pytest.raises(ValidationError, match=says) as raised:
        Quality(features=features)
    assert "\n" not in raised.value.errors()[0]["msg"]


def test_more_samples_than_neighbours() -> None:
    with pytest.raises(ValidationError, match="samples 5 are too few for nearest 5"):
        Quality(samples=5)


def test_the_settings_import_nothing_heavy() -> None:
    code = "import sys, rigsweep.trainables.quality_options; print('torch' in sys.modules, 'numpy' in sys.modules)"
    answer = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "False"]


# Fréchet distance


def with_moments(mean: Tensor, covariance: Tensor, seed: int = 0, rows: int = 40) -> Tensor:
    """Rows whose mean and unbiased covariance are exactly these."""
    x = normal(rows, len(mean), seed=seed)
    x = x - x.mean(0)
    white = x @ torch.linalg.inv(torch.linalg.cholesky(x.T @ x / (rows - 1))).T
    return white @ torch.linalg.cholesky(covariance).T + mean


def test_frechet_of_gaussians_along_the_axes() -> None:
    mean, a, b = torch.tensor([1.0, -2.0, 0.5]).double(), torch.tensor([4.0, 1, 9]), torch.tensor([1.0, 16, 9])
    x = with_moments(torch.zeros(3).double(), a.double().diag())
    y = with_moments(mean, b.double().diag(), seed=1, rows=70)
    # |μ|² + Σ (√a − √b)²
    assert frechet_distance(x, y) == pytest.approx(5.25 + 1 + 9 + 0, rel=1e-9)
    assert frechet_distance(y, x) == pytest.approx(15.25, rel=1e-9)
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-9)


def test_frechet_of_covariances_that_do_not_commute() -> None:
    a, b = (torch.cov(normal(5, 9, seed=seed)) for seed in (2, 3))
    zero = torch.zeros(5).double()
    root = torch.from_numpy(np.real(scipy.linalg.sqrtm((a @ b).numpy())))
    expected = float((a + b - 2 * root).trace())
    assert moments_distance(Moments(zero, a), Moments(zero, b)) == pytest.approx(expected, rel=1e-8)
    assert frechet_distance(with_moments(zero, a), with_moments(zero, b, 1)) == pytest.approx(expected, rel=1e-8)


def test_frechet_of_singular_covariances_by_singular_values() -> None:
    x, y = normal(6, 20), normal(9, 20, seed=1) + 1
    a, b = (x - x.mean(0)) / 5**0.5, (y - y.mean(0)) / 8**0.5
    # The trace of the root of aᵀa·bᵀb is the sum of the singular values of a·bᵀ.
    overlap = torch.linalg.svdvals(a @ b.T).sum()
    expected = (x.mean(0) - y.mean(0)).square().sum() + a.square().sum() + b.square().sum() - 2 * overlap
    assert frechet_distance(x, y) == pytest.approx(float(expected), rel=1e-6)


def test_too_few_samples_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_few.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            frechet_distance(normal(30, 12), normal(12, 12))
        frechet_distance(normal(30, 12), normal(13, 12))
    assert [record.getMessage().count("12 samples with 12 features") for record in caplog.records] == [1]


# KID


def by_double_loop(a: Tensor, b: Tensor) -> float:
    def k(x: Tensor, y: Tensor) -> float:
        return (float(x @ y) / len(x) + 1) ** 3

    m, n = len(a), len(b)
    within_a = sum(k(a[i], a[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    within_b = sum(k(b[i], b[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    return within_a + within_b - 2 * sum(k(x, y) for x in a for y in b) / (m * n)


def jackknife_by_leaving_out(a: Tensor, b: Tensor) -> float:
    def variance(values: list[float]) -> float:
        return (len(values) - 1) * float(np.var(values))

    def without(x: Tensor, i: int) -> Tensor:
        return torch.cat((x[:i], x[i + 1 :]))

    of_a = [by_double_loop(without(a, i), b) for i in range(len(a))]
    return (variance(of_a) + variance([by_double_loop(a, without(b, i)) for i in range(len(b))])) ** 0.5


def test_kid_and_its_jackknife_are_the_double_loops() -> None:
    a, b = normal(7, 3), normal(9, 3, seed=1) * 1.5 + 0.5
    value, standard_error = kid(a, b)
    assert value == pytest.approx(by_double_loop(a, b), rel=1e-12)
    assert standard_error == pytest.approx(jackknife_by_leaving_out(a, b), rel=1e-9)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = normal(50, 4), normal(37, 4, seed=1) + 0.3
    whole = (*kid(a, b), *kid_bootstrap(a, b, 5, 0).tolist(), *vars(neighbourhood(a, b, 3)).values())
    monkeypatch.setattr(quality_module, "_BLOCK", 100)
    parts = (*kid(a, b), *kid_bootstrap(a, b, 5, 0).tolist(), *vars(neighbourhood(a, b, 3)).values())
    assert parts == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(("shift", "least", "most"), [(0.5, 0.9, 1.1), (0.0, 1.0, 1.5)])
def test_the_standard_error_is_the_spread_over_repeats(shift: float, least: float, most: float) -> None:
    found = [kid(normal(100, 4, seed=2 * i), normal(150, 4, seed=2 * i + 1) + shift) for i in range(400)]
    values, errors = np.array(found).T
    ratio = float(np.sqrt(np.mean(errors**2)) / values.std())
    assert least < ratio < most, ratio
    if not shift:
        assert abs(values.mean()) < 4 * values.std() / 20  # unbiased: nothing lies between a set and itself


def test_kid_between_halves_is_zero_within_its_error() -> None:
    x = extractor("pca-16", digits())(digits())[torch.randperm(1797, generator=torch.Generator().manual_seed(0))]
    value, standard_error = kid(x[:900], x[900:])
    assert abs(value) < 3 * standard_error
    far, error = kid(x[:900], x[900:] * 1.2)
    assert far > 3 * error


def test_the_bootstrap_has_the_mean_of_the_estimate_and_its_spread() -> None:
    a, b = normal(60, 4), normal(80, 4, seed=1) + 0.7
    value, standard_error = kid(a, b)
    drawn = kid_bootstrap(a, b, 4000, seed=0)
    assert drawn.shape == (4000,)
    assert abs(float(drawn.mean()) - value) < 4 * float(drawn.std()) / 4000**0.5
    assert float(drawn.std()) == pytest.approx(standard_error, rel=0.15)
    counting_copies = (by_double_loop(a, b) - value) + float((a.square().sum(1) / 4 + 1).pow(3).mean()) / 60
    assert counting_copies > 8 * float(drawn.std()) / 4000**0.5  # the bias that the test above would notice


def test_a_bootstrap_value_is_kid_of_the_rows_taken_without_their_copies() -> None:
    a, b = normal(6, 3), normal(5, 3, seed=1)
    random = np.random.default_rng(3)
    w, v = random.multinomial(6, [1 / 6] * 6, 2)[1], random.multinomial(5, [1 / 5] * 5, 2)[1]

    def mean(x: Tensor, y: Tensor, p: np.ndarray, q: np.ndarray, same: bool) -> float:
        pairs = [(i, j) for i in range(len(x)) for j in range(len(y)) if not (same and i == j)]
        kernel = [(float(x[i] @ y[j]) / 3 + 1) ** 3 for i, j in pairs]
        return float(np.average(kernel, weights=[p[i] * q[j] for i, j in pairs]))

    expected = mean(a, a, w, w, True) + mean(b, b, v, v, True) - 2 * mean(a, b, w, v, False)
    assert float(kid_bootstrap(a, b, 2, seed=3)[1]) == pytest.approx(expected, rel=1e-10)


def test_the_same_rows_are_taken_of_two_drawn_sets() -> None:
    noise_of_both, real = normal(200, 4), normal(200, 4, seed=1)
    near, far = noise_of_both + 0.5, noise_of_both + 0.52
    paired = kid_bootstrap(far, real, 500, 0) - kid_bootstrap(near, real, 500, 0)
    apart = kid_bootstrap(far, real, 500, 0) - kid_bootstrap(near, real, 500, 1)
    assert float(paired.std()) < float(apart.std()) / 5
    assert torch.equal(kid_bootstrap(near, real, 3, 0), kid_bootstrap(near, real, 3, 0))


# Nearest neighbours


def test_neighbours_on_a_line() -> None:
    # Real radii 1, 1, 1.5, 1, 1; drawn radii 3.8, 3.8, 0.5, 0.5.
    real, drawn = torch.tensor([0, 1, 2.5, 10, 11])[:, None], torch.tensor([0.4, 4.2, 30, 30.5])[:, None]
    near = neighbourhood(drawn, real, nearest=1)
    # 0.4 is in the balls of 0 and 1, which are covered; the drawn balls hold 0, 1 and 2.5.
    assert (near.precision, near.recall, near.density, near.coverage) == pytest.approx((1 / 4, 3 / 5, 2 / 4, 2 / 5))


def test_neighbours_of_a_set_and_itself_and_of_a_collapsed_one() -> None:
    x = normal(100, 3)
    same = neighbourhood(x, x, 5)
    assert (same.precision, same.recall, same.coverage) == (1, 1, 1)
    assert same.density == pytest.approx(6 / 5)  # each point and its five neighbours
    collapsed = neighbourhood(x[:1].expand(100, 3), x, 5)
    assert collapsed.precision == 1
    assert collapsed.recall <= 0.01  # precision alone would be fooled
    assert collapsed.coverage < 0.2
    far = neighbourhood(x + 100, x, 5)
    assert (far.precision, far.recall, far.density, far.coverage) == (0, 0, 0, 0)
    with pytest.raises(ValueError, match="5-th neighbour"):
        neighbourhood(x[:5], x, 5)


# Extractors


def test_pixels_are_flattened() -> None:
    images = noise(3, 3, 4)
    x = extractor("pixels", images)(images)
    assert x.dtype == torch.float32
    assert torch.allclose(x, torch.from_numpy(images).flatten(1) / 127.5 - 1)
    assert torch.equal(extractor("pixels", images)(torch.from_numpy(images)), x)
    with pytest.raises(ValueError, match="must be uint8"):
        extractor("pixels", images)(images.astype(np.float32))


@pytest.mark.parametrize("rows", [1797, 40])
def test_principal_components_are_sklearns(rows: int) -> None:
    images = digits()[:rows]
    own = extractor("pca-10", images)(digits())
    x = digits().reshape(-1, 64) / 127.5 - 1
    theirs = PCA(10, svd_solver="full").fit(x[:rows])
    directions: np.ndarray = theirs.components_  # pyright: ignore
    signs = np.sign(directions[np.arange(10), np.abs(directions).argmax(1)])
    assert np.allclose(own.numpy(), theirs.transform(x) * signs, atol=1e-4)
    again = extractor("pca-10", torch.from_numpy(images))
    assert again.identity == extractor("pca-10", images).identity
    assert again.identity != extractor("pca-10", images[1:]).identity
    assert torch.equal(again(digits()), own)


def test_principal_directions_are_orthonormal_where_nothing_varies() -> None:
    x = normal(20, 50).numpy()
    x[:, 10:] = 1
    for rows in (x, x[:, :12]):
        directions = principal_components(rows, 12)[1]
        assert np.allclose(directions @ directions.T, np.eye(12), atol=1e-8)


def test_more_components_than_there_are() -> None:
    with pytest.raises(DataError, match="30 images of 64 values have 30; ask for `pca-30` or less"):
        extractor("pca-64", digits()[:30])


class Inception(nn.Module):
    """Scales inside, as StyleGAN's does, and answers features on demand."""

    def forward(self, img: Tensor, return_features: bool = False) -> Tensor:
        assert img.dtype == torch.uint8 and img.shape[1] == 3
        x = img.float().mean(dim=(2, 3))
        return torch.cat((x, x), dim=1) if return_features else x[:, :1]


class PlainInception(nn.Module):
    """Wants 299×299."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.uint8 and x.shape[1:] == (3, 299, 299)
        return x.float().mean(dim=(2, 3))[:, :, None, None]


def test_a_torchscript_inception(tmp_path: Path) -> None:
    images = noise(70)
    means = torch.from_numpy(images).float().mean(dim=(2, 3))
    for model, width in ((Inception(), 6), (PlainInception(), 3)):
        torch.jit.script(model).save(tmp_path / "inception.pt")  # pyright: ignore
        found = extractor(str(tmp_path / "inception.pt"), images)(images)
        assert found.shape == (70, width)
        assert torch.allclose(found, means.expand(-1, width), atol=1.5)
    (tmp_path / "broken.pt").write_bytes(b"no model")
    for path, says in (("broken.pt", "give a TorchScript file"), ("absent.pt", "there is no such file")):
        with pytest.raises(DataError, match=says) as raised:
            extractor(str(tmp_path / path), images)
        assert "\n" not in str(raised.value)
    torch.save({"weights": torch.ones(2)}, tmp_path / "pickle.pt")
    with pytest.raises(DataError, match="give a TorchScript file"):
        extractor(str(tmp_path / "pickle.pt"), images)


SMALL: Any = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def save_processor(folder: Path) -> None:
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

    BitImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28}).save_pretrained(folder)


def test_a_dinov2_from_its_folder(tmp_path: Path) -> None:
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    model = Dinov2Model(Dinov2Config(**SMALL, image_size=28, patch_size=14)).eval()
    model.save_pretrained(tmp_path)
    save_processor(tmp_path)
    images = noise(66, 3, side=28)
    embed = extractor(str(tmp_path), images)
    mean, deviation = (torch.tensor(x)[:, None, None] for x in ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]))  # fmt: skip  # noqa: E501
    with torch.no_grad():
        token = model((torch.from_numpy(images) / 255 - mean) / deviation).last_hidden_state[:, 0]
    assert torch.allclose(embed(images), token, atol=1e-4)  # seen whole: scaled to 28, not cropped from 32
    grey = noise(3)
    assert torch.equal(embed(grey), embed(grey.repeat(3, axis=1)))
    assert not torch.equal(embed(grey)[0], embed(grey)[1])

    with torch.no_grad():
        next(model.parameters()).add_(1)
    model.save_pretrained(tmp_path)
    assert extractor(str(tmp_path), images).identity != embed.identity


def test_a_vit_without_its_pooling_gives_the_class_token(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    ViTModel(ViTConfig(**SMALL, image_size=28, patch_size=14), add_pooling_layer=False).save_pretrained(tmp_path)
    save_processor(tmp_path)
    images = noise(5, 3, side=28)
    first, again = (extractor(str(tmp_path), images) for _ in range(2))
    assert torch.equal(first(images), again(images))  # freshly drawn pooling weights would differ
    assert first.identity == again.identity


def test_a_model_that_cannot_be_had_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="and give its folder") as raised:
        extractor(str(tmp_path), noise(3))
    assert "\n" not in str(raised.value)
    code = (
        "import numpy\n"
        "from rigsweep.trainables.features import extractor\n"
        "from rigsweep.datasets.errors import DataError\n"
        "try: extractor('someone/something', numpy.zeros((3, 3, 8, 8), numpy.uint8))\n"
        "except DataError as error: print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    answer = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert answer.stdout.count("\n") == 1, answer.stderr
    assert "features someone/something: " in answer.stdout
    assert "where the Hub can be reached" in answer.stdout


# The reference and its cache


def test_a_reference_is_computed_once_for_each_set_and_extractor(tmp_path: Path) -> None:
    images = digits()[:200]
    embed = extractor("pca-8", images)
    first = reference(images, embed, tmp_path, "abc")
    (file,) = tmp_path.glob("features-abc/pca-8-200-*/reference.safetensors")
    written = file.stat().st_mtime_ns
    again = reference(images, embed, tmp_path, "abc")
    assert file.stat().st_mtime_ns == written
    assert torch.equal(again.features, first.features)
    assert torch.equal(again.features, embed(images))
    assert torch.equal(again.moments.covariance, first.moments.covariance)
    assert kid(embed(digits()[200:400]), again.features, again.within) == pytest.approx(
        kid(embed(digits()[200:400]), first.features), rel=1e-12
    )
    reference(images[::-1], embed, tmp_path, "abc")  # another split of as many images
    reference(images, extractor("pca-8", digits()), tmp_path, "abc")  # the same name, fitted to others
    assert len(list(tmp_path.glob("features-abc/*/reference.safetensors"))) == 3


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone"])
def test_a_damaged_reference_is_computed_again(tmp_path: Path, damage: str) -> None:
    images = digits()[:50]
    embed = extractor("pixels", images)
    first = reference(images, embed, tmp_path, "abc")
    (file,) = tmp_path.glob("features-abc/*/reference.safetensors")
    whole = bytearray(file.read_bytes())
    content = {
        "cut": whole[:-9],
        "flipped": whole[:-9] + bytes([whole[-9] ^ 64]) + whole[-8:],
        "empty": b"",
        "gone": b"",
    }
    file.unlink()
    if damage != "gone":
        file.write_bytes(content[damage])
    again = reference(images, embed, tmp_path, "abc")
    assert torch.equal(again.features, first.features)
    assert torch.equal(again.within, first.within)
    assert file.read_bytes() == whole


def test_a_reference_of_two_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs three real images at least, found 2"):
        Scorer(Quality(features="pixels"), digits()[:2], tmp_path, "abc")
    assert not list(tmp_path.glob("features-abc/pixels*"))


# Scores


@pytest.mark.parametrize("features", ["pixels", "pca-32"])
def test_real_digits_score_better_than_noise(tmp_path: Path, features: str) -> None:
    images = digits()[np.random.default_rng(0).permutation(1797)]
    quality = Quality(features=features, samples=800)
    scorer = Scorer(quality, images[:900], tmp_path, "digits")
    real, spoiled, random = (
        scorer(images[900:1700]),
        scorer(images[900:1700] // 2 + noise(800) // 8),
        scorer(noise(800)),
    )
    assert set(real) == {*metric_names(quality), standard_error_name(quality)}
    for name, goal in metric_names(quality).items():
        sign = 1 if goal == "minimize" else -1
        assert sign * real[name] < min(sign * spoiled[name], sign * random[name]), name
    assert abs(real[metric_name("kid", quality)]) < 3 * real[standard_error_name(quality)]
    assert real[metric_name("precision", quality)] > 0.6
    assert real[metric_name("coverage", quality)] > 0.9
    assert random[metric_name("kid", quality)] > 3 * random[standard_error_name(quality)]
    assert scores(scorer.features(images[900:1700]), scorer.reference, quality) == real


def test_as_many_real_as_drawn_images_are_neighbours(tmp_path: Path) -> None:
    # With all 1,600 real images 100 drawn ones could cover few of their balls, however good they are.
    images = digits()[np.random.default_rng(0).permutation(1797)]
    scorer = Scorer(Quality(features="pca-16", samples=100), images[:1600], tmp_path, "digits")
    assert scorer(images[1600:1700])["validation/coverage_pca-16_100"] > 0.85


def test_drawn_images_must_be_as_agreed(tmp_path: Path) -> None:
    scorer = Scorer(Quality(features="pixels", samples=20), digits()[:50], tmp_path, "digits")
    with pytest.raises(ValueError, match="19 drawn images to be scored as 20"):
        scorer(noise(19))
    with pytest.raises(ValueError, match=r"\[3, 8, 8\], the real ones \[1, 8, 8\]"):
        scorer(noise(20, 3))
    with pytest.raises(DataError, match=r"quality\.nearest 5 needs more real images than that, found 4"):
        Scorer(Quality(features="pixels"), digits()[:4], tmp_path, "digits")(noise(1000))
