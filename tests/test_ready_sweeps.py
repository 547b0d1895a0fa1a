"""Every ready sweep is a sweep that a newcomer can plan: it checks, resolves, reads back and comes to numbers."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rigsweep.sweeps import files, planning
from rigsweep.sweeps.sweep import READY, changed, check, load

NAMES = sorted(file.stem for file in READY.glob("*.yaml"))


def plan(name: str, cache: Path, *overrides: str) -> dict[str, Any]:
    return planning.plan_sweep(load(name, overrides), cache, lambda *_: None, Path("runs"), cards=1, threads=1)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text, for sweeps whose own corpus is fetched or given."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"第{n}回 {n * n} ships, {n} bottles and a sea of {n % 7}.\n" for n in range(20_000)))
    return file


def test_they_are_the_ones_that_the_guide_names() -> None:
    texts = {"quickstart", "gpt2-lr-width", "gpt2-switches", "chinese-prose"}
    images = {"digits-lr-width", "guidance-digits", "cifar10-lr-width", "guidance-cifar10", "steps-samplers-digits"}
    assert texts | images | {"points-objectives", "steps-samplers", "eight-gaussians"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_checks_resolves_and_reads_back(name: str) -> None:
    sweep = load(name)
    assert sweep.settings.question.endswith("?")
    assert sweep.settings.search or name == "eight-gaussians", "a training"
    again = check(files.parse(sweep.resolved(), f"{name}.yaml"), name)
    assert changed(sweep, again) == {}
    for corner in sweep.space.corners():
        assert again.training(corner) == sweep.training(corner)


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_asks_costs_and_expects(name: str) -> None:
    words = (READY / f"{name}.yaml").read_text(encoding="utf-8")
    comment = " ".join(line.lstrip("# ") for line in words.splitlines() if line.startswith("#"))
    assert re.search(r"minute|hour|day", comment), "what it costs"
    assert name == "quickstart" or re.search(r"\bExpect\b", comment), "what comes out"
    assert all(len(line) <= 120 for line in words.splitlines())
    # Every override that the comment tells is one.
    for override in re.findall(r"--set \"?((?:base|search|trials)[\w.]*=[^\s\"`]+)", comment):
        load(name, (override.rstrip(".,;"),))


def test_gpt2_lr_width_is_gpt_2(cache: Path, text: Path) -> None:
    corpus = f"base.data.corpus={text}"
    planned = plan("gpt2-lr-width", cache, corpus, "base.data.vocabulary=300")
    base, sweep = planned["base"], load("gpt2-lr-width")
    assert (base["steps"], base["micro_rows"], base["accumulation"]) == (20_000, 8, 16)
    training: Any = sweep.training({})
    assert training.schedule.warmup * base["steps"] == 400
    assert (training.model.layers, training.model.width) == (12, 768)
    assert (training.data.sequence_length, training.data.vocabulary) == (1024, 32_000)
    assert [shape["parameters"]["model.width"] for shape in planned["shapes"]] == [512, 768, 1024]
    # The costs in its comment, by 6 FLOPs a parameter and token at 40% of the card's peak.
    comment = (READY / "gpt2-lr-width.yaml").read_text(encoding="utf-8")
    for width in (512, 768, 1024):
        parameters = 12 * 12 * width**2 + 32_000 * width
        flops = 6 * parameters * training.budget.examples
        hours = [flops / (0.4 * peak) / 3600 for peak in (71e12, 88e12)]
        row = re.search(rf"#\s+{width} +(\d+) M +(\d+) +([\d.]+)e18 +(\d+) h +(\d+) h", comment)
        assert row, width
        told = [float(word) for word in row.groups()]
        assert told == pytest.approx(
            [parameters / 1e6, training.budget.examples / parameters, flops / 1e18, *hours], rel=0.06
        )


def test_gpt2_switches_is_small_here_and_gpt_2_on_a_gpu(cache: Path, text: Path) -> None:
    small = ["base.data.vocabulary=300", f"base.data.corpus={text}"]
    base = plan("gpt2-switches", cache, *small)["base"]
    assert (base["rows_per_step"], base["accumulation"], base["precision"]) == (8, 1, "fp32")
    large: Any = load("gpt2-switches", ("base.model.layers=12", "base.data.sequence_length=1024")).training({})
    assert (large.model.width, large.batch.examples, large.batch.micro) == (768, 8192, 8)
    sweep = load("gpt2-switches")
    for dimension in sweep.space.dimensions:
        # The base has everything off, and one other value each.
        assert len(dimension.choices) == 2 and dimension.choices[0] == sweep.space.values[dimension.key]


def test_chinese_prose_without_its_text_says_in_one_line_how_to_give_it(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "rigsweep.sweeps.cli", "plan", "chinese-prose", "--cards", "1"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert answer.returncode == 2
    assert len(answer.stderr.splitlines()) == 1
    assert "no file to read" in answer.stderr and "--set base.data.corpus=PATH" in answer.stderr


def test_the_hub_out_of_reach_is_one_line_too(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "rigsweep.sweeps.cli", "plan", "gpt2-lr-width", "--cards", "1"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=offline)
    assert answer.returncode == 2
    assert len(answer.stderr.splitlines()) == 1
    assert "offline mode is on" in answer.stderr and "--set base.data.corpus=PATH" in answer.stderr


@pytest.mark.parametrize("corpus", ["zh-novels", "zh-luxun"])
def test_chinese_prose_plans_on_chinese_prose(corpus: str, shared: Path, tmp_path: Path) -> None:
    folder = shared / "data" / "text" / corpus
    if not folder.is_dir():
        pytest.skip(f"no {corpus}")
    # One text and one vocabulary: to train three on all of the novels takes a minute.
    text = min(folder.glob("*.txt"), key=lambda file: file.stat().st_size)
    fewer = ("search.data.vocabulary=", "early_stopping.within=model.width")
    planned = plan("chinese-prose", tmp_path, f"base.data.corpus={text}", *fewer)
    assert planned["base"]["steps"] == 245
    assert [shape["parameters"] for shape in planned["shapes"]] == [{"model.width": w} for w in (128, 256, 384)]
