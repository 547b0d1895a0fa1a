"""Health rules: what is wrong with a training, seen in what it leaves step by step.

A rule looks at every step (loss and gradient norm), every report (speed and memory), the first batches, or what is
about to be kept, and answers with nothing, a warning, or the training's end. What it remembers are plain numbers in
its attributes; they go into checkpoints, so that a training that goes on is judged as if it had never been left.
A new rule is a small class here, named in `RULES`. `watch.py` shows them the training; PyTorch is not known here.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Facts:
    """What rules know of a training beside what it leaves."""

    steps: int
    """Of the whole budget."""
    warmup_steps: int
    batch_examples: int
    learning_rate: float
    clip_norm: float | None
    precision: str
    kind: str = "cpu"
    """Of its card."""
    fresh: bool = True
    """Whether it starts from weights that have learnt nothing."""
    chance: float | None = None
    """The loss of knowing nothing, where the task has one."""


@dataclass(frozen=True)
class Step:
    """What one optimizer step left."""

    number: int
    """1 is the first of the training."""
    examples: int
    loss: float
    gradient_norm: float
    """Before clipping."""


@dataclass(frozen=True)
class Report:
    """Speed and memory since the report before."""

    step: int
    waiting_for_data: float
    """Share of the time."""
    mfu: float
    seconds_per_step: float
    memory_bytes: float
    """Held now, which is not the peak."""
    compilations: int = 0
    """By `torch.compile`, of this training so far."""
    runs_eagerly: bool = False
    """Whether `torch.compile` has given up on a function that it compiled too often."""


@dataclass(frozen=True)
class Kept:
    """What is about to be kept: a checkpoint's weights, and the evaluation, if there was one."""

    examples: int
    weights_are_finite: bool
    evaluation: Mapping[str, float]


@dataclass(frozen=True)
class Look:
    """How a set of images looks, each figure from 0 to 1."""

    contrast: float
    """Deviation of the brightness within an image, mean over the images."""
    chroma: float
    """Difference between the strongest and the weakest channel of a pixel, mean; 0 is grey."""
    saturated: float
    """Share of values at either end of the range."""
    variety: float
    """Deviation of a pixel's value from image to image, mean."""

    @classmethod
    def at(cls, images: Any) -> "Look":
        """Of uint8 images (n, height, width, channels)."""
        values = images.astype("float32") / 255
        brightness = values.mean(-1)
        return cls(
            contrast=float(brightness.std(axis=(1, 2)).mean()),
            chroma=float((values.max(-1) - values.min(-1)).mean()),
            saturated=float(((images == 0) | (images == 255)).mean()),
            variety=float(values.std(0).mean()),
        )


@dataclass(frozen=True)
class Drawn:
    """Images that a model drew, and as many real ones."""

    share: float
    """Of the budget that it has been trained for."""
    drawn: Look
    real: Look


@dataclass(frozen=True)
class Finding:
    """What a rule has to say: a warning, or with a `state` that the training ends in it."""

    reason: str
    state: str = ""
    keep_batch: bool = False
    """Whether the step's batch is to be kept, to be looked at."""


