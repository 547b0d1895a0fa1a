"""An image file as pixels: 8 bits a channel, upright, on white, a square of the size that is asked for."""

import io
import struct

import numpy as np
from PIL import Image, ImageOps

from .errors import DataError

Image.init()
# Only these: Pillow has formats (EPS) that start another program on what a stranger wrote.
FORMATS = [name for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF") if name in Image.OPEN]
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif")
PIXELS = 100_000_000
"""More than that in one image is taken for an attempt to exhaust the memory."""

# What Pillow's decoders are known to raise on bytes that are not what they seem.
_FAULTS = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    *(NotImplementedError, struct.error, Image.DecompressionBombError, Image.DecompressionBombWarning),
)


class Damaged(Exception):
    """Bytes that are no image, or not a whole one; the message says why."""


def decode(name: str, content: bytes | np.ndarray, size: int | None, channels: int, enlarge: bool) -> np.ndarray:
    """Uint8 (side, side, channels) from the bytes of a file, or from uint8 pixels (height, width).

    The largest square in the middle, scaled to `size`, where one is given. Of an animation, the first frame.
    Damaged where the bytes cannot be decoded; DataError where the image does not fit the size.
    """
    try:
        image = _opened(content) if isinstance(content, bytes) else Image.fromarray(content)
        image = _plain(image, "L" if channels == 1 else "RGB")
    except _FAULTS as error:
        raise Damaged(" ".join(str(error).split()) or type(error).__name__) from error
    pixels = np.asarray(_square(name, image, size, enlarge))
    return pixels.reshape(*pixels.shape[:2], channels)


def _opened(content: bytes) -> Image.Image:
    """Decoded and turned as its EXIF says."""
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.UnidentifiedImageError as error:
        raise ValueError("no image of a known format" if content else "no bytes") from error
    if image.width * image.height > PIXELS:
        raise ValueError(f"{image.width} × {image.height} pixels are more than {PIXELS:,}")
    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    return image


def _plain(image: Image.Image, mode: str) -> Image.Image:
    """An image of any mode as `L` or `RGB`: what is transparent shows white."""
    if image.mode[0] in "IF":
        image = _eight_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def _eight_bits(image: Image.Image) -> Image.Image:
    """65535 becomes 255; Pillow's own conversion would clip at 255."""
    values = np.asarray(image).astype(np.int64)
    if image.mode == "F" or values.min() < 0 or values.max() > 65535:
        raise ValueError("its values are not of 8 or 16 bits, so nobody knows which is white")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _square(name: str, image: Image.Image, size: int | None, enlarge: bool) -> Image.Image:
    width, height = image.size
    short = min(width, height)
    if size is None:
        if width != height:
            raise DataError(f"{name}: {width} × {height} pixels are no square; set data.size, and it is cropped")
        return image
    if short < size and not enlarge:
        raise DataError(
            f"{name}: {width} × {height} pixels are smaller than data.size = {size}; give a smaller one, "
            "or set data.enlarge: true"
        )
    left, top = (width - short) // 2, (height - short) // 2
    box = (left, top, left + short, top + short)
    # Pillow widens the filter when it makes an image smaller, so nothing aliases.
    return image.crop(box) if short == size else image.resize((size, size), Image.Resampling.LANCZOS, box=box)
