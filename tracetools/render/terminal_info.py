"""What is in a run, on a terminal.

In: a run and its breakdown. Out: text on standard output. Computes no figure of its own.
"""

from __future__ import annotations

from rich.text import Text

from tracetools.model import Run, RunBreakdown
from tracetools.render.terminal import clean, console, grid_of, print_problems, share, show, who


def print_info(run: Run, result: RunBreakdown) -> None:
    out = console()
    head = f"{clean(run.path, 90)}: {len(run.processes)} process{'es' if len(run.processes) != 1 else ''}"
    out.print(Text(head + (f", recorded with profile {run.stack}" if run.stack else ""), style="bold"))
    if command := run.record.get("command"):
        out.print(Text(f"command  {clean(' '.join(map(str, command)), 100)}", style="dim"))
    grid = grid_of(
        "file",
        "<process",
        "<device?",
        "world?",
        "events",
        "threads?",
        "steps",
        "<steps from?",
        "linked?",
        "idle explained?",
    )
    for process, p in zip(run.processes, result.processes, strict=True):
        linked = p.coverage.linked_ns + p.coverage.unlinked_ns
        idle = sum(s.idle_ns for s in p.steps)
        cells = [
            clean(p.file, 44), who(p), clean(p.device or "n/a", 30), str(p.world_size or "n/a"), f"{len(process.trace.events):,}",
            str(len(process.trace.threads)), str(len(p.steps)), clean(p.steps_from, 34),
            share(p.coverage.linked_ns, linked), share(p.coverage.idle_explained_ns, idle),
        ]  # fmt: skip
        grid.add(*cells)
    show(out, grid)
    if result.profiler:
        out.print(Text(f"profiler options: {', '.join(result.profiler)}", style="dim"))
    if all(p.device == "cpu" for p in result.processes):
        out.print(Text("No device events: the host's operators stand in for the device.", style="dim"))
    print_problems(out, [("", p) for p in result.all_problems])
