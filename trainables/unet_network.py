"""A UNet on images or latents: what a path predicts, from x_t and t.

Shape suffixes: n rows, c channels, h height, w width, t tokens (pixels of the lowest resolution), e width of the
time embedding; without a suffix, images are [n, c, h, w].
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .task import Role
from .unet_model import GROUP, UNetModel

_LEVELS = 3
"""Resolutions: the image's, a half and a quarter of it."""
_FREQUENCIES = 256
"""Features of the time, half of them cosines."""


class Conv(nn.Conv2d):
    """A convolution that keeps the size, or divides it by `stride`. `UNet.initialise` draws its weights."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2)

    def reset_parameters(self) -> None:
        """Leaves the weights undrawn."""


class Linear(nn.Linear):
    """A matrix with a bias. `UNet.initialise` draws its weights."""

    def reset_parameters(self) -> None:
        """Leaves the weights undrawn."""


class Embedding(nn.Embedding):
    """A table of classes. `UNet.initialise` draws its weights."""

    def reset_parameters(self) -> None:
        """Leaves the weights undrawn."""


class Norm(nn.GroupNorm):
    """GroupNorm (Wu and He 2018), in the type of its input, with the channels last."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels // GROUP, channels)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        # On CUDA, autocast would make it fp32, which only takes memory (the kernel's sums are fp32 anyway), and
        # the kernel puts channels first.
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        with torch.autocast("cuda", enabled=False):
            y = functional.group_norm(input, self.num_groups, weight, bias, self.eps)
        return y.contiguous(memory_format=torch.channels_last)


def time_features(t_n: Tensor) -> Tensor:
    """Cosines and sines of 1000·t, [n, 256], at frequencies from 1 down to 1/10,000.

    Those of Ho et al. 2020, whose times are steps from 0 to 1000, after Vaswani et al. 2017, section 3.5.
    """
    half = _FREQUENCIES // 2
    frequencies = torch.exp(-math.log(10_000) / half * torch.arange(half, device=t_n.device))
    angle = 1000 * t_n.float()[:, None] * frequencies
    return torch.cat((angle.cos(), angle.sin()), dim=1)


