"""The command line.

In: arguments. Out: text on the terminal, files, an exit status. The one place where errors become messages and where
results are printed. Loads nothing heavy before a command needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tracetools import __version__
from tracetools.cli_collect import collect
from tracetools.cli_profiles import profiles
from tracetools.errors import EXIT_OK, TracetoolsError, UsageError

if TYPE_CHECKING:
    from tracetools.diff_records import Diff
    from tracetools.model import Run, RunBreakdown
    from tracetools.stackprofile import StackProfile


class Commands(click.Group):
    """Shows errors of ours as messages with their exit status, never as tracebacks."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TracetoolsError as error:
            click.echo(f"tracetools: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="tracetools")
def main() -> None:
    """Where does a training step's time go, and why is the same model slower in another stack?

    TRACE, A and B below are a trace file (.json, .json.gz), a folder of them, or a run folder of `tracetools collect`.
    """


trace_argument = click.argument("trace", type=click.Path(path_type=Path))
profile_option = click.option("--profile", metavar="NAME", help="Stack profile: a name, or the path of a TOML file.")
json_option = click.option("--json", "json_file", metavar="FILE", help="Write the result as JSON; - for the terminal.")


@main.command()
@trace_argument
@profile_option
def info(trace: Path, profile: str | None) -> None:
    """What is in a trace or a run: processes, steps, device, coverage, faults found."""
    from tracetools.render.terminal_info import print_info

    run = _load(trace)
    print_info(run, _analyze(run, profile))


@main.command()
@trace_argument
@profile_option
@json_option
def breakdown(trace: Path, profile: str | None, json_file: str | None) -> None:
    """Per rank and step: compute, exposed communication, memory, idle time and its causes, kernel classes."""
    from tracetools.render.terminal_breakdown import print_breakdown

    result = _analyze(_load(trace), profile)
    if json_file:
        _write_json(result, json_file)
    else:
        print_breakdown(result)


@main.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@profile_option
@json_option
@click.option(
    "--skip", type=click.IntRange(0), default=0, metavar="N", help="Leave out the first N steps of both sides."
)
def diff(a: Path, b: Path, profile: str | None, json_file: str | None, skip: int) -> None:
    """Why is B's step longer or shorter than A's? Parts that sum to the difference, to the nanosecond."""
    from tracetools.analysis import compare
    from tracetools.render.terminal_diff import print_diff

    result = compare(_analyze(_load(a), profile), _analyze(_load(b), profile), skip=skip)
    if json_file:
        _write_json(result, json_file)
    if json_file != "-":
        print_diff(result)


main.add_command(collect)
main.add_command(profiles)


def _plants_explained() -> str:
    from tracetools.demo.plant import CAUSES

    lines = [f"  {cause:<16} {what}" for cause, what in CAUSES.items()]
    return "\b\nWhat --plant does, by CAUSE:\n" + "\n".join(lines)


@main.command(epilog=_plants_explained())
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Folder to make; must be new or empty."
)
@click.option(
    "--stack",
    type=click.Choice(["both", "megatron", "ray"]),
    default="both",
    show_default=True,
    help="Which half to train; one alone is broken down instead of compared.",
)
@click.option(
    "--plant",
    "plants",
    metavar="CAUSE:MS",
    multiple=True,
    help="A known fault of MS per step in the Ray half (or in the half that is alone), e.g. data_processing:40; "
    "with @I/N behind it, in step I of every N only. CAUSE: see below.",
)
@click.option(
    "--nemo-rl",
    "checkout",
    type=click.Path(path_type=Path),
    metavar="CHECKOUT",
    help="Instead: NeMo-RL's own SFT loop of this checkout on two CPU actors, without and with --plant data_processing:MS (40).",
)
@click.option(
    "--python", default="python", metavar="PYTHON", help="With --nemo-rl: the Python of NeMo-RL's environment."
)
def demo(out: Path, stack: str, plants: tuple[str, ...], checkout: Path | None, python: str) -> None:
    """Train one tiny Megatron-Core GPT in two stacks, record both, and explain the difference.

    A is plain (torchrun, one process per rank), B a Ray driver with one actor per rank. Needs tracetools[demo]; about a minute.
    """
    from tracetools.demo.plant import Plant, parse_plant
    from tracetools.demo.run import HALVES, run_demo

    wanted = [parse_plant(p) for p in plants]
    if checkout is not None:
        from tracetools.demo.nemo_rl_run import run_nemo_rl

        fault = wanted or [Plant("data_processing", 40.0)]
        if len(fault) > 1 or fault[0].cause != "data_processing":
            raise UsageError(
                "--nemo-rl: only data_processing:MS can be planted into NeMo-RL's loop. Nothing was started."
            )
        _show_comparison(out, *run_nemo_rl(out, checkout, python, fault[0].milliseconds))
        return
    halves = tuple(HALVES) if stack == "both" else (stack,)
    with _progress("training") as progress:
        folders = run_demo(out, halves=halves, plants=wanted, progress=progress)
    if len(folders) == 1:
        _show_half(folders[0])
    else:
        _show_comparison(out, *folders)


def _show_half(folder: Path) -> None:
    from tracetools.render.terminal_breakdown import print_breakdown

    print_breakdown(_analyze(_load(folder), None))
    click.echo(f"\nIn {folder.parent}: run folder {folder.name}. Next: tracetools info {folder}")


def _show_comparison(out: Path, plain: Path, ray: Path) -> None:
    from tracetools.analysis import compare
    from tracetools.render.terminal_diff import print_diff

    result = compare(_analyze(_load(plain), None), _analyze(_load(ray), None))
    _write_json(result, str(out / "diff.json"))
    print_diff(result)
    click.echo(f"\nIn {out}: run folders {plain.name} and {ray.name}, diff.json. Next: tracetools breakdown {ray}")


@main.command()
@trace_argument
@profile_option
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="OUT.json.gz, or OUT.json.",
)
def export(trace: Path, profile: str | None, out: Path) -> None:
    """One Perfetto file of a whole run: steps, idle causes and regions of every process beside its original events."""
    from tracetools.analysis import export_run

    run = _load(trace)
    with _progress("writing") as progress:
        tally = export_run(run, out, _profile(profile), progress)
    left_out = "; ".join(f"{n} {why}" for why, n in sorted(tally.left_out.items()) if n)
    click.echo(f"{out}: {tally.slices:,} slices, {tally.flows:,} arrows. Open it at https://ui.perfetto.dev")
    if left_out:
        click.echo(f"left out: {left_out}", err=True)


def _profile(name: str | None) -> StackProfile | None:
    from tracetools.stackprofile import load_profile

    return load_profile(name) if name else None


def _load(path: Path) -> Run:
    from tracetools.load import load_run

    with _progress() as progress:
        return load_run(path, progress)


def _analyze(run: Run, profile: str | None) -> RunBreakdown:
    from tracetools.analysis import analyze

    return analyze(run, _profile(profile))


def _write_json(result: RunBreakdown | Diff, target: str) -> None:
    from tracetools.analysis import write_report
    from tracetools.render.jsonout import render

    if target == "-":
        sys.stdout.buffer.write(render(result))
    else:
        write_report(result, target)


@contextmanager
def _progress(doing: str = "reading") -> Iterator[Any]:
    """A bar on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from tracetools.render.terminal import progress_bar

    with progress_bar(doing) as update:
        yield update


__all__ = ["EXIT_OK", "main"]
