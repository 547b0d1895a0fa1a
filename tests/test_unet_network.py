"""The UNet: its shapes, its weights, what it reads, and its formulas against traces."""

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional

from rigsweep.cluster import live_bytes
from rigsweep.trainables.flops import training_flops_per_example
from rigsweep.trainables.unet_model import UNetModel
from rigsweep.trainables.unet_network import UNet, role, time_features

SMALL = UNetModel(base=16, blocks=1, head_width=8)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(rows: int = 4, channels: int = 3, size: int = 8) -> tuple[Tensor, Tensor]:
    """x_t and t."""
    draws = generator()
    return torch.randn(rows, channels, size, size, generator=draws), torch.rand(rows, generator=draws)


def nudged(model: UNet) -> UNet:
    """The model with no weight at zero, as a trained one has it."""
    draws = generator(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draws)
    return model


def small(size: int = 8, classes: int | None = None, **changes) -> UNet:
    recompute = changes.pop("recompute", False)
    settings = UNetModel.model_validate(SMALL.model_dump() | changes)
    return nudged(UNet(settings, 3, size, classes, recompute=recompute))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


class Denoising:
    """As much of a task as counting FLOPs asks for."""

    examples_per_row = 1

    def __init__(self, *told, **named) -> None:
        self.told, self.named = told, named

    def build(self) -> UNet:
        return UNet(*self.told, **self.named)

    def batch(self, first_row: int, rows: int) -> dict[str, Tensor]:
        _, channels, size = self.told[:3]
        x, t = images(rows, channels, size)
        return {"x": x, "t": t} | ({"label": torch.zeros(rows, dtype=torch.int64)} if len(self.told) > 3 else {})

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": functional.mse_loss(model(batch["x"], batch["t"], batch.get("label")), batch["x"])}


# --- settings ---


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"base": 20}, "base 20 is not a multiple of 8"),
        ({"base": 40, "attention": True}, "base 40 is not divisible by head_width 32"),
        ({"dropout": 1}, "less than 1"),
        ({"width": 64}, "Extra inputs"),
    ],
)
def test_settings_that_cannot_be_are_refused(told, message):
    with pytest.raises(ValidationError, match=message):
        UNetModel.model_validate(told)


# --- shapes and weights ---


@pytest.mark.parametrize(("base", "millions"), [(128, 6.1), (160, 9.3), (192, 13.3)])
def test_the_parameters_of_three_widths(base, millions):
    with torch.device("meta"):
        model = UNet(UNetModel(base=base), 3, 32)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=0.02)


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize(("channels", "size"), [(3, 8), (1, 16), (1, 28), (3, 30), (4, 32), (16, 7), (3, 64)])
def test_every_size_and_number_of_channels(channels, size, attention):
    model = nudged(UNet(SMALL.model_copy(update={"attention": attention}), channels, size))
    x, t = images(2, channels, size)
    output = model(x, t)
    assert output.shape == x.shape
    assert output.dtype == x.dtype
    assert output.std() > 0.01


def test_a_border_is_only_where_it_is_needed():
    """A size of 30 is one of 32 with a border of zeros, which is cropped; 28 is halved as it is."""
    x, t = images(size=30)
    bordered = small(32)(functional.pad(x, (1, 1, 1, 1)), t)
    torch.testing.assert_close(small(30)(x, t), bordered[..., 1:-1, 1:-1])
    seen = []
    model = small(28)
    model.middle.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    model(*images(size=28))
    assert seen == [(4, 16, 7, 7)]


def test_three_resolutions_with_the_channels_last():
    model, seen = small(attention=True), []
    for block in [*model.down, model.middle, model.attention, *model.up]:
        block.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(*images())
    assert [output.shape[-1] for output in seen] == [8, 4, 2, 2, 2, 2, 4, 8]
    assert all(output.is_contiguous(memory_format=torch.channels_last) for output in seen)


