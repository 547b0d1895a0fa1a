"""What a trial spends its time on, by a clock of the tests' own."""

import os
from pathlib import Path

import pytest

from rigsweep.trainables.meter import Meter
from rigsweep.trainables.phases import Phases

from .test_loop import Line, linear


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_goes_to_the_phase_that_is_entered() -> None:
    clock = Clock()
    phases = Phases(clock)
    clock.now = 3
    phases.enter("computing")
    clock.now = 10
    with phases.within("evaluation"):
        clock.now = 12
        assert phases.read() == {"start_up": 3.0, "computing": 7.0, "evaluation": 2.0}
    clock.now = 13
    assert phases.read() == {"start_up": 3.0, "computing": 8.0, "evaluation": 2.0}


def test_an_evaluation_that_raises_is_over() -> None:
    clock = Clock()
    phases = Phases(clock)
    try:
        with phases.within("evaluation"):
            clock.now = 1
            raise ValueError
    except ValueError:
        clock.now = 3
    assert phases.read() == {"start_up": 2.0, "evaluation": 1.0}


def test_waiting_for_data_is_taken_from_what_it_was_part_of() -> None:
    clock = Clock()
    phases = Phases(clock)
    phases.enter("computing")
    clock.now = 10
    phases.spent("waiting", 4.0)
    assert phases.read() == {"start_up": 0.0, "waiting": 4.0, "computing": 6.0}


def test_the_meter_tells_compiling_computing_evaluating_and_waiting_apart() -> None:
    clock = Clock()
    phases = Phases(clock)
    clock.now = 1
    meter = Meter(1.0, 1.0, None, phases, compiled=True)
    clock.now = 31
    meter.saw(10)
    clock.now = 40
    meter.waited(2.0)
    meter.saw(10)
    paused = meter.pause()
    clock.now = 45
    meter.go_on(paused)
    clock.now = 50
    assert phases.read() == {
        "start_up": 1.0,
        "compiling": 30.0,
        "computing": 12.0,
        "waiting": 2.0,
        "evaluation": 5.0,
    }


def test_without_compilation_the_first_step_computes() -> None:
    clock = Clock()
    phases = Phases(clock)
    meter = Meter(1.0, 1.0, None, phases)
    clock.now = 5
    meter.saw(1)
    assert phases.read() == {"start_up": 0.0, "computing": 5.0}


def test_a_real_training_says_what_it_spent_its_time_on(tmp_path: Path) -> None:
    line = Line()
    linear(tmp_path, line)
    phases = line.phases()
    assert set(phases) == {"start_up", "computing", "waiting", "evaluation"}
    assert all(seconds >= 0 for seconds in phases.values())


def test_trials_of_a_sweep_compile_into_one_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    for number in range(2):
        linear(tmp_path / str(number), job={"cache": str(tmp_path / "cache")}, steps=1)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")
