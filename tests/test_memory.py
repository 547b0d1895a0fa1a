"""Memory: the classical figures, live tensor bytes, estimates, what is kept of measurements and made of them."""

import gc

import pytest
import torch
from torch import nn

from rigsweep.cluster import live_bytes
from rigsweep.cluster.live_bytes import LiveBytes, Parts
from rigsweep.cluster.memory import (
    GIB,
    Budget,
    Observation,
    calibrate,
    classical_activations_bytes,
    classical_bytes,
    lora_parameters,
    observations,
    observe,
    observed,
)

CARD = "RTX 5070 Ti"
SHAPES = {30e6: (384, 6), 124e6: (768, 12), 350e6: (1024, 24), 770e6: (1536, 24), 1.4e9: (2048, 24)}
"""Width and layers by parameters."""


def activations(parameters, *, recompute, rows=8):
    width, layers = SHAPES[parameters]
    return classical_activations_bytes(tokens=1024, rows=rows, width=width, layers=layers, recompute=recompute)


# --- the classical formula ---


@pytest.mark.parametrize(("parameters", "gib"), [(30e6, 1.7), (124e6, 3.2), (350e6, 6.8), (770e6, 13.2), (1.4e9, 22.8)])
def test_the_classical_totals_with_recomputation(parameters, gib):
    assert round(classical_bytes(int(parameters), activations(parameters, recompute=True)) / GIB, 1) == gib


@pytest.mark.parametrize(("parameters", "gib"), [(124e6, 2.4), (350e6, 6.4)])
def test_the_classical_activations_without_recomputation_are_17_times_more(parameters, gib):
    whole, recomputed = (activations(parameters, recompute=recompute) for recompute in (False, True))
    assert round(whole / GIB, 1) == gib
    assert whole == 17 * recomputed


@pytest.mark.parametrize(("rows", "gib"), [(1, 3.9), (8, 4.6)])
def test_the_classical_total_of_lora(rows, gib):
    adapters = lora_parameters(width=2048, layers=24, rank=16)
    kept = activations(1.4e9, recompute=True, rows=rows)
    # 3.95 and 4.6: the figures are cut, not rounded
    total = classical_bytes(adapters, kept, frozen_parameters=int(1.4e9)) / GIB
    assert total == pytest.approx(gib, abs=0.06)


def test_8_bit_moments_take_10_bytes_a_parameter_instead_of_16():
    assert classical_bytes(1000, 0) - classical_bytes(0, 0) == 16_000
    assert classical_bytes(1000, 0, moment_bytes=1) - classical_bytes(0, 0) == 10_000


# --- live bytes ---


def test_bytes_are_counted_while_a_storage_lives_and_views_are_not():
    with LiveBytes() as live:
        x = torch.zeros(1000)
        view = x[10:].view(-1)
        assert live.bytes == 4000
        y = x + 1
        assert live.bytes == 8000
        del x
        assert live.bytes == 8000, "the view holds it"
        del view, y
        gc.collect()
        assert (live.bytes, live.peak_bytes) == (0, 8000)


def test_a_limit_ends_an_operation_also_in_a_backward_pass():
    with LiveBytes(limit_bytes=9000) as live, pytest.raises(torch.OutOfMemoryError, match="limit"):
        weight = torch.zeros(1000, requires_grad=True)
        loss = weight.exp().sum()
        assert live.bytes < 9000
        loss.backward()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))).square().mean()


def parts_of(rows=100, average=False):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Parts(model, Net() if average else None, optimizer, lambda: model(torch.zeros(rows, 64)).backward(), step)


def test_a_budget_by_component():
    found = live_bytes.measure(lambda: parts_of(average=True), accumulates=True)
    count = 64 * 256 + 256 + 256 + 1
    assert (found.parameters_bytes, found.gradients_bytes, found.average_bytes) == (4 * count,) * 3
    assert found.optimizer_bytes == 8 * count + 4 * 4  # and four counts of steps
    assert found.activations_bytes >= 2 * 4 * 100 * 256
    assert found.total_bytes == found.states_bytes + found.activations_bytes


@pytest.mark.parametrize("accumulates", [False, True])
def test_an_estimate_is_what_is_measured_and_allocates_nothing(accumulates):
    def built():
        return parts_of(rows=500, average=True)

    assert live_bytes.estimate(built, accumulates=accumulates) == live_bytes.measure(built, accumulates=accumulates)
    huge = live_bytes.estimate(lambda: parts_of(rows=10**9), accumulates=accumulates)
    assert huge.activations_bytes > 2**40


def test_a_measurement_ends_at_its_limit():
    with pytest.raises(torch.OutOfMemoryError):
        live_bytes.measure(parts_of, accumulates=False, limit_bytes=200_000)


# --- what was measured ---


def budget(activations_bytes, states=1000):
    return Budget(states, 0, 0, 0, activations_bytes)


def observation(shape, activations_bytes, peak_bytes):
    return Observation(shape, budget(activations_bytes), peak_bytes, 10.0)


def test_observations_are_kept_by_card_and_the_newest_of_a_shape_counts(tmp_path):
    assert observed(tmp_path, CARD, "a") is None
    for one in (observation("a", 100, 1200), observation("b", 200, 1300), observation("a", 100, 1250)):
        observe(tmp_path, CARD, one)
    found = observed(tmp_path, CARD, "a")
    assert found is not None
    assert (found.peak_bytes, found.examples_per_second) == (1250, 10.0)
    assert observations(tmp_path, "another card") == []


def test_a_torn_line_costs_only_itself(tmp_path):
    observe(tmp_path, CARD, observation("a", 100, 1200))
    (file,) = (tmp_path / "memory").iterdir()
    file.write_bytes(file.read_bytes() + b'{"shape": "torn", "esti')
    observe(tmp_path, CARD, observation("b", 200, 1300))
    assert [one.shape for one in observations(tmp_path, CARD)] == ["a", "b"]


def test_without_observations_an_estimate_is_as_it_is_with_a_margin_to_be_safe():
    nothing = calibrate([])
    assert nothing.corrected_bytes(budget(1000)) == 2000
    assert nothing.safe_bytes(budget(1000)) == 2200


def test_one_observation_gives_a_factor_and_two_a_line():
    one = calibrate([observation("a", 1000, 2500)])
    assert one.corrected_bytes(budget(2000)) == one.safe_bytes(budget(2000)) == 4000
    two = calibrate([observation("a", 1000, 2300), observation("b", 2000, 3400)])
    assert two.factor == pytest.approx(1.1)
    assert two.corrected_bytes(budget(4000)) == 1000 + 4400 + 200


@pytest.mark.parametrize("peaks", [(500, 400), (1000, 4000), (3000, 2000), (2000, 2000)])
def test_a_correction_is_never_negative(peaks):
    found = calibrate([observation(str(n), 1000 * n, peak) for n, peak in enumerate(peaks, 1)])
    assert found.factor >= 0
    assert found.constant_bytes >= 0
