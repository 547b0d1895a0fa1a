"""Checkpoints: whole or not there, whatever happens while they are written."""

import json
import logging
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from rigsweep.trainables import checkpoints
from rigsweep.trainables.checkpoints import CheckpointError, Saved, latest, restore, save
from rigsweep.trainables.door import Progress
from rigsweep.trainables.errors import NewerVersion

FILES = ("model.safetensors", "ema-0.9.safetensors", "optimizer.safetensors", "progress.json", "manifest.json")


def parts(value=0.0, width=3):
    """A model filled with a value, its averages, and an optimizer that has taken a step."""
    model, ema = nn.Linear(width, 2), nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
        for parameter in ema.parameters():
            parameter.fill_(-value)
    return model, {"ema-0.9": ema}, optimizer


def saved_at(examples, losses=()):
    """Progress, and an evaluation for each loss: of 10, 20, ... examples."""
    evaluations = [(Progress(10 * n), {"validation/loss": loss}) for n, loss in enumerate(losses, 1)]
    return Saved(Progress(examples, 1000, 1e6, 2.5), evaluations, weights="ema-0.9.safetensors")


def write(folder, examples, value=None, losses=(), width=3):
    return save(folder, saved_at(examples, losses), *parts(examples if value is None else value, width))


def value_of(path) -> float:
    model, averages, optimizer = parts(-1)
    restore(path, model, averages, optimizer)
    assert torch.equal(averages["ema-0.9"].weight, -model.weight)
    (value,) = set(model.weight.flatten().tolist()) | set(model.bias.tolist())
    return value


def names(folder):
    return [path.name for path in folder.iterdir()]


# --- what is written is what is read ---


def test_what_is_saved_is_restored(tmp_path):
    model, averages, optimizer = parts(7.0)
    saved = saved_at(20, (2.0, 1.5))
    path = save(tmp_path, saved, model, averages, optimizer)
    assert path == tmp_path / "000000000020"
    assert sorted(names(path)) == sorted(FILES)
    again, averages_again, optimizer_again = parts()
    optimizer_again.state.clear()
    assert restore(path, again, averages_again, optimizer_again) == saved
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(averages_again["ema-0.9"].weight, averages["ema-0.9"].weight)
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, optimizer_again.state[theirs][key])


def test_a_checkpoint_holds_no_hyper_parameters(tmp_path):
    path = write(tmp_path, 20)
    assert set(json.loads((path / "progress.json").read_text())) == {"progress", "evaluations", "health", "weights"}
    model, averages, _ = parts()
    other = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.25)
    restore(path, model, averages, other)
    assert (other.param_groups[0]["lr"], other.param_groups[0]["weight_decay"]) == (0.5, 0.25)


