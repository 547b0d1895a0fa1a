"""How near drawn images are to real ones: distances between two sets of features, a [m, d] and b [n, d].

All is computed in float64 on the CPU, in blocks of bounded memory. Where one set is meant as real, it is b.
"""

import functools
import hashlib
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..datasets.cache import damaged, make_once
from ..datasets.errors import DataError
from .features import Extractor, Images, extractor
from .quality_options import Quality, metric_name, standard_error_name

_log = logging.getLogger(__name__)

FORMAT = 1
_BLOCK = 1 << 22
"""Numbers of a matrix of pairs at once: 32 MB."""


@dataclass(frozen=True, eq=False)
class Moments:
    """The mean [d] and the unbiased covariance [d, d] of features, float64."""

    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, features: Tensor) -> "Moments":
        """Of [n, d], n ≥ 2."""
        x = features.double()
        mean = x.mean(0)
        return cls(mean, (x - mean).T @ (x - mean) / (len(x) - 1))

    @cached_property
    def root(self) -> Tensor:
        """The symmetric square root of the covariance."""
        values, vectors = torch.linalg.eigh(self.covariance)
        return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """The squared Fréchet distance of the Gaussians with the moments of a and b (Heusel et al. 2017, equation 6).

    Biased upwards, the more the fewer the samples (Chong and Forsyth 2020): compare equal numbers alone. A warning goes
    to the log where a set has fewer samples than features, as its covariance is singular.
    """
    for features in (a, b):
        warn_of_few(*features.shape)
    return moments_distance(Moments.of(a), Moments.of(b))


