"""The figures of a report: SVG in which colours are CSS variables and text stays text.

So one page serves light and dark, and the browser's own fonts write what parameters hold, Chinese too. Figures
are as wide as a phone and scale little; names of axes and legends stand around them as HTML, which wraps.
Matplotlib is imported when one is drawn, and used without pyplot, so that no thread shares a figure.
"""

import html
import io
import math
import re
import statistics
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .space import Dimension, plain_choice, word
from .tables import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 340.0, 230.0  # of CSS pixels: Matplotlib's points, of which an SVG's user units are
GROUPS = 6
"""Colours that can be told apart; more groups share one."""
_FONT, _TOP, _RIGHT, _BOTTOM = 11.0, 8.0, 22.0, 28.0
_ROLES = ("ink", "muted", "grid", "best", "bad", *(f"group{i}" for i in range(GROUPS)))
_ROW = 22.0  # height of a category, where categories are rows
_LONGEST = 22  # columns of a category's name


class Curve(NamedTuple):
    """A trial's evaluations."""

    x: Sequence[float]
    y: Sequence[float]


class Mark(NamedTuple):
    """A trial in a chart of one parameter; `value` is None where it has none to compare."""

    number: int
    parameter: Any
    value: float | None
    role: str
    """A colour: `group0` ..., `muted` (stopped), `bad` (diverged and the like), `best` or `ink` (the base)."""


class Point(NamedTuple):
    """A measured value and its interval, at a number."""

    at: float
    value: float
    low: float | None
    high: float | None
    role: str


def learning_curves(
    name: str,
    faint: Sequence[Curve],
    groups: Sequence[Sequence[Curve]],
    base: Curve | None,
    best: Curve | None,
    *,
    minimize: bool,
) -> str:
    """Objective over progress: stopped trials faint, the others by group, the best on top, the base dashed."""
    every = [*faint, *(curve for group in groups for curve in group), *(c for c in (base, best) if c)]
    end = max(max(curve.x) for curve in every)
    low, high = _reach(faint, [curve for curve in every if curve not in faint] or every, 0.1 * end, minimize)
    figure, axes = _figure(low, high)
    axes.set_xlim(0, end * 1.01)
    _name_ticks(axes, "x", [t for t in _ticks(0, end) if t <= end], count)
    for role, curves, width, opacity in (
        ("muted", faint, 0.9, 0.45),
        *((f"group{i}", curves, 1.1, 0.7 if len(curves) < 60 else 0.35) for i, curves in enumerate(groups)),
    ):
        _lines(axes, curves, color=_color(role), linewidth=width, alpha=opacity)
    axes.plot([c.x[-1] for c in faint], [c.y[-1] for c in faint], ".", color=_color("muted"), markersize=3, alpha=0.8)
    if base:
        _lines(axes, [base], color=_color("ink"), linewidth=1.6, dashes=(4, 2.5))
    if best:
        _lines(axes, [best], color=_color("best"), linewidth=2.4)
        axes.plot(best.x[-1:], best.y[-1:], "o", color=_color("best"), markersize=6, clip_on=False)
    return _svg(figure, name, "learning curves")


def _reach(faint: Sequence[Curve], curves: Sequence[Curve], late: float, minimize: bool) -> tuple[float, float]:
    """The range worth looking at: not the first fall, nor what shot up; the good side is always whole.

    Most stopped trials are to be seen where they ended, if that leaves the others apart.
    """
    sign = 1 if minimize else -1
    every = sorted(sign * y for curve in (*faint, *curves) for y in curve.y)
    values = sorted(sign * y for curve in curves for x, y in zip(*curve, strict=True) if x > late) or every
    stopped = sorted(sign * curve.y[-1] for curve in faint)
    worst = values[int(0.95 * (len(values) - 1))]
    if stopped:
        worst = max(worst, min(stopped[int(0.7 * (len(stopped) - 1))], worst + 1.5 * (worst - every[0])))
    low, high = sorted((sign * every[0], sign * worst))
    return _padded(low, high)


