"""A GPT: the model, and the task of training it on text.

Shape suffixes: b rows, t tokens, c width, h heads, d head width, l layers, v vocabulary, n = b·t; so `q_bhtd`
has the shape (rows, heads, tokens, head width).
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..datasets.batches import TextRows
from ..datasets.settings import TextData
from ..datasets.tokens import PreparedText, prepare
from .cross_entropy import CHUNK_LOGITS, compute_dtype, cross_entropy
from .gpt_settings import GPTModel, GPTTraining
from .settings import Training
from .task import Batch, Role, Samples, evaluating
from .text_generation import Cache, generate
from .workers import ALONE, Workers

EVALUATION_TOKENS = 2**14
"""Tokens in one forward pass of the evaluation."""


def norm(x: Tensor) -> Tensor:
    """`x`, of any shape, brought to mean 0 and variance 1 over its last dimension.

    A LayerNorm (Ba et al. 2016) without scale and shift. The matrix that follows can learn the scale, so
    a learnt one adds only parameters; and where RMSNorm learns as well, this is one fused kernel on every
    device and PyTorch version, which makes the training of a small model on a CPU clearly faster.
    """
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6)


def rotate(x_bthd: Tensor, cos_t1d: Tensor, sin_t1d: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, equation 34), pairing dimension i with i + D/2.

    `sin_t1d` carries the signs: negative in the first half, positive in the second.
    """
    cos, sin = cos_t1d.to(x_bthd.dtype), sin_t1d.to(x_bthd.dtype)
    return torch.addcmul(x_bthd * cos, x_bthd.roll(x_bthd.shape[-1] // 2, dims=-1), sin)


class Linear(nn.Linear):
    """A matrix without bias. `GPT.initialise` draws its weights, so the global generator is left alone."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Leaves the weights undrawn."""


class Embedding(nn.Embedding):
    """An embedding. `GPT.initialise` draws its weights, so the global generator is left alone."""

    def reset_parameters(self) -> None:
        """Leaves the weights undrawn."""


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions and, if asked, normalised queries and keys."""

    def __init__(self, settings: GPTModel, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.head_width = settings.width // settings.head_width, settings.head_width
        self.qk_norm = settings.qk_norm
        self.qkv = Linear(settings.width, 3 * settings.width)
        self.out = Linear(settings.width, settings.width)

    def forward(self, x_btc: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None = None) -> Tensor:
        heads = self.qkv(x_btc).unflatten(-1, (3 * self.heads, self.head_width))
        # queries and keys are treated alike, so in one call as 2H heads
        qk, v = heads.split((2 * self.heads, self.heads), dim=-2)
        if self.qk_norm:
            qk = norm(qk).to(v.dtype)  # autocast on CUDA leaves norms in fp32
        q, k = rotate(qk, *rotary).transpose(1, 2).chunk(2, dim=1)
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
            q = q.to(k.dtype)
        # A single new token sees everything cached. Several are only ever the first ones.
        y_bhtd = functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[-2] > 1)
        return self.out(y_bhtd.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """Two matrices around GELU, or around squared ReLU (So et al. 2021, Primer)."""

    def __init__(self, settings: GPTModel) -> None:
        super().__init__()
        self.activation = settings.activation
        hidden = feedforward_width(settings)
        self.up = Linear(settings.width, hidden)
        self.out = Linear(hidden, settings.width)

    def forward(self, x_btc: Tensor) -> Tensor:
        h = self.up(x_btc)
        return self.out(functional.gelu(h) if self.activation == "gelu" else functional.relu(h).square())


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the stream."""

    def __init__(self, settings: GPTModel, layer: int) -> None:
        super().__init__()
        self.attention = Attention(settings, layer)
        self.feedforward = FeedForward(settings)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x_btc: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None = None) -> Tensor:
        x_btc = x_btc + self.dropout(self.attention(norm(x_btc), rotary, cache))
        return x_btc + self.dropout(self.feedforward(norm(x_btc)))


class GPT(nn.Module):
    """A decoder of tokens, on the current default device.

    `context` is the most tokens a row may have. `recompute` drops what the layers hold for the backward pass
    and computes it again there. The weights are a function of `seed` alone, the same on every device.
    """

    rotary_cos_t1d: Tensor
    rotary_sin_t1d: Tensor

    def __init__(
        self, settings: GPTModel, vocabulary: int, context: int, *, seed: int = 0, recompute: bool = False
    ) -> None:
        super().__init__()
        self.settings, self.vocabulary, self.context, self.recompute = (
            settings,
            vocabulary,
            context,
            recompute,
        )
        self.embedding = Embedding(vocabulary, settings.width)
        self.layers = nn.ModuleList(Layer(settings, number) for number in range(settings.layers))
        # A tied head has no entry of its own: safetensors refuses two names for one tensor.
        self.head = None if settings.tied else Linear(settings.width, vocabulary)
        self.dropout = nn.Dropout(settings.dropout)

        half = settings.head_width // 2
        angle = torch.arange(context)[:, None, None] * settings.rotary_base ** (-torch.arange(half) / half)
        self.register_buffer("rotary_cos_t1d", torch.cat((angle.cos(), angle.cos()), -1), persistent=False)
        self.register_buffer("rotary_sin_t1d", torch.cat((-angle.sin(), angle.sin()), -1), persistent=False)
        self.initialise(torch.Generator("cpu").manual_seed(seed))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draws all weights anew, normal with mean 0.

        Matrices have the deviation 1/√(inputs), which keeps variances at any width (with a fixed 0.02,
        a model of width 128 ended 0.06 nats worse), and those that add to the stream a further 1/√(2l) (Radford
        et al. 2019, section 2.3; zero there ended 0.01 worse). Embedding and head have GPT-2's 0.02. A tied
        embedding makes every token predict itself with a logit of c times its deviation: kept to 3, so that
        the loss starts near ln v at any width.
        """
        width = self.settings.width
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if name in ("embedding.weight", "head.weight"):
                deviation = 0.02 if self.head is not None else min(0.02, 3 / width)
            else:
                deviation = parameter.shape[1] ** -0.5
            if name.endswith(".out.weight"):
                deviation /= math.sqrt(2 * self.settings.layers)
            # on the CPU, so that every device gets the same
            drawn = torch.empty(parameter.shape, device="cpu").normal_(0, deviation, generator=generator)
            parameter.copy_(drawn)

    @property
    def head_weight_vc(self) -> Tensor:
        """The matrix that makes logits: the head's own, or the embedding's when tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def hidden(self, tokens_bt: Tensor, cache: Cache | None = None) -> Tensor:
        """The normalised last states [B, T, C]; with a cache, of tokens that follow those in it."""
        start = 0 if cache is None else cache.filled
        end = start + tokens_bt.shape[-1]
        if end > self.context:
            raise ValueError(f"{end} tokens are more than the context of {self.context}")
        rotary = self.rotary_cos_t1d[start:end], self.rotary_sin_t1d[start:end]
        # Normalised, so that the stream starts at 1 however small a tied embedding is.
        x_btc = self.dropout(norm(self.embedding(tokens_bt)))
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x_btc = checkpoint(layer, x_btc, rotary, use_reentrant=False)
            else:
                x_btc = layer(x_btc, rotary, cache)
        if cache is not None:
            cache.filled = end
        return norm(x_btc)

    def new_cache(self, rows: int = 1) -> Cache:
        """An empty cache for generating that many rows, in the type that attention computes in."""
        settings, weight = self.settings, self.embedding.weight
        heads = settings.width // settings.head_width
        shape = (settings.layers, 2, rows, heads, self.context, settings.head_width)
        return Cache(torch.empty(shape, dtype=compute_dtype(weight), device=weight.device))

    def forward(self, tokens_bt: Tensor, targets_bt: Tensor | None = None) -> Tensor:
        """Logits [B, T, V]; given targets, instead their mean cross-entropy in nats per token."""
        hidden_btc = self.hidden(tokens_bt)
        if targets_bt is None:
            return functional.linear(hidden_btc, self.head_weight_vc)
        return cross_entropy(hidden_btc.flatten(0, 1), self.head_weight_vc, targets_bt.flatten())

    @torch.no_grad()
    def next_logits(self, tokens_bt: Tensor, cache: Cache) -> Tensor:
        """Logits [B, V] of what follows the tokens, which themselves follow those in the cache.

        The cache takes several tokens only while it is empty; after that, one at a time.
        """
        if cache.filled and tokens_bt.shape[-1] > 1:
            raise ValueError("a cache that holds tokens takes one more at a time")
        return functional.linear(self.hidden(tokens_bt, cache)[:, -1], self.head_weight_vc)


def feedforward_width(settings: GPTModel) -> int:
    """Hidden width of the feed-forward layers: a multiple of 8, which tensor cores ask for."""
    return max(8, 8 * round(settings.feedforward * settings.width / 8))


def matmul_parameters(model: GPT) -> int:
    """Parameters that multiply every token: the layers' matrices and the head, but no untied embedding."""
    return sum(parameter.numel() for parameter in model.layers.parameters()) + model.head_weight_vc.numel()


def _shifted(rows: Tensor) -> dict[str, Tensor]:
    """Rows [B, T + 1] as tokens [B, T] and what follows each of them."""
    return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


@functools.lru_cache(maxsize=4)
def _opened(data: TextData, cache: Path) -> PreparedText:
    # Once a process: a lane's next trial neither hashes the shards again nor looks at the corpus.
    return prepare(data, cache)


class GPTTask:
    """A GPT trained to predict the next token of a text (see `Task`)."""

    def __init__(self, training: GPTTraining, cache: Path) -> None:
        """Opens the corpus, which is prepared first where `cache` does not have it yet (see `prepare`).

        A corpus too short for one row is a DataError here, not at the first evaluation.
        """
        self.training = training
        self.text = _opened(training.data, cache)
        self.examples_per_row = length = training.data.sequence_length
        self._training_rows = TextRows(self.text.training, length, training.seed)
        validation_rows = TextRows(self.text.validation, length, seed=0)
        count = max(1, training.evaluation.examples // length)
        self._validation_rows = torch.from_numpy(validation_rows.fixed_rows(count))

    @classmethod
    def prepare(cls, training: Training, cache: Path, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
        """Prepare the corpus; what there is of it, for a person."""
        assert isinstance(training, GPTTraining)
        text = prepare(training.data, cache, progress)
        train, held_out = len(text.training), len(text.validation)
        return {
            "corpus": ", ".join(
                [training.data.corpus] if isinstance(training.data.corpus, str) else training.data.corpus
            ),
            "tokens": f"{train:,} for training, {held_out:,} for validation",
            "vocabulary": f"{text.vocabulary.size:,} entries, {text.bytes_per_token('training'):.2f} bytes a token",
            "prepared in": str(text.folder),
        }

    def build(self) -> GPT:
        """A model with the weights of the training's seed, on the current default device."""
        training = self.training
        return GPT(
            training.model,
            self.text.vocabulary.size,
            training.data.sequence_length,
            seed=training.seed,
            recompute=training.recompute,
        )

    def batch(self, first_row: int, rows: int) -> Batch:
        """{"tokens", "targets"}: int64 [rows, T], the targets one token ahead."""
        return _shifted(torch.from_numpy(self._training_rows.rows(first_row, rows)))

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """{"loss"}: mean cross-entropy in nats per token."""
        return {"loss": model(batch["tokens"], batch["targets"])}

    def evaluate(self, model: nn.Module, device: torch.device, workers: Workers = ALONE) -> dict[str, float]:
        """Mean cross-entropy in nats per token, and in bits per byte of the validation text."""
        total = torch.zeros((), device=device)
        mine = workers.share(len(self._validation_rows))
        at_once = max(1, EVALUATION_TOKENS // self.examples_per_row)
        with evaluating(model):
            for start in range(mine.start, mine.stop, at_once):
                rows = self._validation_rows[start : min(start + at_once, mine.stop)]
                batch = {name: value.to(device) for name, value in _shifted(rows).items()}
                total += len(rows) * self.loss(model, batch)["loss"]
        loss = workers.sum({"loss": total})["loss"].item() / len(self._validation_rows)
        bits_per_token = loss / math.log(2)
        return {
            "validation/loss": loss,
            "validation/bits_per_byte": bits_per_token / self.text.bytes_per_token("validation"),
        }

    def sample(self, model: nn.Module, device: torch.device, workers: Workers = ALONE) -> Samples:
        """{"sample": the prompt and what the model makes of it}; an empty prompt begins a document."""
        if not workers.first:  # one text cannot be shared
            return Samples()
        assert isinstance(model, GPT), "samples are drawn from the bare model: compile it in place"
        sampling, vocabulary = self.training.sampling, self.text.vocabulary
        prompt = [int(token) for token in vocabulary.encode([sampling.prompt])[0]] or self._beginning()
        with evaluating(model):
            continuation = generate(
                model,
                prompt,
                tokens=sampling.tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                generator=torch.Generator("cpu").manual_seed(self.training.seed),
            )
        return Samples(texts={"sample": sampling.prompt + vocabulary.decode(continuation)})

    def _beginning(self) -> list[int]:
        """Where a text without a prompt begins: behind the end of a document, where training has seen one."""
        if self.text.manifest.training.documents > 1:
            return [self.text.vocabulary.end_of_document]
        return self.text.training.windows(np.zeros(1, np.int64), 1)[0].tolist()

    def chance_loss(self) -> float:
        """ln(vocabulary): every token is as likely."""
        return math.log(self.text.vocabulary.size)

    def role(self, name: str, parameter: nn.Parameter) -> Role:
        """The embedding (tied or not), the head, or a matrix: the model has no vectors."""
        ends: dict[str, Role] = {"embedding.weight": "embedding", "head.weight": "head"}
        return ends.get(name, "matrix")

    def activation_bytes_per_row(self, precision: Literal["bf16", "fp32"]) -> int:
        """What the backward pass finds in memory, and one layer's gradients on the way.

        By width of the stream, each layer holds the inputs of its two norms in fp32, and in the precision
        both norms' outputs, q, k, v, rotated q and k, the attention's output and the feed-forward's hidden
        states before and after activation: 40·T·C bytes in bf16, near the classical 34·T·C (Korthikanti et
        al. 2022, equation 1). Fused attention holds no T × T matrix. With recomputation, only the inputs
        of the layers and one layer in full.
        """
        model, size = self.training.model, 2 if precision == "bf16" else 4
        width, vocabulary = model.width, self.text.vocabulary.size
        layer = (8 * width + 2 * feedforward_width(model)) * size + 2 * 4 * width
        if model.qk_norm and precision == "bf16":
            layer += 2 * 4 * width  # CUDA's autocast normalises queries and keys in fp32
        if model.dropout:
            layer += 2 * size * width
        kept = 4 * width * model.layers + layer if self.training.recompute else layer * model.layers
        # The embedding and the two norms outside the layers; then log-probabilities and their gradient in
        # fp32 and once in the precision, of a chunk that eight rows or more share.
        ends = 4 * 4 * width * self.examples_per_row
        logits = min(self.examples_per_row * vocabulary, CHUNK_LOGITS // 8) * (8 + size)
        return self.examples_per_row * (kept + layer) + ends + logits

    def flops_formula_per_example(self) -> float:
        """6N + 12·L·C·T (Chowdhery et al. 2022, PaLM, appendix B), with 2 FLOPs per multiply-add.

        N are the parameters that multiply (no embedding table, but the head); attention counts as full, T by
        T, though half of it is masked.
        """
        model = self.training.model
        with torch.device("meta"):
            parameters = matmul_parameters(self.build())
        return 6 * parameters + 12 * model.layers * model.width * self.training.data.sequence_length


TASK = GPTTask