def test_the_weights_are_a_function_of_the_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, again, other = (UNet(SMALL, 3, 8, 5, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if first[name].std() > 0]
    assert {"stem.weight", "classes.weight", "up.2.conv.weight", "time.0.weight"} <= set(drawn)
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def test_a_meta_model_takes_no_memory_and_gives_shapes():
    with torch.device("meta"):
        model = UNet(UNetModel(attention=True), 3, 32, 10)
        assert all(parameter.is_meta for parameter in model.parameters())
        output = model(torch.zeros(2, 3, 32, 32), torch.zeros(2), torch.zeros(2, dtype=torch.int64))
    assert output.is_meta
    assert output.shape == (2, 3, 32, 32)


def test_untrained_it_predicts_zero():
    x, t = images()
    assert not UNet(SMALL, 3, 8)(x, t).any()
    assert small()(x, t).std() > 0.01


def test_signals_keep_their_size_at_any_width():
    x, t = images(rows=200)
    for base in (16, 128):
        model = UNet(UNetModel(base=base), 3, 8)
        with torch.no_grad():
            assert model.stem(x).std().item() == pytest.approx(1, rel=0.2)
            assert model.time(time_features(t)).std().item() == pytest.approx(0.4, rel=0.2)


def test_roles():
    model = UNet(SMALL.model_copy(update={"attention": True}), 3, 8, 10)
    roles = {name: role(name, parameter) for name, parameter in model.named_parameters()}
    assert [name for name in roles if roles[name] == "head"] == ["head.weight"]
    assert [name for name in roles if roles[name] == "embedding"] == ["classes.weight"]
    assert {roles[name] for name in ("stem.weight", "up.1.resize.weight", "attention.qkv.weight")} == {"matrix"}
    vectors = {name for name in roles if roles[name] == "vector"}
    assert vectors == {name for name in roles if name.endswith("bias") or "norm" in name}


# --- what it reads ---


def test_time_matters():
    model, (x, t) = small(), images()
    with torch.no_grad():
        moved = [(model(x, t) - model(x, t + change)).abs().mean() for change in (0.001, 0.3)]
    assert 1e-4 < moved[0] < moved[1] / 2


def test_the_features_of_a_time():
    features = time_features(torch.tensor([0.0, 0.25, 1.0]))
    assert features.shape == (3, 256)
    assert torch.equal(features[0], torch.cat((torch.ones(128), torch.zeros(128))))
    expected = torch.tensor(250.0) * 10_000.0 ** (-3 / 128)
    torch.testing.assert_close(features[1, [3, 131]], torch.stack((expected.cos(), expected.sin())), atol=1e-4, rtol=0)
    assert float(features[2, 255]) == pytest.approx(0.107, abs=1e-3)  # the slowest has hardly begun


def test_rows_do_not_see_each_other():
    model, (x, t) = small(attention=True), images()
    changed = x.clone()
    changed[1] = 0
    with torch.no_grad():
        before, after = model(x, t), model(changed, t)
    torch.testing.assert_close(before[[0, 2, 3]], after[[0, 2, 3]])
    assert not torch.allclose(before[1], after[1], atol=1e-3)


def test_classes_and_none():
    model, (x, t) = small(classes=3), images()
    first, second, none = (torch.full((4,), label) for label in (0, 1, 3))
    with torch.no_grad():
        assert torch.equal(model(x, t), model(x, t, none))
        assert (model(x, t, first) - model(x, t, second)).abs().mean() > 1e-3
        assert (model(x, t, first) - model(x, t)).abs().mean() > 1e-3
        # Each row has its own.
        mixed = model(x, t, torch.tensor([0, 1, 3, 0]))
        torch.testing.assert_close(mixed[1], model(x, t, second)[1])
        torch.testing.assert_close(mixed[2], model(x, t)[2])


def test_labels_need_classes():
    with pytest.raises(ValueError, match="labels need a UNet with classes"):
        small()(*images(), torch.zeros(4, dtype=torch.int64))


def test_dropout_is_for_training_only():
    model, (x, t) = small(dropout=0.2), images()
    with torch.no_grad():
        assert not torch.equal(model(x, t), model(x, t))
        model.eval()
        assert torch.equal(model(x, t), model(x, t))


# --- training ---


def test_a_gradient_reaches_every_parameter():
    model, (x, t) = small(classes=3, attention=True), images()
    found = gradients(model, (model(x, t, torch.tensor([0, 1, 2, 3])) - x).square().mean())
    assert found.keys() == dict(model.named_parameters()).keys()
    # A norm brings back what a bias of all its inputs adds: those gradients are small.
    assert all(gradient.abs().max() > 1e-7 for gradient in found.values())
    assert (found["classes.weight"].abs().amax(1) > 1e-7).all()
    # Checkpoints and the optimizer ask for this order.
    assert all(p.is_contiguous() and p.grad.is_contiguous() for p in model.parameters())  # pyright: ignore


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputation_changes_no_gradient(dropout):
    (x, t), found, losses = images(), [], []
    for recompute in (False, True):
        model = small(classes=3, recompute=recompute, dropout=dropout)
        torch.manual_seed(5)
        losses.append((model(x, t, torch.arange(4)) - x).square().mean())
        found.append(gradients(model, losses[-1]))
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], msg=name)