def parameter(name: str, dimension: Dimension, marks: Sequence[Mark], *, minimize: bool, share: bool) -> str:
    """Objective against one searched parameter: complete trials solid, others hollow, or crossed at the edge."""
    low, high = _compared(marks, minimize)
    if dimension.kind == "choice":
        labels = [shortened(word(choice)) for choice in dimension.choices]
        room = (WIDTH - 60) / len(labels)
        rows = max(_wide(label) for label in labels) > room - 8
        place = {word(plain_choice(choice)): i for i, choice in enumerate(dimension.choices)}
        figure, axes = _category_axes(labels, low, high, rows=rows)

        def where(mark: Mark) -> float:
            # Neighbours a golden section apart, always the same for a trial.
            return place[word(plain_choice(mark.parameter))] + (mark.number * 0.618034 % 1 - 0.5) * 0.4
    else:
        rows = False
        figure, axes = _figure(low, high)
        _range_axis(axes, dimension, share=share)

        def where(mark: Mark) -> float:
            return float(mark.parameter)

    for role in dict.fromkeys(mark.role for mark in marks):
        chosen = [mark for mark in marks if mark.role == role]
        at = [where(mark) for mark in chosen]
        worst = high if minimize else low
        values = [min(max(worst if m.value is None else m.value, low), high) for m in chosen]
        axes.plot(*((values, at) if rows else (at, values)), clip_on=False, **_style(role, len(marks)))
    return _svg(figure, name, f"objective against {dimension.key}")


def _style(role: str, marks: int) -> dict[str, Any]:
    own = _color(role)
    size = 5.5 if marks < 150 else 3.5
    plain = {"linestyle": "", "color": own, "markersize": size, "markeredgewidth": 1.0}
    if role == "muted":
        return plain | {"marker": "o", "markerfacecolor": "none", "zorder": 2}
    if role == "bad":
        return plain | {"marker": "x", "markeredgewidth": 1.6, "zorder": 3}
    if role in ("best", "ink"):
        face = {"markerfacecolor": "none", "markeredgewidth": 1.8} if role == "ink" else {}
        return plain | {"marker": "D" if role == "ink" else "o", "markersize": 8, "zorder": 5} | face
    return plain | {"marker": "o", "alpha": 0.85 if marks < 150 else 0.6, "zorder": 4}


def _compared(marks: Sequence[Mark], minimize: bool) -> tuple[float, float]:
    """The range of complete trials, and as much of the others' as leaves those apart."""
    solid = [mark.value for mark in marks if mark.role not in ("muted", "bad") and mark.value is not None]
    others = [mark.value for mark in marks if mark.role == "muted" and mark.value is not None]
    if not solid:
        solid, others = others or [0.0], []
    low, high = min(solid), max(solid)
    more = 0.8 * (high - low) if high > low else math.inf
    if others and minimize:
        high = min(max(high, *others), high + more)
    elif others:
        low = max(min(low, *others), low - more)
    return _padded(low, high)


def _padded(low: float, high: float) -> tuple[float, float]:
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - pad, high + pad


def with_errors(name: str, points: Sequence[Point], *, described: str) -> str:
    """A measured value against a number, with the interval of each; the chosen ones stand out."""
    ends = [end for point in points for end in (point.value, point.low, point.high) if end is not None]
    figure, axes = _figure(*_padded(min(ends), max(ends)))
    at = [point.at for point in points]
    pad = 0.04 * (max(at) - min(at)) or 0.5
    axes.set_xlim(min(at) - pad, max(at) + pad)
    _name_ticks(axes, "x", [tick for tick in _ticks(min(at), max(at)) if min(at) <= tick <= max(at)], tick_name)
    axes.plot(at, [point.value for point in points], color=_color("group0"), linewidth=1.4, alpha=0.6)
    for point in points:
        color = _color(point.role)
        if point.low is not None and point.high is not None:
            axes.plot([point.at] * 2, [point.low, point.high], color=color, linewidth=1.4, solid_capstyle="round")
        axes.plot([point.at], [point.value], "o", color=color, markersize=8 if point.role == "best" else 5)
    return _svg(figure, name, described)


