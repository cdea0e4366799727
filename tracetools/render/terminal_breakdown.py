"""A breakdown on a terminal: per process its steps, the causes of its idle time, its regions, waits and classes of work; collectives.

In: a finished `RunBreakdown`. Out: text on standard output. Computes no figure of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from tracetools.chains import UNPAIRED
from tracetools.diff_records import Row
from tracetools.match import working
from tracetools.model import Cause, ProcessBreakdown, RunBreakdown, StepBreakdown, Straggler
from tracetools.render.grid import Grid
from tracetools.render.terminal import clean, console, grid_of, ms, print_problems, share, show, who
from tracetools.verdict import label

SHOWN_CAUSES = 8
SHOWN_STEPS = 12
SHOWN_CLASSES = 10
SHOWN_REGIONS = 10
SHOWN_SYNCS = 5
SHOWN_STRAGGLERS = 3
SHOWN_WAIT = 0.1  # of all waiting: ranks that caused less are no stragglers to speak of
SHOWN_PARTS = 3
LEAST_SYNC = 0.005  # of the idle time: places that cause less are not shown


def print_breakdown(run: RunBreakdown) -> None:
    out = console()
    workers = working(run)
    for process in workers:
        _print_process(out, process)
    others = len(run.processes) - len(workers)
    if others:
        out.print(
            Text(
                f"{others} more process{'es' if others > 1 else ''} (drivers and helpers) explain idle time above.",
                style="dim",
            )
        )
    if run.collectives:
        show(out, _collectives(run))
        for line in _stragglers(run):
            out.print(Text(line))
    print_problems(out, [("", p) for p in run.all_problems])


def _print_process(out: Console, p: ProcessBreakdown) -> None:
    title = Text(who(p), style="bold")
    title.append(
        f"  {clean(p.file, 60)} · {clean(p.device or 'device unknown', 40)} · steps from {clean(p.steps_from)}",
        style="dim",
    )
    out.print(title)
    steps = grid_of(
        "step, ms",
        "wall",
        "compute",
        "exposed comm",
        "exposed mem?",
        "idle",
        "idle %",
        "comm hidden?",
        "kernels?",
        "tokens?",
    )
    for step in p.steps[:SHOWN_STEPS]:
        steps.add(*_step_cells(step, on_device=p.device != "cpu"))
    show(out, steps)
    if len(p.steps) > SHOWN_STEPS:
        out.print(Text(f"... and {len(p.steps) - SHOWN_STEPS} more steps (--json has all)", style="dim"))
    out.print()
    for table in (_causes(p), _comm_causes(p), _regions(p), _syncs(p), _process_classes(p)):
        if table.rows:
            show(out, table)
            out.print()


def _step_cells(s: StepBreakdown, *, on_device: bool) -> list[str]:
    exposed_memory = ms(s.exposed_memory_ns) if on_device else "n/a"
    kernels = f"{s.kernels:,}" if on_device else "n/a"
    tokens = "n/a" if s.card.tokens is None else f"{s.card.tokens:,}"
    return [
        clean(s.name, 34), ms(s.wall_ns), ms(s.compute_ns), ms(s.exposed_comm_ns), exposed_memory,
        ms(s.idle_ns), share(s.idle_ns, s.wall_ns), share(s.overlapped_comm_ns, s.comm_ns), kernels, tokens,
    ]  # fmt: skip


def cause_label(c: Cause) -> str:
    process = "driver" if c.process == "driver" else "rank"
    return label(Row("idle", process, c.region, c.kind, 0, 0, 0, None))


def _causes(p: ProcessBreakdown) -> Grid:
    """Largest first, mean per step."""
    totals: dict[str, int] = {}
    fillers: dict[str, dict[str, int]] = {}
    for cause in (c for step in p.steps for c in step.causes):
        name = cause_label(cause)
        totals[name] = totals.get(name, 0) + cause.ns
        for filler, ns in cause.filled_by:
            mine = fillers.setdefault(name, {})
            mine[filler] = mine.get(filler, 0) + ns
    idle, steps = sum(totals.values()), max(1, len(p.steps))
    grid = grid_of("idle time of one step by cause, ms", "ms", "of idle")
    ranked = sorted(totals.items(), key=lambda t: -t[1])
    for name, ns in ranked[:SHOWN_CAUSES]:
        grid.add(f"{clean(name)}{_fillers(fillers.get(name, {}))}", ms(ns // steps), share(ns, idle))
    if len(ranked) > SHOWN_CAUSES:
        rest = sum(ns for _, ns in ranked[SHOWN_CAUSES:])
        grid.add(f"{len(ranked) - SHOWN_CAUSES} more", ms(rest // steps), share(rest, idle), style="dim")
    return grid


def _comm_causes(p: ProcessBreakdown) -> Grid:
    """Mean per step. Nothing where no collective was paired."""
    totals: dict[str, int] = {}
    for c in (c for step in p.steps for c in step.comm_causes):
        name = label(Row("exposed_comm", c.process, c.region, c.kind, 0, 0, 0, None)).partition(", ")[2]
        totals[name] = totals.get(name, 0) + c.ns
    exposed, steps = sum(totals.values()), max(1, len(p.steps))
    grid = grid_of("exposed communication of one step, ms", "ms", "of it")
    if all(c.kind == UNPAIRED for step in p.steps for c in step.comm_causes):
        return grid
    ranked = sorted(totals.items(), key=lambda t: -t[1])
    for name, ns in ranked[:SHOWN_CAUSES]:
        grid.add(clean(name), ms(ns // steps), share(ns, exposed))
    if rest := sum(ns for _, ns in ranked[SHOWN_CAUSES:]):
        grid.add(f"{len(ranked) - SHOWN_CAUSES} more", ms(rest // steps), share(rest, exposed), style="dim")
    return grid


def _regions(p: ProcessBreakdown) -> Grid:
    """Mean per step, the regions that cost most first."""
    steps, on_device = max(1, len(p.steps)), p.device != "cpu"
    grid = grid_of(
        "regions of one step, ms", "compute", "comm", "memory?", "idle", "launch-bound?", "sync?", "kernels?"
    )
    for r in p.regions[:SHOWN_REGIONS]:
        grid.add(
            clean(r.region or "no region", 44), ms(r.compute_ns // steps), ms(r.comm_ns // steps),
            ms(r.memory_ns // steps) if on_device else "n/a", ms(r.idle_ns // steps), ms(r.launch_bound_ns // steps),
            ms(r.sync_ns // steps) if on_device else "n/a", f"{r.kernels / steps:,.1f}" if on_device else "n/a",
        )  # fmt: skip
    return grid


def _syncs(p: ProcessBreakdown) -> Grid:
    """Mean per step, the places that cost most first."""
    idle, steps = sum(s.idle_ns for s in p.steps), max(1, len(p.steps))
    grid = grid_of("idle time of one step by waiting call, ms", "ms", "calls")
    for s in [s for s in p.synchronisations if s.idle_ns >= LEAST_SYNC * idle][:SHOWN_SYNCS]:
        place = ", ".join(clean(w, 44) for w in (s.operator, s.region, s.source) if w)
        grid.add(
            f"{clean(s.call, 40)}{f' in {place}' if place else ''}", ms(s.idle_ns // steps), f"{s.calls / steps:,.1f}"
        )
    return grid


def _fillers(fillers: dict[str, int]) -> str:
    top = sorted(fillers, key=lambda n: -fillers[n])[:2]
    return f" (in {', '.join(clean(n, 24) for n in top)})" if top else ""


def _process_classes(p: ProcessBreakdown) -> Grid:
    what = "operators" if p.device == "cpu" else "kernels"
    grid = grid_of(f"{what} of all steps", "count", "ms", "mean us")
    for k in p.kernel_classes[:SHOWN_CLASSES]:
        grid.add(
            clean(k.name), f"{k.count:,}", ms(k.total_ns), f"{k.total_ns / k.count / 1e3:,.1f}" if k.count else "n/a"
        )
    return grid


def _collectives(run: RunBreakdown) -> Grid:
    """Mean of the ranks; bandwidths over all collectives of a row."""
    grid = grid_of(
        "collectives, ms per rank",
        "ranks",
        "count",
        "size?",
        "waiting",
        "transfer",
        "median call?",
        "alg GB/s?",
        "bus GB/s",
    )
    for c in run.collectives[:SHOWN_CLASSES]:
        ranks = str(c.ranks) if c.recorded_ranks == c.ranks else f"{c.recorded_ranks} of {c.ranks}"
        grid.add(
            clean(f"{c.type}{f' {c.dtype}' if c.dtype else ''}, {c.group}", 52), ranks, f"{c.count:,}", _size(c.bytes),
            ms(c.wait_ns // c.recorded_ranks), ms(c.transfer_ns // c.recorded_ranks), ms(c.median_ns),
            _decimal(c.algorithm_gb_per_s), _decimal(c.bus_gb_per_s),
        )  # fmt: skip
    rest = run.collectives[SHOWN_CLASSES:]
    if rest:
        count, wait, transfer = (
            sum(c.count for c in rest),
            sum(c.wait_ns // c.recorded_ranks for c in rest),
            sum(c.transfer_ns // c.recorded_ranks for c in rest),
        )
        grid.add(f"{len(rest)} more", "", f"{count:,}", "", ms(wait), ms(transfer), "", "", "", style="dim")
    return grid


def _size(size: int | None) -> str:
    if size is None:
        return "n/a"
    unit = next((u for u in (2**30, 2**20, 2**10) if size >= u), 1)
    name = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB", 1: "B"}[unit]
    return f"{size / unit:,.1f} {name}" if unit > 1 else f"{size:,} B"


def _decimal(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.2f}"


def _stragglers(run: RunBreakdown) -> Iterator[str]:
    """One sentence for each rank that holds a good part of all waiting."""
    total = sum(s.waited_ns for s in run.stragglers)
    for s in run.stragglers[:SHOWN_STRAGGLERS]:
        if s.waited_ns < total * SHOWN_WAIT:
            return
        who = f"{s.role} {s.rank}"
        yield (
            f"{who} kept the others waiting: last in {s.last:,} of {s.collectives:,} collectives, {ms(s.waited_ns)} ms of the others' "
            f"{ms(total)} ms. Meanwhile ({ms(s.meanwhile_ns)} ms) it was {_meanwhile(s)}."
        )


def _meanwhile(s: Straggler) -> str:
    """Its parts by size, idle time by cause."""
    parts = [(s.compute_ns, "computing"), (s.exposed_comm_ns, "in other communication")]
    parts += [(s.exposed_memory_ns, "copying"), (s.not_recorded_ns, "outside its recorded steps")]
    parts += [(c.ns, f"idle: {clean(cause_label(c))}{_fillers(dict(c.filled_by))}") for c in s.causes]
    ranked = sorted((p for p in parts if p[0]), key=lambda p: -p[0])
    said = [f"{share(ns, s.meanwhile_ns)} {what}" for ns, what in ranked[:SHOWN_PARTS]]
    rest = sum(ns for ns, _ in ranked[SHOWN_PARTS:])
    return ", ".join(said + ([f"{share(rest, s.meanwhile_ns)} other"] if rest else []))