def moments_distance(a: Moments, b: Moments) -> float:
    """|μ_a − μ_b|² + Tr(Σ_a + Σ_b − 2·(Σ_a Σ_b)^½).

    Σ_a Σ_b has the eigenvalues of Σ_b^½ Σ_a Σ_b^½, which is symmetric, so no complex rounding errors arise.
    """
    product = b.root @ a.covariance @ b.root
    overlap = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt().sum()
    return float((a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * overlap)


@functools.cache  # so once, not at every evaluation
def warn_of_few(samples: int, features: int) -> None:
    """Warn, once in a process, of a Fréchet distance from a singular covariance."""
    if samples <= features:
        _log.warning(
            "the Fréchet distance of %d samples with %d features is of a singular covariance and far too large: "
            "draw more samples, or go by KID",
            samples,
            features,
        )


@dataclass(frozen=True, eq=False)
class KernelSums:
    """Sums of the kernel over all others of each row's own set, within [n], and over the other set, between [n]."""

    within: Tensor
    between: Tensor

    def left_out(self, others: int) -> Tensor:
        """[n]: mean within − 2·mean between, without one row in turn; the other set has `others` rows."""
        n = len(self.within)
        within = (self.within.sum() - 2 * self.within) / ((n - 1) * (n - 2))
        between = (self.between.sum() - self.between) / ((n - 1) * others)
        return within - 2 * between


def kid(a: Tensor, b: Tensor, b_within: Tensor | None = None) -> tuple[float, float]:
    """The kernel inception distance and its standard error (Bińkowski et al. 2018, section 4).

    The unbiased estimate of MMD² (Gretton et al. 2012, equation 3) with the kernel (x·y/d + 1)³, over all samples,
    not subsets of them, as it then varies least; it may be negative. The standard error is the jackknife's for
    two samples (Arvesen 1969): asymptotically right where the sets differ, and up to √2 too large where they do not
    (Efron and Stein 1981: never too small in expectation). It takes both sets as random; what two drawn sets have in
    common, the real one, is best left out by `kid_bootstrap`. `b_within` is `within_sums(b)`, where it is known.
    Raises ValueError for fewer than three rows.
    """
    m, n = len(a), len(b)
    if min(m, n) < 3:
        raise ValueError(f"KID needs three samples of each, found {m} and {n}")
    of_a, of_b = _between_sums(a, b)
    sums_a = KernelSums(within_sums(a), of_a)
    sums_b = KernelSums(within_sums(b) if b_within is None else b_within, of_b)
    within = sums_a.within.sum() / (m * (m - 1)) + sums_b.within.sum() / (n * (n - 1))
    value = within - 2 * of_a.sum() / (m * n)
    variance = sum(_jackknife(sums.left_out(others)) for sums, others in ((sums_a, n), (sums_b, m)))
    return float(value), float(variance) ** 0.5


def kid_bootstrap(a: Tensor, b: Tensor, draws: int, seed: int) -> Tensor:
    """KID of `draws` resamplings of both sets, float64 [draws].

    A resampling is a weight for each row, how often it was taken: w of a, v of b. A pair (i, j) then counts w_i·w_j
    times, and a row never pairs with itself, however often it was taken: its copies are no independent samples, and
    counting them would raise every value by about E k(x, x)/m. Means are over the weights of the pairs that count; as
    these are exchangeable, each pair has the expected share 1/(m·(m − 1)), and the mean over resamplings is `kid`'s
    value without bias. The spread is KID's where the sets differ, and up to √3 too wide where they do not.

    The rows that are taken depend on (seed, m, n) alone: values of two drawn sets from the same noise, against the
    same real one, can be subtracted draw by draw.
    """
    random = np.random.default_rng(seed)
    w, v = (torch.from_numpy(random.multinomial(len(x), np.full(len(x), 1 / len(x)), draws)).double() for x in (a, b))
    return _weighted_within(a, w) + _weighted_within(b, v) - 2 * _weighted_between(a, b, w, v)


def _weighted_within(x: Tensor, w: Tensor) -> Tensor:
    total = w.new_zeros(len(w))
    for part, kernel in _kernels(x, x, without_self=True):
        total += ((w[:, part] @ kernel) * w).sum(1)
    return total / (w.sum(1).square() - w.square().sum(1))


def _weighted_between(a: Tensor, b: Tensor, w: Tensor, v: Tensor) -> Tensor:
    total = w.new_zeros(len(w))
    for part, kernel in _kernels(a, b):
        total += ((w[:, part] @ kernel) * v).sum(1)
    return total / (w.sum(1) * v.sum(1))


def within_sums(x: Tensor) -> Tensor:
    """Σ_j≠i k(x_i, x_j) for each row i, float64 [n]."""
    return torch.cat([kernel.sum(1) for _, kernel in _kernels(x, x, without_self=True)])


def _between_sums(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    of_a, of_b = (x.new_zeros(len(x), dtype=torch.float64) for x in (a, b))
    for part, kernel in _kernels(a, b):
        of_a[part] = kernel.sum(1)
        of_b += kernel.sum(0)
    return of_a, of_b


def _jackknife(values: Tensor) -> Tensor:
    n = len(values)
    return (n - 1) / n * (values - values.mean()).square().sum()


def _kernels(a: Tensor, b: Tensor, without_self: bool = False) -> Iterator[tuple[slice, Tensor]]:
    """(x·y/d + 1)³ of some rows of a with all of b; `without_self`, where a is b, has zeros on the diagonal."""
    a, b = a.double(), b.double()
    for part in _blocks(len(a), len(b)):
        kernel = (a[part] @ b.T / a.shape[1]).add_(1)
        kernel = kernel.square().mul_(kernel)
        if without_self:
            kernel.diagonal(part.start).zero_()
        yield part, kernel


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _BLOCK // columns)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


@dataclass(frozen=True)
class Neighbourhood:
    """What k-th nearest neighbours tell, each best at 1; density alone can exceed it."""

    precision: float
    recall: float
    density: float
    coverage: float


def neighbourhood(a: Tensor, b: Tensor, nearest: int) -> Neighbourhood:
    """Drawn a against real b, of which each point has a ball as far as its `nearest`-th neighbour in its own set.

    precision: the share of a in a ball of b; recall: of b in a ball of a (Kynkäänniemi et al. 2019, equation 2).
    density: how many balls of b a point of a is in, over `nearest`; coverage: the share of b's balls that hold a point
    of a (Naeem et al. 2020, equations 3 and 4). All depend on the sizes of the sets: compare equal ones. Raises
    ValueError where a set has no `nearest`-th neighbours.
    """
    if min(len(a), len(b)) <= nearest:
        raise ValueError(f"the {nearest}-th neighbour needs more points than {len(a)} and {len(b)}")
    a, b = a.double(), b.double()
    radius_a, radius_b = _radii(a, nearest), _radii(b, nearest)
    balls = a.new_zeros(len(a))  # of b, around each of a
    recalled, covered = b.new_zeros(2, len(b), dtype=torch.bool)
    for part in _blocks(len(a), len(b)):
        distance = torch.cdist(a[part], b)
        inside = distance <= radius_b
        balls[part] = inside.sum(1)
        covered |= inside.any(0)
        recalled |= (distance <= radius_a[part, None]).any(0)
    precision, recall, coverage = (float(share.double().mean()) for share in (balls > 0, recalled, covered))
    return Neighbourhood(precision, recall, float(balls.mean()) / nearest, coverage)


def _radii(x: Tensor, nearest: int) -> Tensor:
    """The distance to the `nearest`-th neighbour; the nearest of all is the point itself."""
    parts = _blocks(len(x), len(x))
    radius = torch.cat([torch.cdist(x[part], x).kthvalue(nearest + 1, dim=1).values for part in parts])
    return radius * (1 + 1e-9)  # so that rounding does not put that neighbour outside


@dataclass(frozen=True, eq=False)
class Reference:
    """Real images as scores need them."""

    features: Tensor
    """Float32 [n, d]."""
    moments: Moments
    within: Tensor
    """`within_sums` of the features."""

    @classmethod
    def of(cls, features: Tensor) -> "Reference":
        """From features [n, d]; DataError for fewer than three images."""
        if len(features) < 3:
            raise DataError(f"quality needs three real images at least, found {len(features)}; give more data")
        return cls(features, Moments.of(features), within_sums(features))


def reference(images: Images, embed: Extractor, cache: Path, fingerprint: str) -> Reference:
    """The reference of real images, uint8 [n, C, H, W], from `<cache>/features-<fingerprint>/` or computed there now.

    `fingerprint` is of the data set; which of its images, how many, and the extractor's weights are told by a hash of
    them, so a reference never serves others. Any number of processes may call this at once: one works, the others
    wait. A damaged file is computed again. The time grows with the square of n.
    """
    name = f"{embed.name}-{len(images)}-{_key(images, embed)}"
    folder = cache / f"features-{fingerprint}" / name
    found: Reference | None = None

    def fill(partial: Path) -> None:
        nonlocal found
        found = Reference.of(embed(images))
        _save(partial / "reference.safetensors", found)

    loaded = _load(folder / "reference.safetensors")
    if loaded is None:
        shutil.rmtree(folder, ignore_errors=True)
        make_once(folder, fill)
        loaded = found or _load(folder / "reference.safetensors")
    if loaded is None:
        raise damaged(folder / "reference.safetensors")
    return loaded


def _key(images: Images, embed: Extractor) -> str:
    digest = hashlib.sha256(f"{FORMAT} {embed.identity} {list(images.shape)}".encode())
    for first in range(0, len(images), 1024):
        digest.update(np.ascontiguousarray(images[first : first + 1024]).data)
    return digest.hexdigest()[:32]


def _save(path: Path, reference: Reference) -> None:
    tensors = {
        "features": reference.features,
        "mean": reference.moments.mean,
        "covariance": reference.moments.covariance,
        "within": reference.within,
    }
    save_file(tensors, path, {"sha256": _digest(tensors)})


def _load(path: Path) -> Reference | None:
    """None where there is no whole file."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in ("features", "mean", "covariance", "within")}
            told = (file.metadata() or {}).get("sha256")
    except (OSError, SafetensorError):
        return None
    if told != _digest(tensors):
        return None
    return Reference(tensors["features"], Moments(tensors["mean"], tensors["covariance"]), tensors["within"])


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def scores(drawn: Tensor, real: Reference, quality: Quality) -> dict[str, float]:
    """All of `metric_names`, and KID's standard error, from the features [quality.samples, d] of drawn images.

    Fréchet distance and KID are to all real images. Precision, recall, density and coverage depend on how many there
    are of each, so as many real as drawn ones are taken, evenly apart (or as many drawn as real, if those are fewer).
    Raises ValueError where the drawn are not `quality.samples`, DataError where the real are too few.
    """
    if len(drawn) != quality.samples:
        raise ValueError(f"{len(drawn)} drawn images to be scored as {quality.samples}")
    amount = min(len(drawn), len(real.features))
    if amount <= quality.nearest:
        raise DataError(
            f"quality.nearest {quality.nearest} needs more real images than that, found {amount}; lower it or give more"
        )
    for features in (drawn, real.features):
        warn_of_few(*features.shape)
    value, standard_error = kid(drawn, real.features, real.within)
    near = neighbourhood(_evenly(drawn, amount), _evenly(real.features, amount), quality.nearest)
    found = {"kid": value, "fd": moments_distance(Moments.of(drawn), real.moments), **vars(near)}
    named = {metric_name(metric, quality): number for metric, number in found.items()}
    return named | {standard_error_name(quality): standard_error}


def _evenly(x: Tensor, amount: int) -> Tensor:
    return x[torch.linspace(0, len(x) - 1, amount, dtype=torch.float64).round().long()]


class Scorer:
    """Scores drawn images against real ones: `Scorer(quality, real, cache, fingerprint, device)(drawn)`.

    `real` are uint8 [n, C, H, W], and so are the drawn ones, `quality.samples` of the same C, H and W. Errors are those
    of `extractor`, `reference` and `scores`.
    """

    def __init__(
        self, quality: Quality, real: Images, cache: Path, fingerprint: str, device: torch.device | str = "cpu"
    ) -> None:
        self.quality = quality
        self.features = extractor(quality.features, real, device)
        """Images to float32 [n, d]."""
        self.reference = reference(real, self.features, cache, fingerprint)
        self._shape = tuple(real.shape[1:])

    def __call__(self, drawn: Images) -> dict[str, float]:
        """Metrics by name (see `scores`)."""
        if tuple(drawn.shape[1:]) != self._shape:
            raise ValueError(f"drawn images are {list(drawn.shape[1:])}, the real ones {list(self._shape)}")
        return scores(self.features(drawn), self.reference, self.quality)