def tradeoff(name: str, points: Sequence[tuple[float, float, str, str]], *, described: str) -> str:
    """One measured value against another, each point (x, y, its name, its colour), joined in their order.

    Of points that lie close together one is named, the best first.
    """
    x, y = [point[0] for point in points], [point[1] for point in points]
    figure, axes = _figure(*_padded(min(y), max(y)))
    low, high = _padded(min(x), max(x))
    axes.set_xlim(low, high)
    _name_ticks(axes, "x", [tick for tick in _ticks(low, high) if low <= tick <= high], tick_name)
    axes.plot(x, y, color=_color("grid"), linewidth=1.2)
    taken: list[tuple[float, float]] = []
    for one, other, named, role in sorted(points, key=lambda point: point[3] != "best"):
        axes.plot([one], [other], "o", color=_color(role), markersize=8 if role == "best" else 5)
        right, up = axes.transData.transform((one, other))
        if any(abs(right - a) < _wide(named) + 8 and abs(up - b) < _FONT for a, b in taken):
            continue
        taken.append((right, up))
        axes.annotate(
            named, (one, other), (6, 4), textcoords="offset points", fontsize=_FONT - 2, color=_color("muted")
        )
    return _svg(figure, name, described)


# Axes.


def _figure(low: float, high: float) -> "tuple[Figure, Axes]":
    """A figure with an axis of values from `low` to `high`, and room for its numbers."""
    ticks = _ticks(low, high)
    figure, axes = _empty(max(_wide(tick_name(tick)) for tick in ticks) + 14)
    axes.set_ylim(low, high)
    _name_ticks(axes, "y", ticks, tick_name)
    axes.grid(axis="y", color=_color("grid"), linewidth=0.8)
    return figure, axes


