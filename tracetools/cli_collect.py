"""The command `tracetools collect`.

In: arguments. Out: a run folder, messages on standard error, an exit status: the job's own, or that of an
error before anything was started.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tracetools.errors import UsageError

if TYPE_CHECKING:
    from tracetools.collect.runfile import Collected

DEFAULT_STEPS = "3:6"
MODES = (
    "Name one of: -- CMD... (record it), --idle -- CMD... (run it, attach later), --attach RUN (ask a job that runs)."
)


def _steps(text: str) -> tuple[int, int]:
    """FIRST:STOP, half-open."""
    first, colon, stop = text.partition(":")
    if not (colon and first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
        raise UsageError(f"--steps {text}: write FIRST:STOP with FIRST < STOP; 3:6 records steps 3, 4 and 5.")
    return int(first), int(stop)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--steps {text}: with --attach, write how many steps to record, e.g. --steps 5.")
    return int(text)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--profile",
    metavar="NAME",
    default="torch",
    show_default=True,
    help="Stack profile: a name, or the path of a TOML file.",
)
@click.option(
    "--steps",
    metavar="FIRST:STOP",
    default=None,
    help=f"Steps to record, from 0; STOP is not recorded [default: {DEFAULT_STEPS}]. With --attach: how many.",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="RUN", help="Run folder to make; must be new or empty.")
@click.option("--idle", is_flag=True, help="Record nothing yet: wait for --attach. The job runs at full speed.")
@click.option(
    "--attach",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Ask the job that runs under collect in this folder to record its next steps.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="With --attach: give up when no process begins a step for so long.",
)
@click.option("--ranks", metavar="LIST", help="Record these ranks only, e.g. 0,1,4-7. A driver has no rank.")
@click.option("--roles", metavar="LIST", help="Record these roles only: driver, policy, generation, rank, other.")
@click.option(
    "--activities",
    metavar="LIST",
    default="cpu,cuda",
    show_default=True,
    help="What to record; cuda alone has no regions and no steps.",
)
@click.option("--record-shapes", is_flag=True, help="Record the shapes of operators' inputs.")
@click.option("--with-stack", is_flag=True, help="Record Python stacks. Slows Python code down a lot.")
@click.option("--memory", is_flag=True, help="Record memory allocations.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- CMD...")
@click.pass_context
def collect(ctx: click.Context, /, **given: Any) -> None:
    """Run CMD with every Python process of it, Ray workers too, under torch.profiler for the chosen steps.

    The training code is not changed. CMD's own exit status is returned. With --idle, CMD runs with the recorder asleep, and
    `tracetools collect --attach RUN --steps N` records its next N steps, again and again.
    """
    from tracetools.collect.options import Choice, ProfilerOptions, parse_activities, parse_ranks, parse_roles

    _check(given)
    options = ProfilerOptions(
        given["record_shapes"], given["with_stack"], given["memory"], parse_activities(given["activities"])
    )
    choice = Choice(
        parse_ranks(given["ranks"]) if given["ranks"] else None,
        parse_roles(given["roles"]) if given["roles"] else None,
    )
    if given["attach"]:
        _attach(given["attach"], _count(given["steps"] or "1"), options, choice, given["timeout"])
        return
    ctx.exit(_status(_run(given, options, choice)))


def _check(given: dict[str, Any]) -> None:
    """Do the options go together?"""
    command = given["command"]
    if given["attach"]:
        if command or given["idle"] or given["out"]:
            raise UsageError("--attach takes a run that is there already: no command, no --out, no --idle.")
    elif not command:
        raise UsageError(f"there is no command to run. {MODES}")
    elif command[0].startswith("-"):
        raise UsageError(
            f"there is no option {command[0]}. Options of the command stand behind it: -- CMD {command[0]} ..."
        )
    elif not given["out"]:
        raise UsageError("--out RUN is missing: the folder for run.json and the traces; it must be new or empty.")
    elif given["idle"] and given["steps"]:
        raise UsageError("--idle records no steps by itself: leave --steps to collect --attach.")


def _run(given: dict[str, Any], options: Any, choice: Any) -> Collected:
    from tracetools.collect.launch import collect as record
    from tracetools.collect.launch import collect_idle, explain_empty
    from tracetools.stackprofile import load_profile

    profile = load_profile(given["profile"])
    if given["idle"]:
        found = collect_idle(given["command"], given["out"], profile)
        _say(f"{found.folder}: the job has ended, recorded were: {', '.join(found.recordings) or 'none'}.")
        _tell(found)
        return found
    first, stop = _steps(given["steps"] or DEFAULT_STEPS)
    found = record(given["command"], given["out"], profile, first, stop, options, choice)
    if found.traces:
        _tell(found)
        _say(_summary(found, stop - first))
    else:
        _tell(found, lost=False)
        _say(str(explain_empty(found, first)))
    return found


def _attach(run: Path, steps: int, options: Any, choice: Any, patience_s: float) -> None:
    from tracetools.collect.attach import attach

    with _progress("waiting for") as report:
        found = attach(run, steps, options, choice, patience_s=patience_s, report=report)
    _tell(found)
    _say(_summary(found, steps))


def _tell(found: Collected, *, lost: bool = True) -> None:
    """What did not go as it should, and who was left out."""
    for problem in found.problems:
        _say(problem)
    if lost:
        for missing in found.missing:
            _say(f"missing: {missing}")
        for left_out in found.not_recorded:
            _say(f"not recorded: {left_out}")


def _summary(found: Collected, asked: int) -> str:
    few = "" if len(found.steps) == asked else f" ({asked} were asked for: the job was shorter)"
    many = f"{found.folder}: {len(found.traces)} trace(s), steps recorded: {_runs(found.steps)}{few}."
    return f"{many} See: tracetools breakdown {found.folder}"


def _runs(numbers: tuple[int, ...]) -> str:
    """(3, 4, 5, 8) -> "3-5, 8"."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in runs) or "none"


def _say(text: str) -> None:
    click.echo(f"tracetools: {text}", err=True)


def _status(found: Collected) -> int:
    """As a shell gives it: 128 + N for signal N."""
    return found.exit_code if found.exit_code >= 0 else 128 - found.exit_code


@contextmanager
def _progress(doing: str) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from tracetools.render.terminal import progress_bar

    with progress_bar(doing) as update:
        yield update