def test_a_checkpoint_from_before_the_first_step_is_restored(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    saved = Saved(Progress(total=80), [])
    path = save(tmp_path, saved, model, {}, optimizer)
    assert latest(tmp_path) == path
    assert restore(path, model, {}, optimizer) == saved


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    path = save(tmp_path, saved_at(1), model, {}, torch.optim.AdamW(model.parameters()))
    kept = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    checkpoints.load_weights(path / "model.safetensors", model)
    assert model[1].weight is model[0].weight
    assert torch.equal(model[1].weight, kept)


def test_without_an_average_the_weights_stand_in_for_it(tmp_path):
    model, averages, optimizer = parts(5.0)
    path = save(tmp_path, Saved(Progress(20), []), model, {}, optimizer)
    restore(path, model, averages, optimizer)
    assert torch.equal(averages["ema-0.9"].weight, model.weight)
    assert checkpoints.weights_of(path).name == "model.safetensors"
    assert checkpoints.weights_of(write(tmp_path, 30)).name == "ema-0.9.safetensors"


def test_no_pickle_is_ever_read_or_written(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a pickle")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "dump"), (pickle, "dumps")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    write(tmp_path, 20)
    found = latest(tmp_path)
    assert found is not None
    assert value_of(found) == 20


# --- a kill or an error at any point ---


def fail_at(monkeypatch, target, name, call):
    """Let the given call (0 is the first) of a function fail, as a full or broken disk does."""
    real, calls = getattr(target, name), iter(range(1000))

    def failing(*arguments, **keywords):
        if next(calls) == call:
            raise OSError(28, "No space left on device")
        return real(*arguments, **keywords)

    monkeypatch.setattr(target, name, failing)


POINTS = [
    *[(checkpoints, "save_model", call) for call in range(2)],
    (checkpoints, "save_file", 0),
    *[(Path, "write_text", call) for call in range(2)],
    *[(os, "fsync", call) for call in range(6)],
    (Path, "mkdir", 0),
    (Path, "rename", 0),
]


@pytest.mark.parametrize(("target", "name", "call"), POINTS, ids=[f"{name}-{call}" for _, name, call in POINTS])
def test_an_error_at_any_point_of_writing_leaves_the_one_before_and_says_so(tmp_path, monkeypatch, target, name, call):
    write(tmp_path, 10)
    fail_at(monkeypatch, target, name, call)
    with pytest.raises(
        CheckpointError, match=r"000000000020 could not be written: .*No space left on device"
    ) as raised:
        write(tmp_path, 20)
    monkeypatch.undo()
    assert "\n" not in str(raised.value)
    assert names(tmp_path) == ["000000000010"]
    found = latest(tmp_path)
    assert found is not None
    assert value_of(found) == 10
    assert value_of(write(tmp_path, 20)) == 20


@pytest.mark.parametrize(("target", "name", "call"), POINTS, ids=[f"{name}-{call}" for _, name, call in POINTS])
def test_writing_the_same_checkpoint_again_never_endangers_it(tmp_path, monkeypatch, target, name, call):
    path = write(tmp_path, 10)
    fail_at(monkeypatch, target, name, call)
    assert write(tmp_path, 10) == path
    monkeypatch.undo()
    assert value_of(path) == 10


def test_a_damaged_checkpoint_is_written_anew(tmp_path):
    path = write(tmp_path, 10)
    (path / "model.safetensors").write_bytes(b"")
    assert write(tmp_path, 10, value=3.0) == path
    assert latest(tmp_path) == path
    assert value_of(path) == 3


KILLED_AGAIN_AND_AGAIN = """
    import os, random, signal, sys, time
    from pathlib import Path
    import torch
    from torch import nn
    from rigsweep.trainables.checkpoints import Saved, best, keep_only, latest, restore, save
    from rigsweep.trainables.door import Progress

    torch.set_num_threads(1)
    folder, model = Path(sys.argv[1]), nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    draw = random.Random(0)

    def restored():
        path = latest(folder)
        assert path is not None
        saved = restore(path, model, {}, optimizer)
        assert set(model.weight.flatten().tolist()) == {float(saved.progress.examples)}, path
        return saved.progress.examples

    def write(examples):
        nn.init.constant_(model.weight, examples)
        path = save(folder, Saved(Progress(examples), []), model, {}, optimizer)
        keep_only(folder, path, best(folder, "validation/loss", 1))

    write(1)
    for _ in range(25):
        before = restored()
        read, told = os.pipe()
        child = os.fork()
        if child == 0:
            while True:
                before += 1
                write(before)
                os.write(told, b"x")
        os.read(read, 1)  # once one is written, in the middle of any of the next
        time.sleep(draw.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.set_blocking(read, False)
        os.close(told)
        written = 1 + len(os.read(read, 100000) or b"")
        os.close(read)
        assert restored() >= before + written
    print("whole")
"""


def test_a_checkpoint_is_left_wherever_the_process_is_killed(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED_AGAIN_AND_AGAIN), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "whole\n", done.stderr
    assert [name for name in names(tmp_path) if not name.startswith(".new-")] != []


def test_a_full_disk_leaves_the_checkpoint_before_and_a_clear_error(mount_disk):
    small_disk = mount_disk("2m")
    write(small_disk, 10)
    with pytest.raises(CheckpointError, match=r"could not be written: .*[Nn]o space left") as raised:
        write(small_disk, 20, width=100_000)
    assert "\n" not in str(raised.value)
    assert names(small_disk) == ["000000000010"]
    found = latest(small_disk)
    assert found is not None
    assert value_of(found) == 10


# --- damage ---


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink, lambda file: file.write_bytes(b"")])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, caplog, damage, name):
    before, path = write(tmp_path, 10), write(tmp_path, 20)
    damage(path / name)
    with caplog.at_level(logging.WARNING):
        found = latest(tmp_path)
    assert found == before
    assert f"checkpoint {path}" in caplog.text
    if name != "manifest.json":
        assert f"damaged: {name} is not what its manifest says" in caplog.text


