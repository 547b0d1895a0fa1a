"""The door: what it keeps in a trial's folder and what it delivers."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rigsweep.trainables.door import Door, Progress


class Line:
    rank, workers = 0, 1

    def __init__(self, order=None):
        self.order, self.progress, self.sent = order, {}, []

    def send(self, message):
        self.sent.append(message)


AT = Progress(examples=80, total=800, flops=1e6, seconds=2.5)


def rows_of(folder):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_report_is_a_row_with_its_progress_and_time(tmp_path):
    door = Door(tmp_path, Line())
    door.report(AT, {"loss": 1.5})
    door.report(Progress(160, 800, 2e6, 5.0), {"loss": 1.25, "validation/loss": 1.3})
    rows = rows_of(tmp_path)  # at once, before the door is closed
    assert [{k: v for k, v in row.items() if k != "time"} for row in rows] == [
        {"examples": 80, "total": 800, "flops": 1e6, "seconds": 2.5, "loss": 1.5},
        {"examples": 160, "total": 800, "flops": 2e6, "seconds": 5.0, "loss": 1.25, "validation/loss": 1.3},
    ]
    assert rows[0]["time"] <= rows[1]["time"]
    door.close()


def test_an_evaluation_is_delivered_and_step_metrics_are_not(tmp_path):
    line = Line()
    door = Door(tmp_path, line)
    door.report(AT, {"loss": 1.5})
    assert line.sent == []
    door.report(AT, {"loss": 1.5, "validation/loss": 1.3}, checkpoint=tmp_path / "checkpoints" / "000000000080")
    assert line.sent == [
        {
            "event": "report",
            "examples": 80,
            "total": 800,
            "flops": 1e6,
            "seconds": 2.5,
            "metrics": {"loss": 1.5, "validation/loss": 1.3},
            "checkpoint": "000000000080",
        }
    ]
    door.close()


def test_an_evaluation_is_in_the_file_before_it_is_delivered(tmp_path):
    class Looking(Line):
        def send(self, message):
            self.sent.append([row["examples"] for row in rows_of(tmp_path)])

    line = Looking()
    door = Door(tmp_path, line)
    door.keep(AT, {"sample": "x"})
    door.report(AT, {"validation/loss": 1.3})
    door.close()
    assert line.sent == [[80]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null_in_the_file_and_not_delivered(tmp_path, value):
    line = Line()
    door = Door(tmp_path, line)
    door.report(AT, {"validation/loss": 1.0, "optimizer/gradient_norm": value})
    door.close()
    (row,) = rows_of(tmp_path)
    assert row["optimizer/gradient_norm"] is None
    assert line.sent[0]["metrics"] == {"validation/loss": 1.0}


def test_a_line_torn_by_a_kill_does_not_damage_the_next(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"examples": 8, "loss": 1}\n{"examples": 16, "lo')
    door = Door(tmp_path, Line())
    door.report(AT, {"loss": 1.5})
    door.close()
    lines = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")
    assert json.loads(lines[0])["examples"] == 8
    assert lines[1] == b'{"examples": 16, "lo'
    assert json.loads(lines[2])["examples"] == 80
    assert lines[3:] == [b""]


def test_whole_lines_are_left_as_they_are(tmp_path):
    for examples in (80, 160):
        door = Door(tmp_path, Line())
        door.report(Progress(examples), {"loss": 1.5})
        door.close()
    assert [row["examples"] for row in rows_of(tmp_path)] == [80, 160]


def test_samples_are_files_named_by_progress(tmp_path):
    door = Door(tmp_path, Line())
    door.keep(AT, {"sample": "größer\n", "other": ""})
    door.close()
    found = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "samples").iterdir()}
    assert found == {"000000000080-sample.txt": "größer\n", "000000000080-other.txt": ""}


def test_a_sample_is_never_half_written(tmp_path, monkeypatch):
    door = Door(tmp_path, Line())
    picture = np.zeros((8, 8, 3), np.uint8)
    door.keep(AT, {"sample": "whole"}, {"grid": picture})
    before = {path.name: path.read_bytes() for path in (tmp_path / "samples").iterdir()}

    class Full(io.FileIO):
        """A file on a disk that has room for two bytes."""

        def write(self, data):
            super().write(bytes(data)[:2])
            raise OSError("no space is left")

    monkeypatch.setattr(Path, "open", lambda path, mode: Full(path, mode.replace("b", "")))
    for kept in ({"texts": {"sample": "another"}}, {"images": {"grid": picture + 255}}):
        with pytest.raises(OSError, match="no space"):
            door.keep(AT, **kept)
    monkeypatch.undo()
    door.close()
    # What is being written has a dot in front, which readers leave out.
    samples = (tmp_path / "samples").iterdir()
    assert {p.name: p.read_bytes() for p in samples if not p.name.startswith(".")} == before
    assert set(before) == {"000000000080-sample.txt", "000000000080-grid.png"}


def test_pictures_are_kept_as_png_by_the_weights_that_drew_them(tmp_path):
    door = Door(tmp_path, Line())
    picture = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)
    door.keep(AT, images={"grid": picture})
    door.keep(AT, images={"grid": 255 - picture}, of="ema-0.9")
    door.close()
    for name, drawn in (("grid", picture), ("grid-ema-0.9", 255 - picture)):
        with Image.open(tmp_path / "samples" / f"000000000080-{name}.png") as image:
            assert np.array_equal(np.asarray(image), drawn)


@pytest.mark.parametrize("order", [None, "stop", "interrupt"])
def test_asking_for_an_order_says_how_far_the_trial_is(tmp_path, order):
    line = Line(order)
    door = Door(tmp_path, line)
    assert door.order(AT, examples_per_second=5.0) == order
    assert line.progress == {"examples": 80, "total": 800, "examples_per_second": 5.0}
    door.close()


def test_a_warning_is_delivered_and_logged_once(tmp_path, caplog):
    line = Line()
    door = Door(tmp_path, line)
    for examples in (80, 160):
        door.warn("low-mfu", f"the MFU is 12% after {examples}", Progress(examples, 800))
    door.warn("recompiling", "again and again", AT)
    door.close()
    assert line.sent == [
        {"event": "warning", "rule": "low-mfu", "reason": "the MFU is 12% after 80", "examples": 80},
        {"event": "warning", "rule": "recompiling", "reason": "again and again", "examples": 80},
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "low-mfu: the MFU is 12% after 80",
        "recompiling: again and again",
    ]
    assert rows_of(tmp_path) == []
