"""The rooms: every module imports from an installed copy, and imports only what it may."""

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "cluster": set(),
    "datasets": set(),
    "trainables": {"datasets", "cluster"},
    "sweeps": {"cluster", "datasets", "trainables"},
}
MODULES = sorted(file for room in MAY_IMPORT for file in (ROOT / room).glob("*.py"))
LIGHT = [
    "sweeps.cli",
    "sweeps.sweep",
    "trainables.settings",
    "trainables.gpt_settings",
    "datasets.settings",
    "sweeps.node_file",
]
HEAVY = {"torch", "ray", "mlflow", "optuna", "transformers", "pandas", "pyarrow", "numpy", "matplotlib", "jinja2"}


def name(file: Path) -> str:
    return f"{file.parent.name}.{file.stem}"


@pytest.mark.parametrize("file", MODULES, ids=name)
def test_every_module_imports(file: Path) -> None:
    importlib.import_module(f"rigsweep.{name(file)}")


@pytest.mark.parametrize("file", MODULES, ids=name)
def test_rooms_import_only_what_they_may(file: Path) -> None:
    room = file.parent.name
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 2:
            other = (node.module or node.names[0].name).split(".")[0]
            assert other in MAY_IMPORT[room], f"{file} imports {other}"
        elif isinstance(node, ast.ImportFrom | ast.Import):
            words = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not any(word.split(".")[0] == "rigsweep" for word in words), f"{file}: imports inside are relative"


def test_no_room_is_a_regular_package_and_none_is_nested() -> None:
    for room in MAY_IMPORT:
        assert not (ROOT / room / "__init__.py").exists(), "it would hide Hugging Face's `datasets`"
        assert not list((ROOT / room).glob("*/*.py")), "a nested folder is missing from the wheel"
        assert (ROOT / room / "README.md").is_file(), "each room has its guide"


def test_the_package_lists_every_room() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(told) == sorted(f"rigsweep.{room}" for room in MAY_IMPORT)


def test_the_package_has_every_file_that_code_reads() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    others = [
        file for room in MAY_IMPORT for file in (ROOT / room).iterdir() if file.is_file() and file.suffix != ".py"
    ]
    assert [file for file in others if not any(file.match(pattern) for pattern in told)] == []


@pytest.mark.parametrize("module", LIGHT)
def test_what_answers_a_wrong_file_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, rigsweep.{module}; print(*sorted(sys.modules))"
    answer = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(answer.stdout.split())


def test_hugging_faces_datasets_is_not_hidden_in_a_worker() -> None:
    code = "import importlib.util; print(importlib.util.find_spec('datasets'))"
    answer = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert str(ROOT) not in answer.stdout