class Rule:
    """One rule of one training. Each method is called in the order of the training, and may answer."""

    name: ClassVar[str]

    def __init__(self, facts: Facts):
        self.facts = facts

    def batch(self, batch: Mapping[str, Any]) -> Finding | None:
        """Look at one of the first batches: named CPU tensors."""

    def step(self, step: Step) -> Finding | None:
        """Look at a step."""

    def report(self, report: Report) -> Finding | None:
        """Look at a report."""

    def kept(self, kept: Kept) -> Finding | None:
        """Look at what is about to be kept."""

    def drawn(self, images: Drawn) -> Finding | None:
        """Look at drawn images."""

    def state(self) -> dict[str, Any]:
        """What it remembers, as JSON."""
        return {name: value for name, value in vars(self).items() if name != "facts"}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Remember what `state` said."""
        vars(self).update(state)


class NonFiniteLoss(Rule):
    """The loss, of training or of an evaluation, is NaN or infinite: the end."""

    name = "non-finite-loss"

    def step(self, step: Step) -> Finding | None:
        if math.isfinite(step.loss):
            return None
        found = f"the loss is not finite ({step.loss}) after {step.examples:,} examples"
        return Finding(f"{found}; {_where_to_look(self.facts)}", "diverged", keep_batch=True)

    def kept(self, kept: Kept) -> Finding | None:
        bad = [name for name, value in kept.evaluation.items() if not math.isfinite(value)]
        if not bad:
            return None
        found = f"{bad[0]} is not finite ({kept.evaluation[bad[0]]}) after {kept.examples:,} examples"
        return Finding(f"{found}; {_where_to_look(self.facts)}", "diverged")


class NonFiniteGradient(Rule):
    """A gradient is NaN or infinite though the loss is not: the end, as such a step ruins the weights."""

    name = "non-finite-gradient"

    def step(self, step: Step) -> Finding | None:
        if math.isfinite(step.gradient_norm):
            return None
        found = f"the gradient is not finite ({step.gradient_norm}) after {step.examples:,} examples"
        return Finding(
            f"{found}, though the loss is {step.loss:.4g}; {_where_to_look(self.facts)}", "diverged", keep_batch=True
        )


class NonFiniteWeights(Rule):
    """A weight is NaN or infinite before a step has shown it: the end, and no checkpoint is made of it."""

    name = "non-finite-weights"

    def kept(self, kept: Kept) -> Finding | None:
        if kept.weights_are_finite:
            return None
        found = f"a weight is not finite after {kept.examples:,} examples"
        return Finding(f"{found}; {_where_to_look(self.facts)}", "diverged")


class TargetsLeaked(Rule):
    """A first loss far below chance, before anything can have been learnt: the end.

    It is `failed`: left alone, such a trial would win its sweep, and as `diverged` its parameters would be to blame.
    Few examples say little, so of small batches the first together are judged, up to a thousand examples.
    """

    name = "targets-leaked"
    share = 0.75
    """Of chance. A GPT that sees its targets and has learnt nothing starts at 0.4 to 0.75 of it."""

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self.first: list[float] = []

    def step(self, step: Step) -> Finding | None:
        enough = max(1, min(10, 1000 // self.facts.batch_examples))
        chance = self.facts.chance
        if chance is None or not self.facts.fresh or step.number > enough:
            return None
        self.first.append(step.loss)
        if len(self.first) < enough or (loss := statistics.fmean(self.first)) >= self.share * chance:
            return None
        return Finding(
            f"the first loss is {loss:.3g} where knowing nothing gives {chance:.3g}: the targets have leaked into the "
            "inputs; check that targets are one ahead of the inputs, and that attention is causal",
            "failed",
        )


class LossAboveChance(Rule):
    """The loss stays well above chance after the warm-up: the end."""

    name = "loss-above-chance"
    margin = 0.5

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self.above = 0

    def step(self, step: Step) -> Finding | None:
        chance, long = self.facts.chance, max(10, self.facts.steps // 50)
        if chance is None or step.number <= self.facts.warmup_steps or step.loss <= chance + self.margin:
            self.above = 0
            return None
        self.above += 1
        if self.above < long:
            return None
        return Finding(
            f"the loss is {step.loss:.3g} after {step.examples:,} examples, and knowing nothing gives {chance:.3g}; "
            f"{_calmer(self.facts)}",
            "diverged",
        )


class GradientNorm(Rule):
    """The gradient norm rises far out of its usual range: a warning, and the end once the loss confirms it.

    It rises dozens of steps before the loss does. What is usual is the mean and deviation of its logarithm,
    exponentially weighted, for which each value is drawn in to what was usual before it (winsorised): so a rise does
    not become usual at once. A single high norm is an odd batch; an alarm is the mean of a few.
    """

    name = "gradient-norm"
    least = 30
    """Steps after the warm-up that make a usual range."""
    slow, fast = 1 / 50, 1 / 8
    """Weights of a new value in what is usual, and in what is now."""
    settling = 10
    """The first of them, in which the norm falls."""
    least_deviation = 0.1
    widest = 1.5
    """Deviations from the mean to which a value is drawn in."""
    alarm_deviations, alarm_ratio = 2.5, 1.8
    """From what is usual to what is now, for an alarm."""

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self.seen = 0
        self.mean, self.variance, self.now = 0.0, 0.0, 0.0
        self.loss, self.lowest_loss, self.loss_noise = 0.0, 0.0, 0.0
        self.alarmed_at, self.above = 0, 0

    def step(self, step: Step) -> Finding | None:
        if step.number <= self.facts.warmup_steps:
            return None
        self.seen += 1
        deviations, ratio = self._follow_norm(math.log(max(step.gradient_norm, 1e-30)))
        self._follow_loss(step.loss)
        first = not self.alarmed_at
        if self.seen > self.least and deviations > self.alarm_deviations and ratio > self.alarm_ratio:
            self.alarmed_at = step.number
        if not self.alarmed_at:
            return None
        if self._confirmed(step.number):
            return Finding(
                f"the gradient norm rose out of its usual range, and the loss followed: from {self.lowest_loss:.3g} to "
                f"{self.loss:.3g} after {step.examples:,} examples; {_calmer(self.facts)}",
                "diverged",
            )
        if not first:
            return None
        usual = f"{math.exp(self.mean):.3g} ({deviations:.2g} deviations of its logarithm)"
        return Finding(
            f"the gradient norm is {ratio:.2g} times its usual {usual} after {step.examples:,} examples; if the loss "
            f"follows, {_calmer(self.facts)}"
        )

    def _follow_norm(self, value: float) -> tuple[float, float]:
        """How far the norm is from what is usual, in deviations and as a ratio."""
        if self.seen == 1:
            self.mean = self.now = value
        self.now += self.fast * (value - self.now)
        deviation = max(math.sqrt(self.variance), self.least_deviation)
        away = self.now - self.mean
        off = value - self.mean
        if self.seen > self.settling:
            off = max(-self.widest * deviation, min(self.widest * deviation, off))
            counted = self.seen - self.settling
            self.variance += max(self.slow, 1 / counted) * (off**2 - self.variance)
        self.mean += max(self.slow, min(self.fast, 1 / self.seen)) * off
        return away / deviation, math.exp(min(away, 50.0))

    def _follow_loss(self, loss: float) -> None:
        if self.seen == 1:
            self.loss = self.lowest_loss = loss
        if not self.alarmed_at:
            self.loss_noise += max(self.slow, 1 / self.seen) * (abs(loss - self.loss) - self.loss_noise)
        self.loss += self.fast * (loss - self.loss)
        self.lowest_loss = min(self.lowest_loss, self.loss)

    def _confirmed(self, number: int) -> bool:
        """Whether the loss has been well above its lowest for long enough, not long after an alarm."""
        well_above = self.lowest_loss + 4 * self.loss_noise + 0.05 * abs(self.lowest_loss)
        near = number - self.alarmed_at <= max(100, self.facts.steps // 10)
        self.above = self.above + 1 if near and self.loss > well_above else 0
        return self.above >= max(20, self.facts.steps // 50)


class NoProgress(Rule):
    """After a fifth of the budget the loss is where it began, but for its noise: a warning."""

    name = "no-progress"

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self.first: list[float] = []
        self.last: list[float] = []

    def step(self, step: Step) -> Finding | None:
        window = max(5, self.facts.steps // 50)
        due = max(self.facts.steps // 5, 4 * window)
        if not self.facts.fresh or step.number > due:
            return None
        if step.number <= window:
            self.first.append(step.loss)
        elif step.number > due - window:
            self.last.append(step.loss)
        if step.number < due or min(len(self.first), len(self.last)) < window:
            return None
        before, now = statistics.fmean(self.first), statistics.fmean(self.last)
        noise = math.sqrt((statistics.variance(self.first) + statistics.variance(self.last)) / window)
        if now < before - 2 * noise:
            return None
        return Finding(
            f"no progress: the loss began at {before:.4g} and is {now:.4g} after {step.examples:,} examples; "
            f"try ten times the learning rate of {self.facts.learning_rate:.2g}, or a tenth where it jumps about, and "
            "look at the data"
        )


class WaitingForData(Rule):
    """The card waits for its data, long enough to matter: a warning."""

    name = "waiting-for-data"
    share = 0.2
    least_seconds = 60.0
    """Of a whole training; less is not worth a word."""

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self.shares: list[float] = []

    def report(self, report: Report) -> Finding | None:
        self.shares = [*self.shares, report.waiting_for_data][-5:]
        share = statistics.median(self.shares)
        seconds = share * report.seconds_per_step * self.facts.steps
        if len(self.shares) < 5 or share <= self.share or seconds < self.least_seconds:
            return None
        return Finding(
            f"{share:.0%} of the time is spent waiting for data, some {seconds:,.0f} s of a whole training; put the "
            "cache on a faster disk, leave the machine's CPU to it, or take larger micro-batches"
        )


class LowMFU(Rule):
    """A GPU reaches less than a fifth of its speed: a warning. A CPU's cores are rarely the trial's alone."""

    name = "low-mfu"
    least = 0.2

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self.reached: list[float] = []

    def report(self, report: Report) -> Finding | None:
        # The first has the start in it, and compiling.
        self.reached = [*self.reached, report.mfu][-5:]
        if self.facts.kind != "cuda" or len(self.reached) < 5 or (mfu := statistics.median(self.reached)) >= self.least:
            return None
        precision = "" if self.facts.precision == "bf16" else "bf16, "
        return Finding(
            f"the MFU is {mfu:.0%}; try {precision}compile: true, larger micro-batches (batch.micro, batch.examples), "
            "and a wider model"
        )


class Recompiling(Rule):
    """`torch.compile` compiles again and again, or has given up: a warning."""

    name = "recompiling"

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self.reports, self.compilations, self.grew = 0, 0, 0

    def report(self, report: Report) -> Finding | None:
        self.reports += 1
        self.grew = self.grew + 1 if report.compilations > self.compilations and self.reports > 3 else 0
        self.compilations = report.compilations
        advice = "TORCH_LOGS=recompiles says which value changes; keep shapes, and the model's numbers, the same"
        if report.runs_eagerly:
            return Finding(f"torch.compile has given up on a function that it compiled too often; {advice}")
        if self.grew < 3:
            return None
        return Finding(f"torch.compile has compiled {report.compilations} times by step {report.step}; {advice}")


class MemoryGrowing(Rule):
    """Memory grows at report after report: a warning."""

    name = "memory-growing"
    least_bytes = 64 * 2**20

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self.reports = 0
        self.held: list[list[float]] = []
        """Step and bytes of the last reports."""

    def report(self, report: Report) -> Finding | None:
        self.reports += 1
        self.held = [*self.held, [report.step, report.memory_bytes]][-11:]
        if self.reports < 14:  # the start, evaluations and samples fill caches
            return None
        (start, before), (step, now) = self.held[0], self.held[-1]
        grew = sum(b > a for (_, a), (_, b) in zip(self.held, self.held[1:], strict=False))
        if grew < 9 or now - before < max(self.least_bytes, 0.05 * before):
            return None
        rate = (now - before) / (step - start)
        end = now + rate * (self.facts.steps - step)
        return Finding(
            f"memory grows by {rate / 1e6:.3g} MB a step and is {now / 1e9:.3g} GB; at the end it would be "
            f"{end / 1e9:.3g} GB; look for tensors that are kept from step to step, such as losses with their graph"
        )


class MaskedAttentionRow(Rule):
    """A row of an attention mask lets nothing through, and its softmax is NaN: a warning."""

    name = "masked-attention-row"

    def batch(self, batch: Mapping[str, Any]) -> Finding | None:
        for name in ("mask", "attention_mask"):
            if name in batch and not (seen := (batch[name] != 0).any(-1)).all():
                return Finding(
                    f"{int((~seen).sum()):,} of {seen.numel():,} rows of `{name}` are masked as a whole, and attention "
                    "makes NaN of them; leave at least one position open, such as the row's own"
                )
        return None


class ImageRule(Rule):
    """One of the rules on drawn images: after a fifth of the budget, beside real ones, a warning."""

    least_share = 0.2

    def drawn(self, images: Drawn) -> Finding | None:
        return self.judge(images.drawn, images.real) if images.share >= self.least_share else None

    def judge(self, drawn: Look, real: Look) -> Finding | None:
        """What is wrong with the drawn ones, if anything is."""


class ImagesGrey(ImageRule):
    """Drawn images have next to no contrast, and no colour."""

    name = "images-grey"

    def judge(self, drawn: Look, real: Look) -> Finding | None:
        if drawn.contrast >= 0.25 * real.contrast or drawn.chroma > max(0.1, real.chroma):
            return None
        return Finding(
            f"the drawn images are grey: their contrast is {drawn.contrast:.3f}, of real ones {real.contrast:.3f}; "
            "look at the sampler's direction of time and at the scale of the data, or train longer"
        )


class ImagesOneColour(ImageRule):
    """Drawn images are a single colour each."""

    name = "images-one-colour"

    def judge(self, drawn: Look, real: Look) -> Finding | None:
        if drawn.contrast >= 0.25 * real.contrast or drawn.chroma <= max(0.1, real.chroma):
            return None
        return Finding(
            f"the drawn images are one colour: their contrast is {drawn.contrast:.3f}, that of real ones "
            f"{real.contrast:.3f}; look at the channels' order and scale, and at a lower learning rate"
        )


class ImagesSaturated(ImageRule):
    """Far more of the drawn values lie at the ends of the range than of the real ones."""

    name = "images-saturated"

    def judge(self, drawn: Look, real: Look) -> Finding | None:
        if drawn.saturated <= real.saturated + 0.3:
            return None
        return Finding(
            f"the drawn images are saturated: {drawn.saturated:.0%} of their values are at an end of the range, and "
            f"{real.saturated:.0%} of real ones; take a lower guidance scale, or more steps"
        )


class ImagesAlike(ImageRule):
    """Drawn images hardly differ from each other, though each has contrast."""

    name = "images-alike"

    def judge(self, drawn: Look, real: Look) -> Finding | None:
        if drawn.variety >= 0.25 * real.variety or drawn.contrast < 0.25 * real.contrast:
            return None
        return Finding(
            f"the drawn images are all alike: a pixel deviates by {drawn.variety:.3f} between them, and by "
            f"{real.variety:.3f} between real ones; take a lower guidance scale, and look at the noise they start from"
        )


RULES: list[type[Rule]] = [
    NonFiniteWeights,
    NonFiniteLoss,
    NonFiniteGradient,
    TargetsLeaked,
    LossAboveChance,
    GradientNorm,
    NoProgress,
    WaitingForData,
    LowMFU,
    Recompiling,
    MemoryGrowing,
    MaskedAttentionRow,
    ImagesGrey,
    ImagesOneColour,
    ImagesSaturated,
    ImagesAlike,
]
"""Every rule, in the order in which they are asked: those that end a training first, a cause before its effects."""


def _where_to_look(facts: Facts) -> str:
    """The order in which to look for what is not finite: what is likeliest and quickest to try first."""
    clip = "clipping, which is off" if facts.clip_norm is None else f"clipping below {facts.clip_norm:g}"
    steps = [
        *(["a few steps in fp32"] if facts.precision != "fp32" else []),
        f"a tenth of the learning rate ({facts.learning_rate / 10:.2g})",
        "the data",
        clip,
    ]
    return f"look in this order: {', '.join(steps)}"


def _calmer(facts: Facts) -> str:
    clip = "turn clipping on" if facts.clip_norm is None else f"clip below {facts.clip_norm:g}"
    return f"take a lower learning rate than {facts.learning_rate:.2g}, a longer warm-up, or {clip}"