class Double(Conv):
    """A convolution of the nearest neighbours at twice the height and width."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(functional.interpolate(input, scale_factor=2.0, mode="nearest"))


class Block(nn.Module):
    """Two convolutions added to what comes in; time scales and shifts what is between them.

    Adaptive group normalisation (Dhariwal and Nichol 2021, equation 1). `resize` comes before everything; a block
    that takes a skip reads it beside its input.
    """

    def __init__(self, channels: int, dropout: float, resize: nn.Module | None = None, *, skip: bool = False) -> None:
        super().__init__()
        inputs = 2 * channels if skip else channels
        self.resize = resize or nn.Identity()
        self.norm_1, self.conv = Norm(inputs), Conv(inputs, channels)
        self.time = Linear(channels, 2 * channels)
        self.norm_2, self.dropout, self.out = Norm(channels), nn.Dropout(dropout), Conv(channels, channels)
        self.shortcut = Conv(inputs, channels, kernel=1) if skip else nn.Identity()

    def forward(self, x: Tensor, time_ne: Tensor, skip: Tensor | None = None) -> Tensor:
        x = self.resize(x)
        if skip is not None:
            x = torch.cat((x, skip), dim=1)
        h = self.conv(functional.silu(self.norm_1(x)))
        scale, shift = self.time(time_ne)[:, :, None, None].chunk(2, dim=1)
        h = functional.silu(torch.addcmul(shift, self.norm_2(h), 1 + scale))
        return self.shortcut(x) + self.out(self.dropout(h))


class Attention(nn.Module):
    """Multi-head self-attention among the pixels, added to what comes in."""

    def __init__(self, channels: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.norm, self.qkv, self.out = Norm(channels), Linear(channels, 3 * channels), Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        x_ntc = self.norm(x).flatten(2).transpose(1, 2)
        heads = self.qkv(x_ntc).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        y_ntc = functional.scaled_dot_product_attention(*heads.chunk(3, dim=1)).transpose(1, 2).flatten(-2)
        return x + self.out(y_ntc).transpose(1, 2).unflatten(-1, x.shape[-2:])


class UNet(nn.Module):
    """A UNet (Ronneberger et al. 2015) of residual blocks (Ho et al. 2020, appendix B), on the current default device.

    Three resolutions, each `base` channels wide: `blocks` residual blocks each on the way down, one in the middle,
    with attention behind it if asked, and `blocks` each on the way up, each of which reads its counterpart's output
    beside its input. A strided convolution halves the size; doubling it, nearest neighbours are convolved. The time
    (256 features, through two layers of `base`) scales and shifts in every block. On three channels that makes 6.0,
    9.4 and 13.5 million parameters at base 128, 160 and 192.

    With `classes`, the embedding of a row's class is added to that of its time; the label `classes` means none, for
    classifier-free guidance (Ho and Salimans 2022), and so does leaving labels out. For every channel `outputs` are
    predicted. `recompute` drops what the blocks hold for the backward pass and computes it again there. The weights
    are a function of `seed` alone, the same on every device; untrained, it predicts zero.
    """

    def __init__(
        self,
        settings: UNetModel,
        channels: int,
        size: int,
        classes: int | None = None,
        *,
        outputs: int = 1,
        seed: int = 0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.settings, self.channels, self.size, self.recompute = settings, channels, size, recompute
        self.outputs = outputs
        base, dropout, blocks = settings.base, settings.dropout, _LEVELS * settings.blocks
        begins = range(settings.blocks, blocks, settings.blocks)  # the blocks with which the next level begins
        self.time = nn.Sequential(Linear(_FREQUENCIES, base), nn.SiLU(), Linear(base, base))
        self.classes = None if classes is None else Embedding(classes + 1, base)
        self.stem = Conv(channels, base)
        self.down = nn.ModuleList(
            Block(base, dropout, Conv(base, base, stride=2) if number in begins else None) for number in range(blocks)
        )
        self.middle = Block(base, dropout)
        self.attention = Attention(base, settings.head_width) if settings.attention else nn.Identity()
        self.up = nn.ModuleList(
            Block(base, dropout, Double(base, base) if number in begins else None, skip=True)
            for number in range(blocks)
        )
        self.norm, self.head = Norm(base), Conv(base, outputs * channels)
        self.initialise(torch.Generator("cpu").manual_seed(seed))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draws all weights anew, normal with mean 0.

        The deviation 1/√(inputs) keeps variances; classes have that of the time's embedding. What is added to the
        stream (`out`) and the head begin at zero, as biases do.
        """
        for name, parameter in self.named_parameters():
            if parameter.is_meta or "norm" in name:
                continue
            if parameter.ndim == 1 or name == "head.weight" or name.endswith(".out.weight"):
                parameter.zero_()
                continue
            deviation = 0.4 if name == "classes.weight" else parameter[0].numel() ** -0.5
            # on the CPU, so that every device gets the same
            drawn = torch.empty(parameter.shape, device="cpu").normal_(0, deviation, generator=generator)
            parameter.copy_(drawn)

    def forward(self, x_t: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        """What the path predicts at x_t [n, channels, size, size], of its shape (times `outputs` channels) and type.

        Times t [n] are within [0, 1], labels [n] are int64 within [0, classes].
        """
        time_ne = self._embedding(t, label)
        before, after = self._border
        # All that follows keeps the channels last: 1.2 times as fast on a CPU. Weights keep PyTorch's order, as
        # checkpoints of the optimizer ask for it; the same for them is worth a few percent at most.
        h = functional.pad(x_t, (before, after) * 2).contiguous(memory_format=torch.channels_last)
        h = self.stem(h)
        skips: list[Tensor] = []
        for block in self.down:
            h = self._run(block, h, time_ne)
            skips.append(h)
        h = self.attention(self._run(self.middle, h, time_ne))
        for block in self.up:
            h = self._run(block, h, time_ne, skips.pop())
        output = self.head(functional.silu(self.norm(h))).to(x_t.dtype)
        return output[..., before : before + self.size, before : before + self.size]

    def activation_bytes_per_row(self, precision: Literal["bf16", "fp32"]) -> int:
        """What the backward pass finds in memory, and the gradients around one block on the way.

        In channels by pixels, a block holds its input, and both norms' and SiLUs' outputs, the first convolution's
        and the scaled one: 7, and 10 where a skip makes the first three twice as wide. With recomputation, only
        the inputs of the blocks and one block in full.
        """
        settings, size = self.settings, 2 if precision == "bf16" else 4
        full, half, quarter = self._pixels
        down, up = (8, 11) if settings.dropout else (7, 10)
        kept = settings.blocks * (down + up) * (full + half + quarter) + down * quarter + full + half
        if self.recompute:
            kept = 2 * settings.blocks * (full + half + quarter) + up * full
        attention = 6 * quarter if settings.attention else 0
        ends = 6 * full  # the last norm's input and output and its SiLU's; and gradients
        images = 4 * 4 * self.channels * full
        return size * settings.base * (kept + attention + ends) + images

    def flops_per_row(self) -> int:
        """Training FLOPs of one image: 2 per multiply-add, and three forward passes, as the backward takes two."""
        base, blocks = self.settings.base, self.settings.blocks
        full, half, quarter = self._pixels
        down, up = 18 * base**2, (18 + 9 + 2) * base**2
        ways = blocks * (down + up) * (full + half + quarter) + down * quarter
        resizes = 9 * base**2 * (half + quarter + full + half)
        ends = (1 + self.outputs) * 9 * self.channels * base * full
        time = base * (_FREQUENCIES + base) + (2 * _LEVELS * blocks + 1) * 2 * base**2
        attention = (4 * base + 2 * quarter) * base * quarter if self.settings.attention else 0
        return 3 * 2 * (ways + resizes + ends + time + attention)

    @property
    def _border(self) -> tuple[int, int]:
        """Zeros before and after the pixels of each row and column, so that the size can be halved often enough."""
        missing = -self.size % 2 ** (_LEVELS - 1)
        return missing // 2, missing - missing // 2

    @property
    def _pixels(self) -> list[int]:
        """Of each level, with the border."""
        return [((self.size + sum(self._border)) // 2**level) ** 2 for level in range(_LEVELS)]

    def _embedding(self, t: Tensor, label: Tensor | None) -> Tensor:
        """Of time and class, [n, base], behind the SiLU that all blocks share."""
        time_ne = self.time(time_features(t))
        if self.classes is not None:
            time_ne = time_ne + (self.classes.weight[-1] if label is None else self.classes(label))
        elif label is not None:
            raise ValueError("labels need a UNet with classes")
        return functional.silu(time_ne)

    def _run(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)


def role(name: str, parameter: nn.Parameter) -> Role:
    """The table of classes, the last convolution's weight, matrices, and norms and biases."""
    ends: dict[str, Role] = {"classes.weight": "embedding", "head.weight": "head"}
    return ends.get(name, "vector" if parameter.ndim == 1 else "matrix")
