"""The FLOPs of a training, counted by tracing, so that a new trainable needs no counting by hand."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .task import Task

TRACED_ROWS = 2


def training_flops_per_example(task: Task) -> float:
    """FLOPs (2 per multiply-add) of training on one example: three forward passes, as in PaLM, appendix B.

    The backward pass does each product of the forward twice, once for the inputs and once for the weights.
    It is not traced: the counter takes a grouped convolution's for a full one, and recomputation, which is no
    progress, would count. Without gradients, a layer or a chunk of the loss is counted once.

    Nothing is computed: model and batch are on `meta`. Attention takes the math backend, since the counter
    knows no other for a CPU; it counts causal attention as full, which is PaLM's convention too.
    """
    batch = {name: value.to("meta") for name, value in task.batch(0, TRACED_ROWS).items()}
    with torch.device("meta"):
        model = task.build()
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            task.loss(model, batch)
    return 3 * counter.get_total_flops() / (TRACED_ROWS * task.examples_per_row)