def _empty(left: float, height: float = HEIGHT) -> "tuple[Figure, Axes]":
    """A figure with a margin for the names at its left."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 72, height / 72))
    box = (left / WIDTH, _BOTTOM / height, (WIDTH - left - _RIGHT) / WIDTH, (height - _BOTTOM - _TOP) / height)
    axes = figure.add_axes(box)
    axes.patch.set_visible(False)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_color("grid"))
    axes.tick_params(length=0, pad=9, labelsize=_FONT, labelcolor=_color("muted"))
    axes.set_axisbelow(True)
    return figure, axes


def _range_axis(axes: "Axes", dimension: Dimension, *, share: bool) -> None:
    low, high = dimension.low, dimension.high
    if dimension.log:
        axes.set_xscale("log")
        ratio = (high / low) ** 0.04
        axes.set_xlim(low / ratio, high * ratio)
        ticks = _decades(low, high)
    else:
        pad = 0.04 * (high - low) or 0.5
        axes.set_xlim(low - pad, high + pad)
        ticks = [tick for tick in _ticks(low, high) if low <= tick <= high]
    name: Callable[[float], str] = (lambda tick: f"{100 * tick:.3g}%") if share else tick_name
    _name_ticks(axes, "x", ticks, name)
    axes.xaxis.set_minor_locator(_nowhere())


def _category_axes(labels: list[str], low: float, high: float, *, rows: bool) -> "tuple[Figure, Axes]":
    """Categories side by side, or below each other where their names are long."""
    places = list(range(len(labels)))
    if not rows:
        figure, axes = _figure(low, high)
        axes.set_xlim(-0.5, len(labels) - 0.5)
        axes.set_xticks(places, labels, parse_math=False)
        return figure, axes
    height = max(HEIGHT, len(labels) * _ROW + _TOP + _BOTTOM)
    figure, axes = _empty(max(_wide(label) for label in labels) + 14, height)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(places, labels, parse_math=False)
    axes.set_xlim(low, high)
    _name_ticks(axes, "x", [tick for tick in _ticks(low, high) if low <= tick <= high], tick_name)
    axes.grid(axis="x", color=_color("grid"), linewidth=0.8)
    return figure, axes


def _name_ticks(axes: "Axes", axis: str, ticks: list[float], name: Callable[[float], str]) -> None:
    place = axes.set_xticks if axis == "x" else axes.set_yticks
    place(ticks, [name(tick) for tick in ticks], parse_math=False)


def _ticks(low: float, high: float) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    return [float(t) for t in MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= t <= high]


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten; 1, 2 and 5 of each where there are few; at most five."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for parts in ((1,), (1, 3), (1, 2, 5)):
        ticks = [part * 10.0**power for power in range(first, last + 1) for part in parts]
        ticks = [tick for tick in ticks if low * 0.9999 <= tick <= high * 1.0001]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / 5)]
    return ticks if len(ticks) > 1 else [low, high]


def _nowhere() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def tick_name(value: float) -> str:
    """A number at an axis: 0.001, 25k, 3e-6."""
    value = 0.0 if abs(value) < 1e-12 else value
    if abs(value) >= 10_000:
        return f"-{count(-value)}" if value < 0 else count(value)
    return re.sub(r"e([-+])0*", lambda found: "e" + found[1].strip("+"), f"{value:.6g}")


def _wide(text: str) -> float:
    """About the pixels of a text, whatever font a browser has: rather more."""
    return _FONT * sum(_columns(letter) for letter in text) * 0.6


def _columns(letter: str) -> float:
    return 1.75 if unicodedata.east_asian_width(letter) in "WF" else 1.0


def shortened(text: str, most: int = _LONGEST) -> str:
    """A name in one line of at most so many columns: its beginning and its end."""
    text = " ".join(text.split())
    if sum(_columns(letter) for letter in text) <= most:
        return text
    kept = [0, 0]
    halves = (text, text[::-1])
    for half in (0, 1):
        room = most / 2 - 1
        for letter in halves[half]:
            room -= _columns(letter)
            if room < 0:
                break
            kept[half] += 1
    return f"{text[: kept[0]]}…{text[len(text) - kept[1] :]}"


# SVG.


def _lines(axes: "Axes", curves: Sequence[Curve], **style: Any) -> None:
    """Many curves as one path: a style is written once, not once a trial."""
    x: list[float] = []
    y: list[float] = []
    for curve in curves:
        x += [*curve.x, math.nan]
        y += [*curve.y, math.nan]
    if x:
        axes.plot(x, y, solid_capstyle="round", **style)


def thinned(curve: Curve, most: int = 40) -> Curve:
    """A curve with at most so many points, its last among them; each is the mean of those that it stands for."""
    if len(curve.x) <= most:
        return curve
    size = math.ceil(len(curve.x) / most)
    pieces = [slice(max(0, end - size), end) for end in range(len(curve.x), 0, -size)][::-1]
    return Curve([curve.x[p][-1] for p in pieces], [statistics.fmean(curve.y[p]) for p in pieces[:-1]] + [curve.y[-1]])


def _color(role: str) -> str:
    """A colour that stands for a CSS variable."""
    return f"#0000{_ROLES.index(role) + 1:02x}"


def _svg(figure: "Figure", name: str, described: str) -> str:
    """The figure as an element of a page. The same figure is the same text, whenever it is drawn."""
    import matplotlib as mpl

    width, height = figure.get_size_inches() * 72
    described = html.escape(described)
    buffer = io.StringIO()
    # The salt keeps the ids of a page's figures apart. Glyphs are the browser's business.
    with (
        warnings.catch_warnings(),
        mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "path.simplify_threshold": 0.2}),
    ):
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        about: Any = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=about)
    drawn = buffer.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"<svg [^>]*", f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{described}"', drawn)
    # Inside tags only: what stands between them is text of a parameter's value.
    return re.sub(r"<[^>]*>", lambda tag: _light_tag(tag[0]), drawn).strip()


def _light_tag(tag: str) -> str:
    """A tag with the page's colours and fonts, and no more digits than one sees."""
    for pattern, instead in (
        (r' id="[a-zA-Z0-9]*_\d+"', ""),
        (r"font: ([\d.]+px)[^;\"]*", r"font-size: \1"),
        (r"#0000([0-9a-f]{2})", lambda found: f"var(--{_ROLES[int(found[1], 16) - 1]})"),
        (r"(\d\.\d)\d{2,}", r"\1"),
        (r"\s+", " "),
    ):
        tag = re.sub(pattern, instead, tag)
    return tag
