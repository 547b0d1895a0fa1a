"""Turnaround: from the decision to stop a trial to the first optimizer step of the next.

Beside it the documented way: `TorchTrainer.fit()` inside each Tune function, OptunaSearch and ASHA, each
trial training the same small model. Both one at a time on one CPU card.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

SWEEP = """
trainable: gpt
base:
  data: {corpus: CORPUS, vocabulary: characters, sequence_length: 32}
  model: {layers: 2, width: 32, head_width: 16}
  optimizer: {learning_rate: 3e-3}
  batch: {examples: 512}
  budget: {examples: 51200}
  evaluation: {every: 10%, examples: 512}
  sampling: {tokens: 1}
search:
  optimizer.learning_rate: {low: 1e-6, high: 1e-3, log: true}
searcher: random
trials: 16
"""


def rows() -> list[tuple[object, ...]]:
    """Medians over the stopped trials of each."""
    with tempfile.TemporaryDirectory() as place:
        ours = _ours(Path(place))
        documented = _documented(Path(place))
    ratio = documented / ours
    return [
        (
            "from stopping a trial to the next one's first step",
            f"{ours:.2f} s",
            f"{documented:.1f} s (documented recipe)",
            f"{ratio:.0f} times faster",
            "at most 1 s, at least 20 times",
            ours <= 1 and ratio >= 20,
        )
    ]


def _ours(place: Path) -> float:
    from rigsweep.sweeps import folders
    from rigsweep.sweeps.running import run
    from rigsweep.sweeps.tables import LiveShow

    corpus = place / "corpus.txt"
    corpus.write_text("\n\n".join(f"The {i}th hen lays {i * i} eggs, and sings of it." for i in range(400)))
    (place / "turns.yaml").write_text(SWEEP.replace("CORPUS", str(corpus)))
    # The base is the best, so that nearly every other trial is stopped at its first rung.
    overrides = ("search.optimizer.learning_rate.high=3e-3",)
    sweep, _ = folders.open_sweep(str(place / "turns.yaml"), overrides, place / "runs", resume=False, new=False)
    run(sweep, place / "runs", place / "cache", LiveShow(sweep, quiet=True), cards=1, threads=1)
    trials = folders.record_of(place / "runs" / "turns").trials
    waits = []
    for number, trial in trials.items():
        following = place / "runs" / "turns" / "trials" / str(number + 1) / "metrics.jsonl"
        if trial.state == "stopped" and trial.ended and following.exists():
            first = json.loads(following.read_text().splitlines()[0])
            waits.append(first["time"] - trial.ended)
    assert len(waits) >= 4, "most trials were stopped"
    return statistics.median(waits)


def _documented(place: Path) -> float:
    """The recipe of Ray's own guide, https://docs.ray.io, "Hyperparameter Tuning with Ray Tune" for Train V2."""
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.optuna import OptunaSearch

    times = place / "times.jsonl"

    def step(config: dict[str, Any]) -> None:
        import ray.train

        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        for i in range(20):
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
            if i == 0:
                with times.open("a") as file:
                    file.write(json.dumps(["first step", time.time()]) + "\n")
            ray.train.report({"loss": config["x"] + 1 / (i + 1)})
            with times.open("a") as file:
                file.write(json.dumps(["reported", time.time()]) + "\n")
            time.sleep(0.2)

    def trial(config: dict[str, Any]) -> None:
        import ray.train
        from ray.train.torch import TorchConfig, TorchTrainer
        from ray.tune.integration.ray_train import TuneReportCallback

        TorchTrainer(
            step,
            train_loop_config=config,
            scaling_config=ray.train.ScalingConfig(num_workers=1),
            torch_config=TorchConfig(backend="gloo"),
            run_config=ray.train.RunConfig(
                name=f"train-{ray.tune.get_context().get_trial_id()}",
                storage_path=str(place / "documented"),
                callbacks=[TuneReportCallback()],
            ),
        ).fit()

    ray.init(num_cpus=4, include_dashboard=True, log_to_driver=False)
    try:
        tune.Tuner(
            trial,
            param_space={"x": tune.uniform(0, 1)},
            tune_config=tune.TuneConfig(
                metric="loss",
                mode="min",
                num_samples=5,
                max_concurrent_trials=1,
                search_alg=OptunaSearch(seed=0),
                scheduler=ASHAScheduler(max_t=20, grace_period=2, reduction_factor=3),
            ),
            run_config=tune.RunConfig(storage_path=str(place / "documented"), verbose=0),
        ).fit()
    finally:
        ray.shutdown()
    events = [json.loads(line) for line in times.read_text().splitlines()]
    starts = [i for i, (what, _) in enumerate(events) if what == "first step"]
    # From a trial's last report to the next one's first step.
    return statistics.median(events[i][1] - events[i - 1][1] for i in starts[1:])
