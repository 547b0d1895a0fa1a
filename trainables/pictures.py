"""Pictures for people: uint8 arrays of shape (height, width, 3). The same input is the same picture."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_CELL = 48
"""Pixels, at least, that a small image is enlarged to."""
_GAP, _INK, _PAPER, _TEXT = 2, (70, 70, 70), (255, 255, 255), 13
_SIDE, _DPI = 3.2, 100
"""Of a panel of points: inches."""


def grid(
    images: np.ndarray, columns: int, row_labels: Sequence[str] = (), column_labels: Sequence[str] = ()
) -> np.ndarray:
    """Images uint8 (n, height, width, 1 or 3), row by row, with names at the left and the top.

    Small ones are enlarged by a whole factor, every pixel to a square of its own colour.
    """
    n, height, width = images.shape[:3]
    factor = max(1, math.ceil(_CELL / max(height, width)))
    cells = np.repeat(np.repeat(images, factor, axis=1), factor, axis=2)
    if cells.shape[-1] == 1:
        cells = np.repeat(cells, 3, axis=-1)
    height, width = height * factor, width * factor
    font, rows = ImageFont.load_default(_TEXT), math.ceil(n / columns)
    left = math.ceil(max(map(font.getlength, row_labels), default=-2 * _GAP - 4)) + 2 * _GAP + 4
    top = 2 * _TEXT if column_labels else 0
    size = (left + columns * (width + _GAP) - _GAP, top + rows * (height + _GAP) - _GAP)
    picture = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(picture)
    for i, cell in enumerate(cells):
        row, column = divmod(i, columns)
        picture.paste(Image.fromarray(cell), (left + column * (width + _GAP), top + row * (height + _GAP)))
    for row, label in enumerate(row_labels):
        draw.text((left - 6, top + row * (height + _GAP) + height / 2), label, _INK, font, anchor="rm")
    for column, label in enumerate(column_labels):
        room = width
        while label and font.getlength(label) > room:
            label = label[:-1]
        draw.text((left + column * (width + _GAP) + width / 2, _TEXT), label, _INK, font, anchor="mm")
    return np.asarray(picture)


def points(panels: dict[str, np.ndarray], paths: np.ndarray | None = None) -> np.ndarray:
    """Panels of points (n, 2) side by side on the same axes; last, if given, paths (times, n, 2) from noise to data."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    amount = len(panels) + (paths is not None)
    figure = Figure(figsize=(_SIDE * amount, _SIDE + 0.25), dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1, amount, sharex=True, sharey=True, squeeze=False)[0]
    limit = 1.15 * max(float(np.quantile(np.abs(panel), 0.999)) for panel in panels.values())
    for axis, (name, panel) in zip(axes, panels.items(), strict=False):
        axis.plot(*panel.T, ".", markersize=3, markeredgewidth=0, alpha=0.35, color="#2a5db0")
        axis.set_title(name, fontsize=10, color="#464646")
    if paths is not None:
        axes[-1].plot(paths[..., 0], paths[..., 1], linewidth=0.5, alpha=0.35, color="#999999")
        axes[-1].plot(*paths[-1].T, ".", markersize=3, markeredgewidth=0, color="#2a5db0")
        axes[-1].set_title("from noise to data", fontsize=10, color="#464646")
        limit = max(limit, 2.6)
    for axis in axes:
        axis.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal", xticks=[], yticks=[])
        for spine in axis.spines.values():
            spine.set_color("#d0d0d0")
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