@pytest.mark.parametrize(
    "text", ["[]", "3", "{}", '{"version": "x", "files": {}}', '{"version": 1, "files": []}', "\x00"]
)
def test_a_manifest_that_says_nothing_is_damage(tmp_path, text):
    before, path = write(tmp_path, 10), write(tmp_path, 20)
    (path / "manifest.json").write_text(text)
    assert latest(tmp_path) == before
    with pytest.raises(CheckpointError, match="no readable manifest"):
        checkpoints.check(path)


def test_a_manifest_that_leaves_files_out_is_damage(tmp_path):
    before, path = write(tmp_path, 10), write(tmp_path, 20)
    (path / "manifest.json").write_text('{"version": 1, "files": {}}')
    assert latest(tmp_path) == before


def test_a_checkpoint_of_a_newer_version_is_named_and_never_begun_before(tmp_path):
    write(tmp_path, 10)
    path = write(tmp_path, 20)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))
    with pytest.raises(NewerVersion, match=f"checkpoint {path} was written by a newer version of rigsweep"):
        latest(tmp_path)


def test_without_a_whole_checkpoint_there_is_none(tmp_path):
    assert latest(tmp_path / "nothing") is None
    (write(tmp_path, 10) / "manifest.json").unlink()
    assert latest(tmp_path) is None


def test_what_is_half_written_is_never_taken(tmp_path):
    path = write(tmp_path, 10)
    path.rename(tmp_path / ".new-000000000020")
    assert latest(tmp_path) is None
    assert checkpoints.all_in(tmp_path) == []


# --- weights that do not fit ---


def test_weights_of_another_shape_give_one_clear_line(tmp_path):
    path = write(tmp_path, 10)
    with pytest.raises(CheckpointError, match=r"model\.safetensors do not fit this model: .*size mismatch") as raised:
        checkpoints.load_weights(path / "model.safetensors", nn.Linear(4, 2))
    assert "\n" not in str(raised.value)


def test_weights_of_another_model_give_one_clear_line(tmp_path):
    path = write(tmp_path, 10)
    with pytest.raises(CheckpointError, match=r"do not fit this model: .*Missing key") as raised:
        checkpoints.load_weights(path / "model.safetensors", nn.Sequential(nn.Linear(3, 2)))
    assert "\n" not in str(raised.value)


# --- which are kept ---


@pytest.mark.parametrize(("sign", "chosen"), [(1, 20), (-1, 30)])
def test_the_best_and_the_latest_are_kept(tmp_path, sign, chosen):
    losses = (2.0, 1.0, 3.0, 1.5)
    for number in range(1, 5):
        latest_ = write(tmp_path, 10 * number, losses=losses[:number])
    best = checkpoints.best(tmp_path, "validation/loss", sign)
    assert best == tmp_path / f"{chosen:012d}"
    checkpoints.keep_only(tmp_path, latest_, best)
    assert checkpoints.all_in(tmp_path) == sorted({best, latest_})


def test_a_checkpoint_without_an_evaluation_of_its_own_is_never_the_best(tmp_path):
    write(tmp_path, 10, losses=(2.0,))
    write(tmp_path, 15, losses=(2.0,))
    assert checkpoints.best(tmp_path, "validation/loss", 1) == tmp_path / "000000000010"
    assert checkpoints.best(tmp_path, "validation/accuracy", 1) is None


def test_a_damaged_checkpoint_is_neither_the_best_nor_in_the_way(tmp_path):
    write(tmp_path, 10, losses=(2.0,))
    (write(tmp_path, 20, losses=(2.0, 1.0)) / "progress.json").write_text("{")
    write(tmp_path, 30, losses=(2.0, 1.0, 3.0))
    (write(tmp_path, 40) / "progress.json").unlink()
    assert checkpoints.best(tmp_path, "validation/loss", 1) == tmp_path / "000000000010"


def test_what_a_kill_left_half_written_is_cleared_away(tmp_path):
    (tmp_path / ".new-000000000007").mkdir()
    path = write(tmp_path, 10)
    checkpoints.keep_only(tmp_path, path, None)
    assert names(tmp_path) == [path.name]
