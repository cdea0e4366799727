"""What all reports on a terminal share: the console, numbers and names as text, tables, problems, the progress bar.

In: values. Out: text on standard output (and a progress bar on standard error). Names from traces are data: control characters
are shown, never sent, and nothing in them is markup. Knows nothing of reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from tracetools.model import Problem, ProcessBreakdown
from tracetools.render.grid import Column, Grid

PIPE_WIDTH = 120
SHOWN_PROBLEMS = 12


def console() -> Console:
    """As wide as the terminal; in a pipe as wide as a page of a log."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def show(out: Console, grid: Grid) -> None:
    for line in grid.lines(out.width):
        out.print(line, no_wrap=True, overflow="ignore", crop=False)


def clean(name: str | None, width: int = 60) -> str:
    """A name from a trace, fit to print: control characters escaped, long ones cut in the middle."""
    if name is None:
        return "n/a"
    visible = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    return visible if len(visible) <= width else visible[: width // 2 - 1] + "…" + visible[-(width // 2) :]


def ms(ns: int | None) -> str:
    return "n/a" if ns is None else f"{ns / 1e6:,.3f}"


def signed_ms(ns: int) -> str:
    return "0" if ns == 0 else f"{ns / 1e6:+,.3f}"


def share(part: int, whole: int) -> str:
    return "n/a" if not whole else f"{100 * part / whole:.1f}%"


def grid_of(*titles: str) -> Grid:
    """A title that ends in ? is an optional column, one that begins with < is aligned left."""
    return Grid([Column(t.rstrip("?").lstrip("<"), optional=t.endswith("?"), left=t.startswith("<")) for t in titles])


def who(p: ProcessBreakdown) -> str:
    return p.role if p.role == "driver" or p.rank is None else f"{p.role} {p.rank}"


def print_problems(out: Console, problems: Sequence[tuple[str, Problem]]) -> None:
    if not problems:
        return
    out.print()
    out.print(Text("What to know about the data", style="bold"))
    for who, p in problems[:SHOWN_PROBLEMS]:
        out.print(Text(f"  {who}{p.count:,} x {p.kind}: {clean(p.detail, 160)}", style="yellow"))
    if len(problems) > SHOWN_PROBLEMS:
        out.print(Text(f"  ... and {len(problems) - SHOWN_PROBLEMS} more (--json has all)", style="dim"))


@contextmanager
def progress_bar(doing: str) -> Iterator[Callable[[str, int, int], None]]:
    """On standard error; gone when done."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(doing, total=None)

        def update(what: str, done: int, total: int) -> None:
            progress.update(task, description=f"{doing} {clean(what, 50)}", completed=done, total=total)

        yield update
