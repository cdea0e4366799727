"""README and docs say what is: commands exist, code runs, keys are those that are written, CI runs the README's command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from builders import kernel, launch, step, write
from click.testing import CliRunner
from conftest import REPOSITORY

from tracetools.analysis import analyze, compare
from tracetools.cli import main
from tracetools.load import load_run
from tracetools.model import RunBreakdown
from tracetools.profilefile import HOOK_KINDS, KEYS
from tracetools.render.jsonout import render
from tracetools.stackprofile import load_profile

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def result(tmp_path: Path) -> RunBreakdown:
    events = [
        e
        for i in range(2)
        for e in (step(i, 100 * i, 100), launch(100 * i, i + 1), kernel("gemm", 100 * i + 20, 50, i + 1))
    ]
    return analyze(load_run(write(tmp_path / "trace.json", events)))


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_has_help_and_is_in_the_readme(name: str) -> None:
    shown = CliRunner().invoke(main, [name, "--help"])

    assert shown.exit_code == 0
    assert main.commands[name].help
    assert f"tracetools {name}" in README


def test_every_command_line_of_the_readme_is_one_that_exists() -> None:
    """Commands and options, checked against the parser; nothing is run."""
    lines = [line for block in blocks(README, "console") for line in block.splitlines() if "tracetools " in line]
    assert lines

    for line in lines:
        words = line.split("tracetools ", 1)[1].split("#")[0].split(" -- ")[0].split()
        command = main.commands[words[0]]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {w for w in words if w.startswith("-")} <= known, line


@pytest.mark.usefixtures("result")
def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hta")
    monkeypatch.chdir(tmp_path)  # trace.json is there
    for block in blocks(README, "python"):
        exec(compile(block, "README.md", "exec"), {})

    assert json.loads((tmp_path / "diff.json").read_text())["schema"] == "tracetools.diff/1"


def keys(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {k for v in value.values() for k in keys(v)}
    if isinstance(value, list):
        return {k for v in value for k in keys(v)}
    return set()


@pytest.mark.parametrize("which", ["breakdown", "diff"])
def test_every_json_key_is_documented(result: RunBreakdown, which: str) -> None:
    text = (REPOSITORY / "docs" / "json.md").read_text(encoding="utf-8")
    document = json.loads(render(result if which == "breakdown" else compare(result, result)))
    documented = set(re.findall(r"`(?:[a-z_]+(?:\[\])?\.)*([a-z_]+)(?:\[\])?`", text))

    assert keys(document) - {"schema", "processes"} <= documented


def test_ci_runs_the_test_command_of_the_readme() -> None:
    (command,) = re.findall(r"<!-- test command -->\n```console\n(.*?)\n```", README, re.DOTALL)

    assert command.endswith(".venv/bin/pytest")
    assert 'readme_command "test command"' in (REPOSITORY / ".ci" / "run").read_text()


def test_links_of_the_documents_lead_somewhere() -> None:
    for page in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_profiles_of_the_documents_load(tmp_path: Path) -> None:
    for page in (REPOSITORY / "docs").glob("*.md"):
        for i, block in enumerate(blocks(page.read_text(encoding="utf-8"), "toml")):
            file = tmp_path / f"{page.stem}{i}.toml"
            file.write_text(block)
            assert load_profile(file).step_functions


def test_every_key_of_a_profile_is_documented() -> None:
    text = (REPOSITORY / "docs" / "profiles.md").read_text(encoding="utf-8")
    words = set(re.findall(r"[a-z_]+", text))
    assert {word for section, keys in KEYS.items() for word in (section, *keys)} - {""} <= words
    assert set(HOOK_KINDS) <= words
