"""The optimizer's groups, its state, and the learning rate's closed forms."""

import itertools
import math

import pytest
import torch
from torch import nn

from rigsweep.trainables.optimizer import build_optimizer, learning_rate, load_named_state, named_state
from rigsweep.trainables.settings import Optimizer, Schedule


def model_of() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv2d(1, 1, 3), nn.Linear(4, 5))


def role(name, parameter):
    ends = {"0.weight": "embedding", "4.weight": "head"}
    return ends.get(name, "matrix" if parameter.dim() >= 2 else "vector")


def step(model, optimizer):
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


# --- the learning rate ---


def test_the_warmup_is_linear_to_the_peak():
    schedule = Schedule(warmup=0.2, decay="cosine")
    assert [learning_rate(schedule, 2.0, share) for share in (0.05, 0.1, 0.15, 0.2)] == pytest.approx([0.5, 1, 1.5, 2])


def test_without_a_warmup_the_first_step_is_near_the_peak():
    for decay in ("cosine", "constant", "linear"):
        schedule = Schedule(warmup=0, decay=decay)
        assert learning_rate(schedule, 3.0, 0) == pytest.approx(3.0)
        assert learning_rate(schedule, 3.0, 1e-3) == pytest.approx(3.0, rel=1e-4)


def test_the_cosine_is_that_of_its_paper():
    schedule = Schedule(warmup=0.2, decay="cosine", final=0.1)
    for share in (0.2, 0.4, 0.6, 0.8, 1.0):
        expected = 0.1 + 0.5 * (1 - 0.1) * (1 + math.cos(math.pi * (share - 0.2) / 0.8))
        assert learning_rate(schedule, 1.0, share) == pytest.approx(expected)
    assert learning_rate(schedule, 1.0, 0.6) == pytest.approx(0.55)


def test_the_constant_rate_stays_at_the_peak():
    schedule = Schedule(warmup=0.1, decay="constant", final=0.3)
    assert {learning_rate(schedule, 1.5, share) for share in (0.1, 0.5, 0.9, 1.0)} == {1.5}


