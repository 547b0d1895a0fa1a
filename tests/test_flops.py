"""Traced FLOPs against the published formula."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rigsweep.trainables.flops import training_flops_per_example
from rigsweep.trainables.gpt import GPTTask
from rigsweep.trainables.gpt_settings import GPTTraining


def task_of(monkeypatch, tmp_path, vocabulary: int, length: int, **settings) -> GPTTask:
    """A task on a text that has no tokenizer, so that any size of vocabulary is quick."""
    stream = SimpleNamespace(name="text", windows=lambda starts, size: np.zeros((len(starts), size), np.int64))
    stream = type("Stream", (SimpleNamespace,), {"__len__": lambda self: 10 * length})(**vars(stream))
    text = SimpleNamespace(vocabulary=SimpleNamespace(size=vocabulary), training=stream, validation=stream)
    monkeypatch.setattr("rigsweep.trainables.gpt.prepare", lambda data, cache: text)
    fixed = {"data": {"sequence_length": length}, "batch": {"examples": length}, "budget": {"examples": 1000}}
    return GPTTask(GPTTraining(**fixed, **settings), tmp_path)


@pytest.mark.parametrize(
    ("vocabulary", "length", "settings"),
    [
        (65, 64, {"model": {"layers": 4, "width": 128, "head_width": 32}}),
        (4096, 128, {"model": {"layers": 4, "width": 96, "head_width": 32, "tied": False}}),
        (
            4096,
            512,
            {"model": {"layers": 2, "width": 64, "head_width": 64, "feedforward": 2, "dropout": 0.1}},
        ),
        (
            300,
            256,
            {"model": {"layers": 3, "width": 64, "head_width": 16, "activation": "gelu", "qk_norm": False}},
        ),
        (32_000, 1024, {}),
        (32_000, 1024, {"recompute": True}),
    ],
)
def test_the_traced_flops_are_those_of_the_formula(monkeypatch, tmp_path, vocabulary, length, settings):
    task = task_of(monkeypatch, tmp_path, vocabulary, length, **settings)
    assert training_flops_per_example(task) == pytest.approx(task.flops_formula_per_example(), rel=0.01)


def test_the_124m_configuration_takes_770_mflop_per_token(monkeypatch, tmp_path):
    task = task_of(monkeypatch, tmp_path, 32_000, 1024)
    expected = 6 * 109_510_656 + 12 * 12 * 768 * 1024
    assert task.flops_formula_per_example() == expected
    assert training_flops_per_example(task) == pytest.approx(770e6, rel=0.01)


def test_counting_leaves_the_generator_alone(monkeypatch, tmp_path):
    task = task_of(monkeypatch, tmp_path, 65, 32, model={"layers": 1, "width": 32, "head_width": 8, "dropout": 0.5})
    before = torch.get_rng_state()
    training_flops_per_example(task)
    assert torch.equal(torch.get_rng_state(), before)
