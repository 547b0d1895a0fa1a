"""Text from a GPT: one token after another, each drawn from what the model expects next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .gpt import GPT


@dataclass
class Cache:
    """Keys and values of the tokens a model has seen, allocated once for a whole context.

    Shape (layers, 2, rows, heads, context, head width), keys before values; made by `GPT.new_cache`.
    """

    layers_l2bhtd: Tensor
    filled: int = 0
    """Tokens whose keys and values are in it."""

    def extend(self, layer: int, k_bhtd: Tensor, v_bhtd: Tensor) -> tuple[Tensor, Tensor]:
        """Writes a layer's new keys and values behind the old ones; views of them all."""
        end = self.filled + k_bhtd.shape[-2]
        self.layers_l2bhtd[layer, 0, :, :, self.filled : end] = k_bhtd
        self.layers_l2bhtd[layer, 1, :, :, self.filled : end] = v_bhtd
        return self.layers_l2bhtd[layer, 0, :, :, :end], self.layers_l2bhtd[layer, 1, :, :, :end]


@torch.no_grad()
def generate(
    model: "GPT",
    prompt_ids: Sequence[int],
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """The `tokens` ids that follow `prompt_ids`, which holds at least one, without the prompt.

    Of a prompt longer than the context, the end is used. When the context is full, the later half of it is
    kept and read again: exact, and cheap because it happens once in half a context. `generator` is a CPU one.
    The model is used in its present mode (see `Module.eval`) and device.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty: begin with the end-of-document id")
    device = model.embedding.weight.device
    ids = list(prompt_ids)
    start = max(0, len(ids) - model.context)  # where in `ids` the cached context begins
    cache = model.new_cache()
    for _ in range(tokens):
        if cache.filled == model.context:
            start = len(ids) - max(1, model.context // 2)
            cache.filled = 0
        new = torch.tensor([ids[start + cache.filled :]], device=device)
        logits_v = model.next_logits(new, cache)[0]
        ids.append(choose(logits_v, temperature, top_k, top_p, generator))
    return ids[len(prompt_ids) :]


def choose(
    logits_v: Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> int:
    """An id drawn from softmax(logits / temperature), or the likeliest at temperature 0.

    `top_k` keeps the k likeliest ids (Fan et al. 2018); `top_p`, of these, the fewest that hold this share of
    the probability (nucleus sampling, Holtzman et al. 2020). Drawn on the CPU, so that a seed means the
    same on every device.
    """
    if temperature == 0:
        return int(logits_v.argmax())
    logits, ids = (logits_v.float().cpu() / temperature).sort(descending=True)
    probabilities = logits[:top_k].softmax(-1)
    if top_p is not None:
        # An id stays when those before it do not yet reach the share; the first always does.
        probabilities = probabilities.where(probabilities.cumsum(-1) - probabilities < top_p, 0)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
