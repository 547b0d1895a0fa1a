"""Feature extractors: from images to the vectors in which their quality is measured."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import scipy.linalg
import torch
from torch import Tensor
from torch.nn import functional

from ..datasets.cache import sha256
from ..datasets.corpus import first_line
from ..datasets.errors import DataError
from .quality_options import extractor_name, kind_of

Images = np.ndarray | Tensor
"""Uint8 [n, C, H, W]."""
Embed = Callable[[Tensor], Tensor]

FITTED, FITTED_VALUES = 4096, 1 << 27
"""Images that principal components are fitted to, at most, and their pixels times channels in all: 1 GB in float64."""
_INCEPTION_SIDE = 299


@dataclass(frozen=True, eq=False)
class Extractor:
    """Images to features: uint8 [n, C, H, W] to float32 [n, d] on the CPU, in batches."""

    name: str
    """What metrics call it."""
    identity: str
    """A hash of all that features depend on beside the images: the kind, the weights, how images are resized."""
    device: torch.device
    batch: int
    """Images at once."""
    embed: Embed
    """One batch, on the device."""

    def __call__(self, images: Images) -> Tensor:
        """ValueError where the images are not uint8 [n, C, H, W] with at least one of them."""
        if images.ndim != 4 or not len(images) or str(images.dtype).removeprefix("torch.") != "uint8":
            raise ValueError(f"images must be uint8 [n, C, H, W], found {images.dtype} {list(images.shape)}")
        # Features must not depend on the precision that the training runs in.
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            return torch.cat([self.embed(part).float().flatten(1).cpu() for part in self._batches(images)])

    def _batches(self, images: Images) -> Iterator[Tensor]:
        for first in range(0, len(images), self.batch):
            part = images[first : first + self.batch]
            part = torch.from_numpy(np.array(part)) if isinstance(part, np.ndarray) else part
            yield part.to(self.device)


def extractor(features: str, real: Images, device: torch.device | str = "cpu") -> Extractor:
    """The extractor that `Quality.features` names; `real` are the images that principal components are fitted to.

    DataError where a model cannot be read, or there are fewer images or pixels than components.
    """
    device, name = torch.device(device), extractor_name(features)
    match kind_of(features):
        case "pixels":
            return Extractor(name, _hash(name), device, 1024, _scaled)
        case "pca":
            return _pca(name, int(features.removeprefix("pca-")), real, device)
        case "inception":
            return _inception(name, Path(features), device)
        case "transformers":
            return _transformers(name, features, device)


def principal_components(x: np.ndarray, components: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean [d] and the leading principal directions [components, d] of x [n, d], in float64.

    Each direction's largest entry is positive, so that the same data give the same signs. Raises ValueError where
    `components` exceeds n or d.
    """
    n, d = x.shape
    if not 0 < components <= min(n, d):
        raise ValueError(f"{components} components of {n} rows of {d} numbers")
    mean = x.mean(0, dtype=np.float64)
    centred = x - mean
    if d <= n:
        directions = _leading(centred.T @ centred, components).T
    else:
        # x·xᵀ is smaller, and has the same leading values: its vectors u give the directions xᵀu (Turk, Pentland 1991).
        u = _leading(centred @ centred.T, components)
        directions = np.linalg.qr(centred.T @ u)[0].T
    largest = np.abs(directions).argmax(1)
    return mean, directions * np.sign(directions[np.arange(components), largest])[:, None]


def _leading(symmetric: np.ndarray, amount: int) -> np.ndarray:
    """The eigenvectors of the largest eigenvalues, falling, as columns."""
    last = len(symmetric) - 1
    return scipy.linalg.eigh(symmetric, subset_by_index=[last - amount + 1, last])[1][:, ::-1]


