"""`rigsweep plan` on memory: what fits, on which rung, and what would help where it does not."""

import io
import json
from pathlib import Path

from rich.console import Console

from rigsweep.cluster.node_settings import Node
from rigsweep.sweeps.planning import plan_sweep, plan_table
from rigsweep.sweeps.sweep import load

TEXT = "".join(f"{n} bottles, {n * n} ships and a sea of {n % 7}.\n" for n in range(200))
SWEEP = """
trainable: gpt
base:
  data: {corpus: CORPUS, vocabulary: characters, sequence_length: 64, validation: last 10%}
  model: {layers: 4, width: 32, head_width: 32}
  batch: {examples: 4096}
  budget: {examples: 40k}
  evaluation: {every: 50%, examples: 128}
search: {model.width: {choices: [32, 512]}}
"""


def test_a_plan_says_of_every_corner_what_it_takes_and_whether_it_fits(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    file = tmp_path / "mine.yaml"
    file.write_text(SWEEP.replace("CORPUS", str(tmp_path / "text.txt")))
    node = Node(memory=100 * 2**20)
    plan = plan_sweep(load(str(file)), tmp_path, lambda *_: None, tmp_path / "runs", cards=1, threads=1, node=node)
    narrow, wide = (shape["memory"] for shape in plan["shapes"])
    assert narrow["fits"]
    assert narrow["what_would_help"] is None
    assert narrow["calibrated_bytes"] <= narrow["card_bytes"] == 100 * 2**20
    assert not wide["fits"]
    assert "shorter sequence" in wide["what_would_help"]
    assert (wide["rung"], wide["climbed"]) == ({"micro_rows": 1, "recompute": True}, True)
    assert wide["estimate_bytes"] > 16 * 4 * 12 * 512**2
    assert wide["classical_bytes"] > 2**30, "with its reserve of 1.2 GiB"
    json.dumps(plan)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan_table(plan))
    assert "does not fit" in console.export_text()