def test_the_linear_rate_holds_the_peak_and_decays_over_the_cooldown():
    schedule = Schedule(warmup=0.1, decay="linear", cooldown=0.4, final=0.2)
    found = [learning_rate(schedule, 1.0, share) for share in (0.1, 0.3, 0.6, 0.7, 0.8, 0.9, 1.0)]
    assert found == pytest.approx([1, 1, 1, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup", [0.0, 0.02, 0.6])
def test_the_last_step_has_the_final_share(decay, final, warmup):
    schedule = Schedule(warmup=warmup, decay=decay, cooldown=0.4, final=final)
    assert learning_rate(schedule, 5.0, 1.0) == pytest.approx(5 * final)


@pytest.mark.parametrize("decay", ["cosine", "constant", "linear"])
def test_a_warmup_of_the_whole_budget_ends_at_the_peak(decay):
    schedule = Schedule(warmup=1, decay=decay, cooldown=0)
    assert learning_rate(schedule, 1.0, 0.5) == pytest.approx(0.5)
    assert learning_rate(schedule, 1.0, 1 - 1e-9) == pytest.approx(1)


def test_a_cooldown_of_nothing_is_no_division_by_zero():
    schedule = Schedule(warmup=0, decay="linear", cooldown=0, final=0.1)
    assert [learning_rate(schedule, 1.0, share) for share in (0.5, 0.999, 1.0)] == pytest.approx([1, 1, 0.1])


def test_the_rate_never_jumps():
    for decay in ("cosine", "linear"):
        schedule = Schedule(warmup=0.1, decay=decay, final=0.1)
        rates = [learning_rate(schedule, 1.0, step / 1000) for step in range(1001)]
        assert max(abs(b - a) for a, b in itertools.pairwise(rates)) <= 0.01 + 1e-9


# --- the groups ---


def test_every_parameter_is_in_the_group_of_its_role_exactly_once():
    model = model_of()
    optimizer = build_optimizer(model, role, Optimizer())
    found = {id(p): group["role"] for group in optimizer.param_groups for p in group["params"]}
    assert found == {id(p): role(name, p) for name, p in model.named_parameters()}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(found)


def test_only_parameters_of_two_or_more_dimensions_decay():
    model = model_of()
    optimizer = build_optimizer(model, role, Optimizer(weight_decay=0.3))
    for group in optimizer.param_groups:
        assert {p.dim() >= 2 for p in group["params"]} == {group["weight_decay"] == 0.3}
        assert group["weight_decay"] in (0, 0.3)


def test_decay_shrinks_matrices_and_leaves_vectors():
    model = model_of()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, role, Optimizer(weight_decay=0.5, learning_rate=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name] * (0.95 if parameter.dim() >= 2 else 1))


def test_a_role_with_matrices_and_vectors_decays_only_its_matrices():
    model = nn.Linear(3, 3)
    optimizer = build_optimizer(model, lambda *_: "head", Optimizer(weight_decay=0.1))
    assert [(g["role"], g["weight_decay"]) for g in optimizer.param_groups] == [("head", 0.1), ("head", 0.0)]


def test_the_first_step_is_adams():
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    optimizer = build_optimizer(model, lambda *_: "matrix", Optimizer(weight_decay=0, learning_rate=0.01))
    step(model, optimizer)
    torch.testing.assert_close(model.weight, before - 0.01 * model.weight.grad.sign(), rtol=0, atol=1e-6)


# --- its state ---


@pytest.mark.parametrize("fused", [True, False])
def test_a_state_put_back_gives_the_same_next_step(fused):
    torch.manual_seed(0)
    first, second = model_of(), model_of()
    optimizers = [build_optimizer(model, role, Optimizer(fused=fused)) for model in (first, second)]
    for _ in range(3):
        step(first, optimizers[0])
    second.load_state_dict(first.state_dict())
    load_named_state(second, optimizers[1], named_state(first, optimizers[0]))
    for model, optimizer in zip((first, second), optimizers, strict=True):
        step(model, optimizer)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("fused", [True, False])
def test_fused_or_not_is_the_same_optimizer_and_goes_on_from_the_others_state(fused):
    torch.manual_seed(0)
    first, second = model_of(), model_of()
    second.load_state_dict(first.state_dict())
    optimizers = [
        build_optimizer(model, role, Optimizer(fused=f)) for model, f in ((first, fused), (second, not fused))
    ]
    assert [bool(optimizer.defaults["fused"]) for optimizer in optimizers] == [fused, not fused]
    for model, optimizer in zip((first, second), optimizers, strict=True):
        step(model, optimizer)
    load_named_state(second, optimizers[1], named_state(first, optimizers[0]))
    for model, optimizer in zip((first, second), optimizers, strict=True):
        step(model, optimizer)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("fused", [True, False])
def test_on_a_gpu_the_count_of_steps_lies_where_the_optimizer_keeps_it(fused):
    model = model_of().cuda()
    optimizer = build_optimizer(model, role, Optimizer(fused=fused))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = {name: tensor.device.type for name, tensor in named_state(model, optimizer).items()}
    load_named_state(
        model, optimizer, {name: tensor.cpu().clone() for name, tensor in named_state(model, optimizer).items()}
    )
    assert {name: tensor.device.type for name, tensor in named_state(model, optimizer).items()} == before
    optimizer.step()


def test_a_state_put_back_is_a_copy():
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, lambda *_: "matrix", Optimizer())
    step(model, optimizer)
    state = {name: tensor.clone() for name, tensor in named_state(model, optimizer).items()}
    kept = {name: tensor.clone() for name, tensor in state.items()}
    load_named_state(model, optimizer, state)
    step(model, optimizer)
    assert all(torch.equal(state[name], kept[name]) for name in kept)


def test_the_state_has_no_hyper_parameters():
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, lambda *_: "matrix", Optimizer())
    assert named_state(model, optimizer) == {}
    step(model, optimizer)
    expected = {f"{name}/{key}" for name in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")}
    assert set(named_state(model, optimizer)) == expected