def _pca(name: str, components: int, real: Images, device: torch.device) -> Extractor:
    """Pixels in [-1, 1], centred, along the principal directions of at most `FITTED` images, evenly apart."""
    fitted = min(len(real), FITTED, FITTED_VALUES // math.prod(real.shape[1:]))
    chosen = np.asarray(real[np.linspace(0, len(real) - 1, fitted).astype(np.int64)])
    x = _scaled(torch.from_numpy(chosen.copy())).flatten(1).numpy()
    most = min(x.shape)
    if components > most:
        raise DataError(
            f"features {name}: {len(x)} images of {x.shape[1]} values have {most}; ask for `pca-{most}` or less"
        )
    mean, directions = principal_components(x, components)
    identity = _hash(name, mean.tobytes(), directions.tobytes())
    at = torch.from_numpy(mean).float().to(device)
    along = torch.from_numpy(directions.T.copy()).float().to(device)
    return Extractor(name, identity, device, 1024, lambda images: (_scaled(images).flatten(1) - at) @ along)


def _inception(name: str, path: Path, device: torch.device) -> Extractor:
    """A TorchScript Inception, such as StyleGAN's `inception-2015-12-05.pt` (Karras et al. 2020).

    It is given uint8 NCHW with three channels. One whose `forward` takes `return_features`, as StyleGAN's does, is
    called with it and scales to 299×299 itself, in the way that published FIDs rest on; any other is called plainly,
    with images scaled to 299×299. TorchScript is no pickle, yet it is a program: take it from where you trust.
    """
    try:
        model = torch.jit.load(path, map_location=device).eval()
        takes = {argument.name for argument in model.forward.schema.arguments}
    except (OSError, ValueError, RuntimeError) as error:
        reason = first_line(error) if path.is_file() else "there is no such file"
        raise DataError(f"features {path}: {reason}; give a TorchScript file, or other features") from error

    def embed(images: Tensor) -> Tensor:
        if "return_features" in takes:
            return model(_coloured(images), return_features=True)
        side = (_INCEPTION_SIDE, _INCEPTION_SIDE)
        scaled = functional.interpolate(_coloured(images).float(), side, mode="bicubic", antialias=True)
        return model(scaled.round().clamp(0, 255).to(torch.uint8))

    return Extractor(name, _hash(name, sha256(path).encode()), device, 64, embed)


def _transformers(name: str, where: str, device: torch.device) -> Extractor:
    """A vision model of transformers: its pooled output, or its class token where the pooling was never trained.

    Images are scaled to the size that the model sees, by its own image processor, and not cropped: the borders count.
    """
    import transformers  # takes seconds

    transformers.utils.logging.disable_progress_bar()
    try:
        model, loading = transformers.AutoModel.from_pretrained(
            where, trust_remote_code=False, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
        processor = cast(Any, transformers.AutoImageProcessor.from_pretrained(where, trust_remote_code=False))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise DataError(
            f"features {where}: {first_line(error)}; download the model where the Hub can be reached, and give its "
            "folder, with config.json, preprocessor_config.json and model.safetensors"
        ) from error
    model = cast(Any, getattr(model, "vision_model", model)).to(device).eval()  # CLIP and its like have a text side too
    missing = {key for key in loading["missing_keys"] if "pooler" not in key}
    if missing:
        raise DataError(f"features {where}: lacks weights such as {min(missing)}; give a whole model")
    pooled = not loading["missing_keys"]

    options: dict[str, Any] = {"return_tensors": "pt", "input_data_format": "channels_first"}
    if getattr(processor, "do_center_crop", False):
        crop = dict(processor.crop_size)
        options |= {"do_center_crop": False, "size": {"height": crop["height"], "width": crop["width"]}}

    def embed(images: Tensor) -> Tensor:
        pixels = processor(images=list(_coloured(images).cpu().numpy()), **options)["pixel_values"]
        found = model(pixel_values=pixels.to(device))
        vectors = getattr(found, "pooler_output", None) if pooled else None
        return found.last_hidden_state[:, 0] if vectors is None else vectors

    weights = [weight.detach().cpu() for key, weight in model.state_dict().items() if pooled or "pooler" not in key]
    told = f"{model.config.to_json_string()} {processor.to_json_string()} {options} {pooled}"
    identity = _hash(name, told.encode(), *(weight.contiguous().numpy().data for weight in weights))
    return Extractor(name, identity, device, 64, embed)


def _scaled(images: Tensor) -> Tensor:
    """Uint8 to float32 in [-1, 1]."""
    return images.float() / 127.5 - 1


def _coloured(images: Tensor) -> Tensor:
    """Grey to three equal channels."""
    return images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images


def _hash(name: str, *parts: bytes | memoryview) -> str:
    digest = hashlib.sha256(name.encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
