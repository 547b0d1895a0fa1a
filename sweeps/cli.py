"""The command line. Heavy libraries are imported inside the commands: a wrong file is answered at once.

Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted (state saved).
"""

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cluster.errors import MachineError
from ..cluster.node_settings import Node
from ..datasets.errors import DataError, NoCorpus
from ..trainables.errors import WrongSettings
from . import folders, source
from .files import WrongInput
from .node_file import node_schema, read_node, refuse_if_elsewhere
from .sweep import Sweep, load

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Sweeps over small models trained from scratch, on the cards you own.",
)

File = Annotated[
    str, typer.Argument(help="A sweep or training file, or the name of a ready sweep.", show_default=False)
]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key of the file.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the folder that is there.")]
New = Annotated[bool, typer.Option("--new", help="Leave the folder that is there, begin another beside it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Runs = Annotated[Path, typer.Option("--runs", help="Where sweeps are kept.", envvar="RIGSWEEP_RUNS")]
Cards = Annotated[int | None, typer.Option("--cards", min=1, help="Use only so many cards.", show_default="all")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Threads of a card, without a GPU.", show_default="half of the cores"),
]
On = Annotated[
    str | None,
    typer.Option("--on", metavar="NODE", help="The machine: a node file, or the name of a ready one."),
]
Run = Annotated[str, typer.Argument(help="SWEEP/NUMBER, SWEEP for its best, or an MLflow run id.", show_default=False)]
Name = Annotated[str | None, typer.Argument(help="A sweep; the newest if not given.", show_default=False)]
_RUNS = Path("runs")


@app.command()
def sweep(
    file: File,
    set_: Set = None,
    resume: Resume = False,
    new: New = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and plan only.")] = False,
    as_json: Json = False,
    runs: Runs = _RUNS,
    cards: Cards = None,
    threads: Threads = None,
    on: On = None,
) -> None:
    """Run a sweep: propose, train, stop early, track."""
    overrides = tuple(set_ or ())
    if dry_run:
        _plan(load(file, overrides, runs), as_json, runs, cards, threads, on)
        return
    node = _node_here(on)
    runs = _runs(runs, node)
    asked, edited = folders.open_sweep(file, overrides, runs, resume=resume, new=new)
    if not asked.settings.search:
        raise WrongInput(f"{file}: has nothing to search; train it by `rigsweep train {file}`")
    again = _again("sweep", asked, file, overrides, runs, cards, threads, on)
    stage = _Stage(runs, as_json, cards, threads, node, again)
    if asked.settings.from_ is not None and (training := source.untrained(asked, runs)):
        stage.note(f"{asked.name} is from {training.name}, which is trained first")
        stage.run(training, tell=False)
    outcome = stage.run(asked, edited, tell=asked.settings.confirm is None)
    if asked.settings.confirm is None:
        return
    from . import views
    from .confirming import confirmation

    folder = runs / asked.name
    second = confirmation(asked, folders.record_of(folder))
    if second is not None:
        stage.run(folders.go_on(second, runs), tell=False)
        record = folders.record_of(folder)
        outcome = dataclasses.replace(outcome, summary=views.write_files(asked, folder, record))
    stage.tell(asked, outcome)


@app.command()
def train(
    file: File,
    set_: Set = None,
    resume: Resume = False,
    new: New = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and plan only.")] = False,
    as_json: Json = False,
    runs: Runs = _RUNS,
    cards: Cards = None,
    threads: Threads = None,
    on: On = None,
) -> None:
    """Train once: the base of a file. With --resume the file may have been edited."""
    overrides = tuple(set_ or ())
    if dry_run:
        _plan(folders.base_alone(load(file, overrides, runs)), as_json, runs, cards, threads, on)
        return
    node = _node_here(on)
    runs = _runs(runs, node)
    asked, edited = folders.open_sweep(file, overrides, runs, resume=resume, new=new, training=True)
    again = _again("train", asked, file, overrides, runs, None, threads, on)
    _Stage(runs, as_json, cards or 1, threads, node, again).run(asked, edited)


def _node_here(on: str | None) -> Node:
    """The node file of the machine that something is to run on."""
    node = read_node(on)
    refuse_if_elsewhere(node, on)
    return node


def _runs(runs: Path, node: Node | None = None) -> Path:
    """Where sweeps are kept: as the command line or the environment says, else as the node file does."""
    return runs if runs != _RUNS else (node or read_node(None)).folders.runs or runs


def _again(
    command: str,
    asked: Sweep,
    file: str,
    overrides: tuple[str, ...],
    runs: Path,
    cards: int | None,
    threads: int | None,
    on: str | None,
) -> list[str]:
    """The command that goes on with what was interrupted."""
    # A sweep that was begun beside another is gone on with by its own name, with its folder's own settings.
    beside = asked.name not in (Path(file).stem, f"{Path(file).stem}-base")
    named = [asked.name] if beside else [file, *(word for one in overrides for word in ("--set", one))]
    again = ["rigsweep", command, *named, "--resume", *(["--runs", str(runs)] if runs != _RUNS else [])]
    again += ["--on", on] if on else []
    again += ["--cards", str(cards)] if cards else []
    return again + (["--threads", str(threads)] if threads else [])


@dataclasses.dataclass
class _Stage:
    """Runs sweeps one after another for one command, and tells a person or a program what came of them."""

    runs: Path
    as_json: bool
    cards: int | None
    threads: int | None
    node: Node
    again: list[str]

    def note(self, text: str) -> None:
        """Something to know."""
        print(text, file=sys.stderr)

    def run(self, asked: Sweep, edited: dict[str, Any] | None = None, *, tell: bool = True) -> Any:
        """Run one to its end. Exits where it is interrupted, or nothing of it came to a result."""
        from .running import cache_folder, run
        from .tables import LiveShow

        with LiveShow(asked, quiet=self.as_json) as show:
            cache, machine = cache_folder(self.node), {"cards": self.cards, "threads": self.threads, "node": self.node}
            outcome = run(asked, self.runs, cache, show, edited=edited or {}, **machine)
        if tell or outcome.state != "complete":
            self.tell(asked, outcome)
        if outcome.state != "complete":
            print(f"interrupted ({outcome.reason}); go on with: {shlex.join(self.again)}", file=sys.stderr)
            raise typer.Exit(130)
        if all(trial["state"] == "failed" for trial in outcome.summary["trials"]):
            print(f"every trial failed; the first: {outcome.summary['trials'][0]['reason']}", file=sys.stderr)
            print(f"its log: {self.runs / asked.name / 'trials' / '0' / 'log.txt'}", file=sys.stderr)
            raise typer.Exit(1)
        return outcome

    def tell(self, asked: Sweep, outcome: Any) -> None:
        """The trials and the summary."""
        from rich.console import Console

        from .tables import summary_panel

        if self.as_json:
            print(json.dumps(outcome.summary, ensure_ascii=False))
            return
        record = folders.record_of(self.runs / asked.name)
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(_trials(asked, record))
        console.print()
        console.print(summary_panel(asked, record, outcome.summary))
        console.print(f"\nreport: {self.runs / asked.name / 'report.html'}", highlight=False, soft_wrap=True)
        console.print(f"compare in MLflow: rigsweep ui {asked.name}", highlight=False)


def _trials(asked: Sweep, record: Any) -> Any:
    from .money import Rates
    from .summary import best_of
    from .tables import ranked, trials_table

    trials = ranked(asked, list(record.trials.values()))
    return trials_table(asked, trials, {}, best=best_of(asked, trials), rates=Rates.of(record))


@app.command()
def plan(
    file: File,
    set_: Set = None,
    as_json: Json = False,
    runs: Runs = _RUNS,
    cards: Cards = None,
    threads: Threads = None,
    on: On = None,
) -> None:
    """Print every derived number, the trials and the time they will take; train nothing."""
    _plan(load(file, tuple(set_ or ()), runs), as_json, runs, cards, threads, on)


def _plan(asked: Sweep, as_json: bool, runs: Path, cards: int | None, threads: int | None, on: str | None) -> None:
    from .planning import plan_sweep, plan_table
    from .running import cache_folder
    from .scoring_plan import plan_scoring, scoring_table
    from .tables import LiveShow

    only_samples = asked.settings.from_ is not None
    plan_it, table = (plan_scoring, scoring_table) if only_samples else (plan_sweep, plan_table)
    node = read_node(on)
    with LiveShow(asked, quiet=as_json) as show:
        cache, runs = cache_folder(node), _runs(runs, node)
        planned = plan_it(asked, cache, show.preparing, runs, cards=cards, threads=threads, node=node)
    if as_json:
        print(json.dumps(planned, ensure_ascii=False))
    else:
        show.console.print(table(planned))


@app.command()
def results(name: Name = None, as_json: Json = False, runs: Runs = _RUNS) -> None:
    """Show the trials of a sweep, the best first."""
    from rich.console import Console

    from .history import alone_with
    from .tables import summary_panel
    from .views import told_of

    folder = folders.find_sweep(_runs(runs), name)
    asked, record = folders.read_sweep(folder), folders.record_of(folder)
    with alone_with(folder) as nobody_runs_it:
        told = told_of(asked, folder, record, running=not nobody_runs_it)
    if as_json:
        print(json.dumps(told, ensure_ascii=False))
        return
    console = Console()
    console.print(f"[bold]{asked.name}[/]  {told['state']}  [dim italic]{asked.settings.question}[/]")
    console.print(_trials(asked, record))
    console.print()
    console.print(summary_panel(asked, record, told))


@app.command()
def report(name: Name = None, as_json: Json = False, runs: Runs = _RUNS) -> None:
    """Write the report anew, and every other view of a sweep: summary, study, MLflow."""
    from dataclasses import asdict

    from .views import rebuild

    views = rebuild(folders.find_sweep(_runs(runs), name))
    if as_json:
        print(json.dumps(asdict(views), ensure_ascii=False))
    else:
        for kind, path in views.files.items():
            print(f"{kind}: {path}")
        if views.running:
            print("it is running: the report is of this moment, and its process keeps the rest", file=sys.stderr)
    if views.behind:
        print(f"MLflow could not be brought up to date: {views.behind.splitlines()[0]}", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def sample(
    run: Run,
    set_: Set = None,
    out: Annotated[Path, typer.Option("--out", help="Where pictures go.")] = Path(),
    as_json: Json = False,
    runs: Runs = _RUNS,
) -> None:
    """Draw from a trained run: --set sampling.prompt="def ", or --set sampling.guidance=2 --out pictures."""
    from .running import cache_folder
    from .sampling import sample_run

    texts, pictures = sample_run(run, _runs(runs), cache_folder(read_node(None)), tuple(set_ or ()), out)
    paths = {name: str(path) for name, path in pictures.items()}
    if as_json:
        print(json.dumps(texts | paths, ensure_ascii=False))
    else:
        print("\n\n".join(texts.values()) or "\n".join(paths.values()))


@app.command()
def prepare(file: File, set_: Set = None, as_json: Json = False) -> None:
    """Prepare the data of a file, which a sweep would otherwise do when it begins."""
    from ..trainables import registry
    from .running import cache_folder
    from .tables import LiveShow

    asked = load(file, tuple(set_ or ()))
    with LiveShow(asked, quiet=as_json) as show:
        told = registry.prepare(
            asked.settings.trainable, asked.training({}), cache_folder(read_node(None)), show.preparing
        )
    print(json.dumps(told, ensure_ascii=False) if as_json else "\n".join(f"{k}: {v}" for k, v in told.items()))


@app.command()
def simulate(
    name: Name = None,
    stopper: Annotated[
        list[str] | None, typer.Option(metavar="RULE", help="A rule to try; may be given again, as all that follow.")
    ] = None,
    grace: Annotated[list[str] | None, typer.Option(metavar="SHARE", help="Its grace, as 20%.")] = None,
    reduction: Annotated[list[str] | None, typer.Option(metavar="NUMBER", help="Its reduction, of asha.")] = None,
    chance: Annotated[list[str] | None, typer.Option(metavar="SHARE", help="Its chance, of forecast.")] = None,
    within: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="It compares equals of this parameter; or none.")
    ] = None,
    orders: Annotated[int, typer.Option(min=1, help="Random orders of the trials.")] = 1000,
    slots: Annotated[int | None, typer.Option(min=1, help="Trials at once.", show_default="the sweep's cards")] = None,
    seed: Annotated[int, typer.Option(help="Of the orders.")] = 0,
    as_json: Json = False,
    runs: Runs = _RUNS,
) -> None:
    """What another early stopping would have saved, on the curves that a sweep recorded in full."""
    from .simulating import simulate_sweep

    dials = {"grace": grace, "reduction": reduction, "chance": chance, "within": within}
    folder = folders.find_sweep(_runs(runs), name)
    simulate_sweep(folder, stopper or [], dials, orders=orders, slots=slots, seed=seed, as_json=as_json)


@app.command()
def ui(
    name: Name = None,
    port: Annotated[int | None, typer.Option(help="The port; 5000, or the next that is free.")] = None,
    runs: Runs = _RUNS,
) -> None:
    """Open MLflow's own pages on the runs, with a sweep's comparison selected."""
    from .ui import serve

    runs = _runs(runs)
    serve(runs, port, folders.find_sweep(runs, name).name)


@app.command()
def bench(
    again: Annotated[bool, typer.Option("--again", help="Measure also what is kept of earlier.")] = False,
    as_json: Json = False,
    cards: Cards = None,
    threads: Threads = None,
) -> None:
    """Measure the cards, and the paths between them, beside their makers' figures."""
    from rich.console import Console

    from ..cluster.bench import bench as measure
    from ..cluster.cards import find_cards
    from ..cluster.locks import hold_cards
    from .bench_table import bench_data, bench_table
    from .running import cache_folder

    found, told = find_cards(use=cards, threads=threads), Console(stderr=True)

    def waiting(card: Any, holder: str) -> None:
        told.print(f"waiting for {card.name}, held by {holder}", style="dim", highlight=False)

    def progress(words: str, number: int, total: int) -> None:
        told.print(f"{number} of {total}: {words}", style="dim", highlight=False, soft_wrap=True)

    with hold_cards(found, waiting):
        measured = measure(found, cache_folder(), progress, again=again)
    if as_json:
        print(json.dumps(bench_data(measured), ensure_ascii=False))
    else:
        Console().print(bench_table(measured))


@app.command()
def doctor(
    as_json: Json = False,
    runs: Runs = _RUNS,
    on: On = None,
    everything: Annotated[bool, typer.Option("--all", help="Show what is fine too.")] = False,
) -> None:
    """Look for what would stop a run, with the remedy of each; exit code 1 where something would."""
    from dataclasses import asdict

    from rich.console import Console

    from .doctor import findings, findings_table, stops_a_run
    from .running import cache_folder

    node = read_node(on)  # a wrong node file would stop a run too
    found = findings(_runs(runs, node), cache_folder(node))
    if as_json:
        told = {"stops_a_run": stops_a_run(found), "findings": [asdict(finding) for finding in found]}
        print(json.dumps(told, ensure_ascii=False))
    else:
        Console().print(findings_table(found, everything=everything))
    if stops_a_run(found):
        raise typer.Exit(1)


@app.command()
def schema(node: Annotated[bool, typer.Option("--node", help="Of node files.")] = False) -> None:
    """Print the JSON Schema of sweep files, with which editors complete and check them."""
    from .schema import sweep_schema

    print(json.dumps(node_schema() if node else sweep_schema(), indent=1))


# Click's error for wrong words on the command line, or typer's own copy of it.
_UsageError: Any = typer.BadParameter.__bases__[0]


def main() -> None:
    """The entry point: what a person can mend is one line and exit code 2, anything else one line and 1."""
    try:
        code = app(standalone_mode=False)
    except NoCorpus as error:
        code = _say(f"{error} (another corpus: --set base.data.corpus=PATH)", 2)
    except (WrongInput, DataError, WrongSettings) as error:
        code = _say(str(error), 2)
    except _UsageError as error:
        code = _say(error.format_message(), 2)
    except MachineError as error:
        code = _say(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        code = _say("interrupted", 130)
    except Exception as error:  # noqa: BLE001 - the last border: a line for the person, the traceback in a file
        file = _keep_traceback()
        code = _say(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''} ({file})", 1)
    sys.exit(code or 0)


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code


def _keep_traceback() -> Path:
    import traceback

    from .running import cache_folder

    file = cache_folder() / "last-error.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(traceback.format_exc(), encoding="utf-8")
    return file


if __name__ == "__main__":
    main()