def test_bf16_autocast_is_close_and_trains_fp32_weights():
    model, (x, t) = small(attention=True), images()
    exact = gradients(model, (model(x, t) - x).square().mean())
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x, t)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, model(x, t), rtol=0.05, atol=0.05)
    rough = gradients(model, (output - x).square().mean())
    for name in ("stem.weight", "up.2.conv.weight", "time.0.weight", "head.weight"):
        assert rough[name].dtype == torch.float32
        assert torch.cosine_similarity(exact[name].flatten(), rough[name].flatten(), dim=0) > 0.98, name


@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_model_gives_the_same_as_one_graph(recompute):
    model, (x, t) = small(classes=3, attention=True, recompute=recompute), images()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    losses = [(run(x, t, torch.arange(4)) - x).square().mean() for run in (model, compiled)]
    torch.testing.assert_close(losses[0], losses[1])
    found = [gradients(model, loss) for loss in losses]
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)
    torch._dynamo.reset()


def test_it_learns():
    """Eighty steps on four images halve the loss of flow matching."""
    x_1, _ = images(channels=1)
    model, draws = UNet(SMALL, 1, 8), generator()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(80):
        rows = torch.randint(0, 4, (16,), generator=draws)
        x_0, t = torch.randn(16, 1, 8, 8, generator=draws), torch.rand(16, generator=draws)
        at = t[:, None, None, None]
        loss = functional.mse_loss(model((1 - at) * x_0 + at * x_1[rows], t), x_1[rows] - x_0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(2, rel=0.15)
    assert sum(losses[-10:]) / 10 < losses[0] / 2


# --- formulas ---


@pytest.mark.parametrize(
    ("settings", "image"),
    [
        ({}, (3, 32)),
        ({"base": 160, "attention": True}, (3, 32)),
        ({"base": 64, "blocks": 1, "attention": True, "head_width": 64}, (4, 64, 10)),
        ({"base": 32, "blocks": 3, "dropout": 0.1}, (1, 28)),
        ({"base": 32}, (3, 30)),
    ],
)
def test_the_traced_flops_are_those_of_the_formula(settings, image):
    model = UNetModel(**settings)
    with torch.device("meta"):
        formula = UNet(model, *image).flops_per_row()
    assert training_flops_per_example(Denoising(model, *image)) == pytest.approx(formula, rel=1e-3)  # pyright: ignore


def activation_bytes(settings: UNetModel, precision: str, rows: int = 4, **named) -> float:
    task = Denoising(settings, 3, 32, **named)

    def build() -> live_bytes.Parts:
        model = task.build()
        optimizer = torch.optim.SGD(model.parameters())

        def micro_step() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = task.loss(model, task.batch(0, rows))["loss"]
            loss.backward()

        return live_bytes.Parts(model, None, optimizer, micro_step, optimizer.step)

    return live_bytes.estimate(build, accumulates=True).activations_bytes / rows


@pytest.mark.parametrize(
    ("settings", "precision", "named"),
    [
        ({"base": 32}, "fp32", {}),
        ({"base": 32}, "bf16", {}),
        ({"base": 128}, "fp32", {}),
        ({"base": 32, "blocks": 1, "attention": True, "dropout": 0.1}, "fp32", {}),
        ({"base": 32}, "fp32", {"recompute": True}),
    ],
)
def test_the_rough_memory_is_near_the_traced(settings, precision, named):
    model = UNet(UNetModel(**settings), 3, 32, **named)
    traced = activation_bytes(UNetModel(**settings), precision, **named)
    assert model.activation_bytes_per_row(precision) == pytest.approx(traced, rel=0.1)
