"""Reading a node file, which describes the machine that a sweep runs on or is planned for."""

import difflib
from pathlib import Path
from typing import Any

from ..cluster import specifications
from ..cluster.node_settings import Node
from . import files
from .files import WrongInput
from .validation import nearest, validate

READY_NODES = Path(specifications.__file__).parent
"""The node files that come with rigsweep."""
THIS_MACHINE = Path("cluster") / "this-machine.yaml"
"""Read where it is there and no other is asked for, in the working directory."""


def read_node(name_or_path: str | None) -> Node:
    """A node file by path, or a ready one by name; without either this machine's own. Raises `WrongInput`."""
    if name_or_path is None and not THIS_MACHINE.is_file():
        return Node()
    document = files.read(THIS_MACHINE if name_or_path is None else _find(name_or_path))
    node: Node = validate(Node, document.values, document)
    cards = known_cards()
    if node.hardware and node.hardware.card not in cards:
        near = nearest(node.hardware.card, cards) or f"; known: {', '.join(cards)}"
        message = f"no such card in the card table, found {node.hardware.card}{near}"
        raise document.wrong(("hardware", "card"), message)
    return node


def refuse_if_elsewhere(node: Node, name_or_path: str | None) -> None:
    """Raise `WrongInput` for a machine that is not here, on which nothing can run."""
    if node.hardware:
        told = f"{node.hardware.count} × {node.hardware.card}"
        raise WrongInput(
            f"{name_or_path or THIS_MACHINE}: describes a machine that is not here (hardware: {told}); plan for it by "
            "`rigsweep plan FILE --on NODE`, or take `hardware` out of its file on that machine"
        )


def node_schema() -> dict[str, Any]:
    """The JSON Schema of node files."""
    from .schema import with_units

    schema = Node.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "rigsweep node"
    schema["$defs"]["Hardware"]["properties"]["card"] |= {"enum": known_cards()}
    return with_units(schema)


def known_cards() -> list[str]:
    """The cards that a plan can be made for: those of the table with a peak in bf16."""
    found = (card.name for card in specifications.SPECIFICATIONS if card.peak_bf16_flops_per_second)
    return list(dict.fromkeys(found))


def _find(name_or_path: str) -> Path:
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    ready = {file.stem: file for file in READY_NODES.glob("*.yaml") if file.name != THIS_MACHINE.name}
    if name_or_path in ready:
        return ready[name_or_path]
    near = difflib.get_close_matches(name_or_path, [*ready, *(str(p) for p in Path().glob("*.yaml"))], n=1)
    hint = f"did you mean {near[0]}?" if near else f"ready ones: {', '.join(sorted(ready))}"
    raise WrongInput(f"{name_or_path}: no such node file; {hint}")
