"""The GPT: its model, its loss, its generation and its task."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rigsweep.trainables.gpt import (
    GPT,
    TASK,
    GPTTask,
    cross_entropy,
    feedforward_width,
    matmul_parameters,
    rotate,
)
from rigsweep.trainables.gpt_settings import GPTModel, GPTTraining
from rigsweep.trainables.text_generation import choose, generate

VOCABULARY, CONTEXT = 61, 32
CPU = torch.device("cpu")
TEXT = "".join(f"{number} bottles, {number * number} ships and a sea of {number % 7}.\n" for number in range(300))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(**changes) -> GPTModel:
    return GPTModel(**({"layers": 2, "width": 32, "head_width": 8} | changes))


def model_of(*, seed: int = 0, recompute: bool = False, vocabulary: int = VOCABULARY, **changes) -> GPT:
    return GPT(small(**changes), vocabulary, CONTEXT, seed=seed, recompute=recompute)


def lively(**changes) -> GPT:
    """A model whose logits differ clearly, as those of a trained one do."""
    model = model_of(tied=False, **changes).eval()  # a tied one just repeats itself
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(20 if name == "head.weight" else 8 if "attention.out" in name else 1)
    return model


def tokens_of(rows: int, length: int = CONTEXT, seed: int = 1, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def task_of(folder: Path, **changes) -> GPTTask:
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    data = {"corpus": str(folder / "text.txt"), "vocabulary": "characters", "sequence_length": CONTEXT}
    settings = {
        "data": data | {"validation": "last 10%"},
        "model": small(),
        "batch": {"examples": 4 * CONTEXT},
        "budget": {"examples": 1000},
        "evaluation": {"examples": 20 * CONTEXT},
        "sampling": {"tokens": 50},
    }
    return GPTTask(GPTTraining(**(settings | changes)), folder / "cache")


# --- the model ---


def test_the_124m_configuration_has_109_5m_matmul_parameters():
    for tied in (True, False):
        with torch.device("meta"):
            model = GPT(GPTModel(layers=12, width=768, head_width=64, tied=tied), 32_000, 1024)
        assert matmul_parameters(model) == 12 * 12 * 768**2 + 32_000 * 768 == 109_510_656
        assert sum(p.numel() for p in model.parameters()) == 109_510_656 + (0 if tied else 32_000 * 768)


def test_the_weights_are_a_function_of_the_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = model_of(seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second, other = model_of(seed=3).state_dict(), model_of(seed=4).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_a_meta_model_takes_no_memory_and_gives_shapes():
    with torch.device("meta"):
        model = GPT(GPTModel(), 50_000, 1024)
        tokens = torch.zeros((2, 1024), dtype=torch.int64)
        assert model(tokens).shape == (2, 1024, 50_000)
        loss = model(tokens, tokens)  # in chunks
    assert loss.is_meta
    assert loss.shape == ()
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("width", [32, 256])
def test_an_untrained_model_knows_nothing(tied, width):
    model = model_of(tied=tied, width=width, vocabulary=500)
    tokens, targets = (tokens_of(8, seed=seed, vocabulary=500) for seed in (1, 2))
    assert model(tokens, targets).item() == pytest.approx(math.log(500), abs=0.1)


def test_the_loss_is_that_of_the_logits():
    model, tokens, targets = lively(), tokens_of(4), tokens_of(4, seed=2)
    expected = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), expected)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_no_token_sees_a_later_one(qk_norm):
    model, tokens = lively(qk_norm=qk_norm), tokens_of(2)
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=0)
    assert ((before - after)[:, 20:].abs().amax(-1) > 1e-4).all()  # and every later one sees it


def test_rows_do_not_see_each_other():
    model, tokens = lively(), tokens_of(3)
    changed = tokens.clone()
    changed[1] = 0
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[[0, 2]], after[[0, 2]], rtol=0, atol=0)


def test_attention_depends_on_distances_only():
    """Rotary positions: moving queries and keys together changes no score (Su et al. 2021, equation 16)."""
    model = model_of()
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(at_q: int, at_k: int) -> float:
        cos, sin = model.rotary_cos_t1d, model.rotary_sin_t1d
        turned = [rotate(x, cos[at : at + 1], sin[at : at + 1]) for x, at in ((q, at_q), (k, at_k))]
        return (turned[0] * turned[1]).sum().item()

    assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-5)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)
    assert score(0, 0) == pytest.approx((q * k).sum().item(), abs=1e-6)


def test_more_tokens_than_the_context_are_refused():
    with pytest.raises(ValueError, match="33 tokens are more than the context of 32"):
        model_of()(tokens_of(1, 33))


@pytest.mark.parametrize(
    ("activation", "qk_norm", "tied"),
    itertools.product(["gelu", "squared_relu"], [True, False], [True, False]),
)
def test_every_kind_learns(activation, qk_norm, tied):
    model = model_of(activation=activation, qk_norm=qk_norm, tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, targets = tokens_of(2, 16), tokens_of(2, 16, seed=2)
    losses = []
    for _ in range(12):
        losses.append(model(tokens, targets))
        found = gradients(model, losses[-1])
        assert all(gradient.abs().sum() > 0 for gradient in found.values())
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputation_changes_no_gradient(dropout):
    tokens, targets = tokens_of(4), tokens_of(4, seed=2)
    found = []
    for recompute in (False, True):
        model = model_of(recompute=recompute, dropout=dropout)
        torch.manual_seed(5)
        found.append(gradients(model, model(tokens, targets)))
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], msg=name)


def test_dropout_is_for_training_only():
    model, tokens = model_of(dropout=0.2), tokens_of(1)
    with torch.no_grad():
        assert not torch.equal(model(tokens), model(tokens))
        model.eval()
        assert torch.equal(model(tokens), model(tokens))


def test_bf16_autocast_is_close_and_trains_fp32_weights():
    model, tokens, targets = lively(), tokens_of(4), tokens_of(4, seed=2)
    exact = gradients(model, model(tokens, targets))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(model(tokens, targets).item(), rel=0.02)
    rough = gradients(model, loss)
    for name, gradient in exact.items():
        assert rough[name].dtype == torch.float32
        assert torch.cosine_similarity(gradient.flatten(), rough[name].flatten(), dim=0) > 0.98, name


@pytest.mark.parametrize(
    ("precision", "backend"), [("bf16", "aot_eager"), pytest.param("fp32", "inductor", marks=pytest.mark.slow)]
)
def test_a_compiled_model_gives_the_same(precision, backend, monkeypatch):
    """As one graph, also with the loss in chunks."""
    monkeypatch.setattr(cross_entropy, "__defaults__", (VOCABULARY * 24,))
    model, tokens, targets = model_of(layers=1), tokens_of(2), tokens_of(2, seed=2)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        losses = model(tokens, targets), compiled(tokens, targets)
    close = {"rtol": 1e-4, "atol": 1e-5} if precision == "fp32" else {"rtol": 0.1, "atol": 5e-3}
    torch.testing.assert_close(*losses, rtol=1e-4 if precision == "fp32" else 1e-2, atol=0)
    found = [gradients(model, loss) for loss in losses]
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], **close, msg=name)
    torch._dynamo.reset()


# --- the loss in chunks ---


class _Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("chunk", [1, 100 * 7, 100 * 40, 100 * 49])
def test_the_loss_in_chunks_is_the_loss(chunk):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator, requires_grad=True) for n in (50, 100))
    targets = torch.randint(0, 100, (50,), generator=generator)
    whole, parts = (cross_entropy(hidden, weight, targets, n) for n in (10**9, chunk))
    torch.testing.assert_close(whole, parts)
    # times three: the gradient of what comes after the loss counts
    expected, found = (torch.autograd.grad(3 * loss, (hidden, weight)) for loss in (whole, parts))
    torch.testing.assert_close(expected, found)
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy(hidden, weight, targets, chunk), whole.detach())


@pytest.mark.parametrize("training", [True, False])
def test_the_loss_in_chunks_never_holds_all_logits(training):
    hidden, weight = torch.randn(256, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    targets = torch.randint(0, 1000, (256,))
    sizes = []
    for chunk in (10**9, 32_000):
        with _Largest() as largest, torch.set_grad_enabled(training):
            loss = cross_entropy(hidden, weight, targets, chunk)
            if training:
                loss.backward()
        sizes.append(largest.elements)
    assert sizes == [256_000, 32_000]


def test_the_loss_in_chunks_under_autocast_is_close():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator, requires_grad=True) for n in (50, 100))
    targets = torch.randint(0, 100, (50,), generator=generator)
    exact = torch.autograd.grad(cross_entropy(hidden, weight, targets), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(hidden, weight, targets, 100 * 7)
    for gradient, expected in zip(torch.autograd.grad(loss, (hidden, weight)), exact, strict=True):
        assert gradient.dtype == torch.float32
        assert torch.cosine_similarity(gradient.flatten(), expected.flatten(), dim=0) > 0.999


# --- generation ---


def uncached(model: GPT, prompt: list[int], tokens: int) -> list[int]:
    """Greedy, reading the whole context for each token; when it is full, its later half is kept."""
    ids, start = list(prompt), max(0, len(prompt) - model.context)
    for _ in range(tokens):
        if len(ids) - start > model.context:
            start = len(ids) - model.context // 2
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids[start:]]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("length", [1, 5, CONTEXT - 1, CONTEXT, 3 * CONTEXT + 1])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_the_cache_changes_no_greedy_token(length, qk_norm):
    model = lively(qk_norm=qk_norm, seed=2)
    prompt = tokens_of(1, length)[0].tolist()
    found = generate(model, prompt, tokens=3 * CONTEXT, temperature=0)
    assert found == uncached(model, prompt, 3 * CONTEXT)
    assert len(set(found)) > 5  # a model that repeats itself would prove little


def test_generation_works_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert len(generate(lively(), [1], tokens=40)) == 40


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(model_of(), [], tokens=1)


def test_a_cache_in_use_takes_one_token_at_a_time():
    model, cache = model_of(), model_of().new_cache()
    model.next_logits(tokens_of(1, 4), cache)
    with pytest.raises(ValueError, match="one more at a time"):
        model.next_logits(tokens_of(1, 2), cache)


def test_choosing_follows_the_probabilities():
    logits = torch.tensor([0.5, 0.1, 0.25, 0.15]).log()
    generator = torch.Generator().manual_seed(0)

    def shares(temperature: float = 1.0, **limits) -> Tensor:
        drawn = [choose(logits, temperature, **limits, generator=generator) for _ in range(3000)]
        return torch.bincount(torch.tensor(drawn), minlength=4) / 3000

    def near(*expected: float) -> dict:
        return {"actual": torch.tensor(expected), "rtol": 0, "atol": 0.04}

    torch.testing.assert_close(expected=shares(), **near(0.5, 0.1, 0.25, 0.15))
    torch.testing.assert_close(expected=shares(0.5), **near(0.725, 0.029, 0.181, 0.065))
    torch.testing.assert_close(expected=shares(top_k=2), **near(2 / 3, 0, 1 / 3, 0))
    torch.testing.assert_close(expected=shares(top_p=0.7), **near(2 / 3, 0, 1 / 3, 0))  # 0.5 is not yet 0.7
    torch.testing.assert_close(expected=shares(top_k=3, top_p=0.6), **near(2 / 3, 0, 1 / 3, 0))
    assert {choose(logits, 0) for _ in range(5)} == {choose(logits, 1, top_k=1), choose(logits, 1, top_p=0.01)} == {0}


# --- the task ---


def test_batches_are_shifted_and_depend_on_the_global_row(tmp_path):
    assert TASK is GPTTask
    task = task_of(tmp_path)
    whole = task.batch(0, 6)
    assert set(whole) == {"tokens", "targets"}
    assert {(value.shape, value.dtype) for value in whole.values()} == {((6, CONTEXT), torch.int64)}
    assert torch.equal(whole["tokens"][:, 1:], whole["targets"][:, :-1])
    assert torch.equal(task.batch(2, 3)["tokens"], whole["tokens"][2:5])


def test_the_loss_of_a_task_is_one_named_mean(tmp_path):
    task = task_of(tmp_path)
    model = task.build()
    losses = [task.loss(model, task.batch(first, rows)) for first, rows in ((0, 4), (0, 1), (1, 3))]
    assert [set(terms) for terms in losses] == [{"loss"}] * 3
    whole, one, three = (terms["loss"] for terms in losses)
    torch.testing.assert_close(whole, (one + 3 * three) / 4)


def test_building_follows_the_seed(tmp_path):
    first, again, other = (task_of(tmp_path, seed=seed).build() for seed in (1, 1, 2))
    assert torch.equal(first.embedding.weight, again.embedding.weight)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    assert first.context == CONTEXT
    with torch.device("meta"):
        assert task_of(tmp_path).build().embedding.weight.is_meta


def test_the_evaluation_is_always_the_same(tmp_path, monkeypatch):
    task, other = task_of(tmp_path), task_of(tmp_path, seed=9)
    model = task.build()
    first = task.evaluate(model, CPU)
    monkeypatch.setattr("rigsweep.trainables.gpt.EVALUATION_TOKENS", 3 * CONTEXT)  # other micro-batches
    for again in (task.evaluate(model, CPU), other.evaluate(model, CPU)):
        assert again == pytest.approx(first, rel=1e-6)
    assert set(first) == set(GPTTraining.METRICS)
    assert first["validation/loss"] == pytest.approx(math.log(task.text.vocabulary.size), abs=0.1)
    # ASCII characters: a byte each, but for the end of the document
    assert first["validation/bits_per_byte"] == pytest.approx(first["validation/loss"] / math.log(2), rel=0.01)
    assert model.training
    task.evaluate(model.eval(), CPU)
    assert not model.training


def test_the_evaluation_is_without_dropout_and_gradients(tmp_path):
    task = task_of(tmp_path, model=small(dropout=0.5))
    model = task.build()
    assert task.evaluate(model, CPU) == task.evaluate(model, CPU)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("prompt", ["", "7 bottles"])
def test_samples_begin_with_the_prompt_and_repeat(tmp_path, prompt):
    task = task_of(tmp_path, sampling={"tokens": 50, "prompt": prompt})
    model = task.build()
    torch.manual_seed(1)
    first = task.sample(model, CPU).texts
    torch.manual_seed(2)
    assert first == task.sample(model, CPU).texts
    assert model.training
    assert set(first) == {"sample"}
    assert first["sample"].startswith(prompt)
    assert len(first["sample"]) >= len(prompt) + 50


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_has_its_role(tmp_path, tied):
    task = task_of(tmp_path, model=small(tied=tied))
    roles = {name: task.role(name, parameter) for name, parameter in task.build().named_parameters()}
    assert roles.pop("embedding.weight") == "embedding"
    assert tied or roles.pop("head.weight") == "head"
    assert set(roles.values()) == {"matrix"}


def kept_bytes(task: GPTTask, rows: int, precision: str) -> int:
    """Bytes of all tensors that the loss of a micro-batch keeps for its backward pass."""
    model, kept = task.build(), {}
    own = {tensor.untyped_storage()._cdata for tensor in itertools.chain(model.parameters(), model.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # held, so that no two have the same address
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        task.loss(model, task.batch(0, rows))
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("changes", [{}, {"activation": "gelu", "qk_norm": False}, {"dropout": 0.1}])
def test_the_activation_estimate_bounds_what_is_kept(tmp_path, precision, changes):
    settings = {"model": small(layers=6, width=64, head_width=32, **changes)}
    task, frugal = task_of(tmp_path, **settings), task_of(tmp_path, recompute=True, **settings)
    estimate, small_estimate = (each.activation_bytes_per_row(precision) for each in (task, frugal))
    kept, kept_frugally = (
        (kept_bytes(each, 8, precision) - kept_bytes(each, 4, precision)) / 4 for each in (task, frugal)
    )
    assert kept < estimate < 1.5 * kept  # a layer's gradients and those of the logits come on top
    assert kept_frugally + kept / 6 < small_estimate < estimate / 2  # one layer is whole while it goes back


def test_the_feedforward_width_suits_tensor_cores():
    assert feedforward_width(GPTModel()) == 3072
    assert feedforward_width(GPTModel(width=64, feedforward=8 / 3)) == 168
