"""The wheel has everything: every package is listed, every data file matches a pattern, and the modules' contracts are there."""

from __future__ import annotations

import ast
import configparser
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest
from conftest import REPOSITORY

import tracetools
from tracetools.stackprofile import profile_names

SETUP = configparser.ConfigParser()
SETUP.read(REPOSITORY / "setup.cfg")
MODULES = sorted((REPOSITORY / "tracetools").rglob("*.py"))


def test_every_package_is_listed() -> None:
    listed = set(SETUP["options"]["packages"].split())
    there = {".".join(p.parent.relative_to(REPOSITORY).parts) for p in REPOSITORY.glob("tracetools/**/__init__.py")}

    assert listed == there | {"tracetools.profiles"}


def test_every_data_file_is_shipped() -> None:
    patterns = SETUP["options.package_data"]["tracetools.profiles"].split()
    data = [p.name for p in (REPOSITORY / "profiles").iterdir() if p.is_file() and p.suffix != ".py"]

    assert all(any(fnmatch(name, pattern) for pattern in patterns) for name in data)
    assert {name.removesuffix(".toml") for name in data} == set(profile_names())


def test_the_recorder_is_installed_where_the_launcher_looks() -> None:
    folder = Path(tracetools.__file__).parent / "collect" / "inject"

    assert {"sitecustomize.py", "tracetools_recorder.py", "tracetools_hooks.py"} <= {p.name for p in folder.iterdir()}


@pytest.mark.parametrize("module", [m for m in MODULES if m.parent.name == "inject"], ids=lambda m: m.name)
def test_the_recorder_needs_only_the_standard_library_and_python_3_10(module: Path) -> None:
    tree = ast.parse(module.read_text(encoding="utf-8"), feature_version=(3, 10))
    first, later = _imported(tree.body), _imported(list(ast.walk(tree)))
    standard = (sys.stdlib_module_names - {"tomllib"}) | {f.stem for f in module.parent.glob("tracetools_*.py")}
    assert first <= standard
    assert later <= standard | {"torch", "ray"}  # where they are there already


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(REPOSITORY)))
def test_every_module_opens_with_its_contract(module: Path) -> None:
    assert ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))


def _imported(nodes: Sequence[ast.AST]) -> set[str]:
    """Top-level names of the modules that these statements import."""
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    names += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}
