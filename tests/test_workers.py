"""Several workers train one model as if they were one: real processes, over gloo."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rigsweep.trainables.trial import run_trial
from rigsweep.trainables.workers import Workers

LENGTH = 16
TEXT = "".join(f"{i} sheep jumped over {i % 7} fences and {i % 3} dogs looked on\n" for i in range(400))


class Line:
    """Whoever follows the trial; gives an `order` from some progress on."""

    def __init__(self, rank: int, workers: int, order: str | None, at: int):
        self.rank, self.workers = rank, workers
        self._order, self._at = order, at
        self.progress: dict[str, Any] = {"examples": 0}
        self.sent: list[dict[str, Any]] = []

    @property
    def order(self) -> str | None:
        return self._order if self.progress["examples"] >= self._at else None

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


def job_of(folder: Path, cache: Path, **changes: Any) -> dict[str, Any]:
    training = {
        "data": {
            "corpus": str(cache / "text.txt"),
            "vocabulary": "characters",
            "sequence_length": LENGTH,
            "validation": "last 10%",
        },
        "model": {"layers": 2, "width": 16, "head_width": 8},
        "batch": {"examples": 10 * LENGTH},  # which neither 3 nor 4 workers share evenly
        "budget": {"examples": 12 * 10 * LENGTH},
        "evaluation": {"every": 0.25, "examples": 10 * LENGTH},
        "sampling": {"tokens": 4},
    }
    return {
        "number": 0,
        "trainable": "gpt",
        "training": training | changes,
        "folder": str(folder),
        "cache": str(cache),
        "metric": "validation/loss",
        "goal": "minimize",
        "precision": "fp32",
        "kind": "cpu",
        "threads": 1,
        "memory_bytes": 2**30,
        "measured_flops_per_second": 1e9,
    }


def work(rank: int, workers: int, job: dict[str, Any], order: str | None, at: int) -> None:
    """One worker's process: what a lane's does."""
    torch.set_num_threads(1)
    meeting = Path(job["folder"]).parent / f"meeting-{Path(job['folder']).name}-{order}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=workers)
    line = Line(rank, workers, order, at)
    final = run_trial(job, line)
    (Path(job["folder"]) / f"final-{rank}.json").write_text(json.dumps({"final": final, "sent": line.sent}))
    dist.destroy_process_group()


def train(workers: int, folder: Path, cache: Path, order: str | None = None, at: int = 0, **changes: Any) -> Any:
    """Train with so many workers; answers the last messages, and what the first one sent."""
    folder.mkdir(exist_ok=True)
    job = job_of(folder, cache, **changes)
    told = [{"rank": rank, "workers": workers, "job": job, "order": order, "at": at} for rank in range(workers)]
    processes = [subprocess.Popen([sys.executable, "-P", __file__, json.dumps(each)]) for each in told]
    assert [process.wait(timeout=120) for process in processes] == [0] * workers
    told = [json.loads((folder / f"final-{rank}.json").read_text()) for rank in range(workers)]
    return [each["final"] for each in told], told[0]["sent"]


def losses(folder: Path) -> dict[int, list[float]]:
    """Loss, gradient norm and validation loss by examples."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "optimizer/gradient_norm", "validation/loss")
    return {row["examples"]: [row[name] for name in names if name in row] for row in rows}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "trial"
    finals, _ = train(1, folder, corpus)
    assert finals[0]["state"] == "complete"
    return folder


@pytest.mark.parametrize(
    ("workers", "changes"), [(2, {}), (3, {"recompute": True}), (4, {"batch": {"examples": 160, "micro": 1}})]
)
def test_the_learning_curve_does_not_depend_on_the_number_of_workers(
    tmp_path: Path, corpus: Path, alone: Path, workers: int, changes: dict[str, Any]
) -> None:
    finals, sent = train(workers, tmp_path / "trial", corpus, **changes)
    assert [final["state"] for final in finals] == ["complete"] * workers
    expected, found = losses(alone), losses(tmp_path / "trial")
    assert found.keys() == expected.keys()
    for examples, values in expected.items():
        assert found[examples] == pytest.approx(values, rel=2e-4), examples
    assert [message["examples"] for message in sent] == [480, 960, 1440, 1920], "each evaluation is told once"


def test_an_order_to_the_first_reaches_all_and_more_or_fewer_workers_go_on(
    tmp_path: Path, corpus: Path, alone: Path
) -> None:
    folder = tmp_path / "trial"
    finals, _ = train(2, folder, corpus, order="interrupt", at=1100)
    assert [final["state"] for final in finals] == ["interrupted"] * 2
    finals, _ = train(1, folder, corpus)  # one card is gone
    assert finals[0]["state"] == "complete"
    for examples, values in losses(alone).items():
        assert losses(folder)[examples] == pytest.approx(values, rel=2e-4), examples


def test_more_workers_than_rows_are_refused_in_words(tmp_path: Path, corpus: Path) -> None:
    finals, _ = train(2, tmp_path / "trial", corpus, batch={"examples": LENGTH})
    assert [final["state"] for final in finals] == ["failed", "failed"]
    assert "1 rows in a step cannot be shared by 2 workers" in finals[0]["reason"]


def test_only_the_first_worker_writes_what_a_trial_leaves(tmp_path: Path, corpus: Path) -> None:
    train(2, tmp_path / "trial", corpus)
    rows = (tmp_path / "trial" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == len({json.loads(row)["examples"] for row in rows}) == 12
    assert (tmp_path / "trial" / "log-1.txt").exists()


def test_shares_are_contiguous_and_differ_by_one_at_most() -> None:
    for size in (1, 2, 3, 7):
        shares = [Workers(rank, size).share(23) for rank in range(size)]
        assert [row for share in shares for row in share] == list(range(23))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


if __name__ == "__main__":
    work(**json.loads(sys.argv[1]))
