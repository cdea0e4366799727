"""Results on a terminal: one sentence, one waterfall, one table.

In: finished results. Out: text on standard output (and a progress bar on standard error). Names from traces are data:
control characters are shown, never sent, and nothing in them is markup. Computes no figure of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from tracetools.diff_records import ClassDelta, Diff, Row, Side
from tracetools.match import working
from tracetools.model import Cause, Problem, ProcessBreakdown, Run, RunBreakdown, StepBreakdown, Straggler
from tracetools.render.grid import Column, Grid
from tracetools.verdict import label

PIPE_WIDTH = 120
BAR_WIDTH = 20
SHOWN_CAUSES = 8
SHOWN_STEPS = 12
SHOWN_CLASSES = 10
SHOWN_PROBLEMS = 12
SHOWN_STRAGGLERS = 3
SHOWN_WAIT = 0.1  # of all waiting: ranks that caused less are no stragglers to speak of
SHOWN_PARTS = 3
SMALL = 0.005  # parts below this share of the step are summed up in one line


def _console() -> Console:
    """As wide as the terminal; in a pipe as wide as a page of a log."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def _show(out: Console, grid: Grid) -> None:
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


def _grid(*titles: str) -> Grid:
    """A title that ends in ? is an optional column, one that begins with < is aligned left."""
    return Grid([Column(t.rstrip("?").lstrip("<"), optional=t.endswith("?"), left=t.startswith("<")) for t in titles])


# ---------------------------------------------------------------- diff


def print_diff(d: Diff) -> None:
    out = _console()
    style = {"slower": "bold red", "faster": "bold green"}.get(d.verdict, "bold")
    out.print(Text(d.sentence, style=style))
    out.print()
    for name, side in (("A", d.a), ("B", d.b)):
        out.print(Text(f"{name}  {_side(side)}", style="dim"))
    for c in d.comparability:
        if c.severity == "warning":
            out.print(Text(f"!  {c.what} differs: A {clean(c.a)}, B {clean(c.b)}", style="yellow"))
    out.print(Text(f"   {d.pairing}", style="dim"))
    out.print()
    _show(out, _waterfall(d))
    if d.kernel_classes:
        out.print()
        _show(out, _classes(d.kernel_classes, on_device=d.a.device != "cpu" or d.b.device != "cpu"))
    _print_problems(out, [(f"{side.upper()}: ", p) for side, p in d.problems])


def _side(side: Side) -> str:
    what = [clean(side.path, 70)]
    what += [side.stack] if side.stack else []
    what += [clean(side.device, 40)] if side.device else []
    what += [f"world size {side.world_size}"] if side.world_size else []
    known = [r for r in side.ranks if r is not None]
    if known:
        what.append(f"rank {', '.join(map(str, known[:4]))}{' ...' if len(known) > 4 else ''}")
    what.append(f"{len(side.steps)} step{'s' if len(side.steps) != 1 else ''}")
    if side.tokens_per_step is not None:
        what.append(f"{side.tokens_per_step:,} tokens per step and rank")
    return " · ".join(what)


def _waterfall(d: Diff) -> Grid:
    """A's step, the signed parts, B's step. Small parts are summed up; the columns sum exactly."""
    grid = _grid("one step, ms", "A", "B", "B - A", "95 % of B - A?", "<?")
    limit = SMALL * max(d.step.a, d.step.b)
    large = [r for r in d.waterfall if abs(r.delta_ns) >= limit or (r.part != "idle" and (r.a_ns or r.b_ns))]
    scale = max([abs(r.delta_ns) for r in d.waterfall] or [1]) or 1
    for row in large:
        interval = f"{signed_ms(row.interval[0])} to {signed_ms(row.interval[1])}" if row.interval else "n/a"
        grid.add(
            clean(_part(row), 52),
            ms(row.a_ns),
            ms(row.b_ns),
            signed_ms(row.delta_ns),
            interval,
            _bar(row.delta_ns, scale),
        )
    rest = [r for r in d.waterfall if r not in large]
    if rest:
        a, b, delta = (sum(column) for column in zip(*((r.a_ns, r.b_ns, r.delta_ns) for r in rest), strict=True))
        grid.add(
            f"{len(rest)} smaller parts of idle time",
            ms(a),
            ms(b),
            signed_ms(delta),
            "",
            _bar(delta, scale),
            style="dim",
        )
    interval = f"{signed_ms(d.step.interval[0])} to {signed_ms(d.step.interval[1])}" if d.step.interval else "n/a"
    grid.add("step", ms(d.step.a), ms(d.step.b), signed_ms(d.step.delta), interval, "", style="bold")
    if d.per_token:
        ratio = f"{d.per_token.ratio:.3f}x"
        grid.add("ns per token", f"{d.per_token.a:,.1f}", f"{d.per_token.b:,.1f}", ratio, "", "", style="dim")
    return grid


def _part(row: Row) -> str:
    return label(row) if row.part != "idle" else f"idle, {label(row)}"


def _bar(delta: int, scale: int) -> Text:
    cells = round(BAR_WIDTH * abs(delta) / scale)
    return Text(("+" if delta > 0 else "-") * cells, style="red" if delta > 0 else "green")


def _classes(classes: Sequence[ClassDelta], *, on_device: bool) -> Grid:
    what = "kernels of one step, ms" if on_device else "operators of one step, ms"
    grid = _grid(what, "A", "B", "B - A", "more of them", "each slower", "count A?", "count B?")
    for c in [c for c in classes if c.total_a_ns or c.total_b_ns][:SHOWN_CLASSES]:
        grid.add(
            clean(c.name),
            ms(c.total_a_ns),
            ms(c.total_b_ns),
            signed_ms(c.delta_ns),
            signed_ms(c.from_count_ns),
            signed_ms(c.from_duration_ns),
            f"{c.count_a:,.1f}",
            f"{c.count_b:,.1f}",
        )
    return grid


# ---------------------------------------------------------------- breakdown


def print_breakdown(run: RunBreakdown) -> None:
    out = _console()
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
        _show(out, _collectives(run))
        for line in _stragglers(run):
            out.print(Text(line))
    _print_problems(out, [("", p) for p in run.all_problems])


def _print_process(out: Console, p: ProcessBreakdown) -> None:
    title = Text(_who(p), style="bold")
    title.append(
        f"  {clean(p.file, 60)} · {clean(p.device or 'device unknown', 40)} · steps from {clean(p.steps_from)}",
        style="dim",
    )
    out.print(title)
    steps = _grid(
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
    _show(out, steps)
    if len(p.steps) > SHOWN_STEPS:
        out.print(Text(f"... and {len(p.steps) - SHOWN_STEPS} more steps (--json has all)", style="dim"))
    out.print()
    _show(out, _causes(p))
    out.print()
    _show(out, _process_classes(p))
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
    grid = _grid("idle time of one step by cause, ms", "ms", "of idle")
    ranked = sorted(totals.items(), key=lambda t: -t[1])
    for name, ns in ranked[:SHOWN_CAUSES]:
        grid.add(f"{clean(name)}{_fillers(fillers.get(name, {}))}", ms(ns // steps), share(ns, idle))
    if len(ranked) > SHOWN_CAUSES:
        rest = sum(ns for _, ns in ranked[SHOWN_CAUSES:])
        grid.add(f"{len(ranked) - SHOWN_CAUSES} more", ms(rest // steps), share(rest, idle), style="dim")
    return grid


def _fillers(fillers: dict[str, int]) -> str:
    top = sorted(fillers, key=lambda n: -fillers[n])[:2]
    return f" (in {', '.join(clean(n, 24) for n in top)})" if top else ""


def _process_classes(p: ProcessBreakdown) -> Grid:
    what = "operators" if p.device == "cpu" else "kernels"
    grid = _grid(f"{what} of all steps", "count", "ms", "mean us")
    for k in p.kernel_classes[:SHOWN_CLASSES]:
        grid.add(
            clean(k.name), f"{k.count:,}", ms(k.total_ns), f"{k.total_ns / k.count / 1e3:,.1f}" if k.count else "n/a"
        )
    return grid


def _who(p: ProcessBreakdown) -> str:
    return p.role if p.role == "driver" or p.rank is None else f"{p.role} {p.rank}"


def _collectives(run: RunBreakdown) -> Grid:
    """Mean of the ranks; bandwidths over all collectives of a row."""
    grid = _grid(
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


# ---------------------------------------------------------------- info


def print_info(run: Run, result: RunBreakdown) -> None:
    out = _console()
    head = f"{clean(run.path, 90)}: {len(run.processes)} process{'es' if len(run.processes) != 1 else ''}"
    out.print(Text(head + (f", recorded with profile {run.stack}" if run.stack else ""), style="bold"))
    if command := run.record.get("command"):
        out.print(Text(f"command  {clean(' '.join(map(str, command)), 100)}", style="dim"))
    grid = _grid(
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
            clean(p.file, 44), _who(p), clean(p.device or "n/a", 30), str(p.world_size or "n/a"), f"{len(process.trace.events):,}",
            str(len(process.trace.threads)), str(len(p.steps)), clean(p.steps_from, 34),
            share(p.coverage.linked_ns, linked), share(p.coverage.idle_explained_ns, idle),
        ]  # fmt: skip
        grid.add(*cells)
    _show(out, grid)
    if result.profiler:
        out.print(Text(f"profiler options: {', '.join(result.profiler)}", style="dim"))
    if all(p.device == "cpu" for p in result.processes):
        out.print(Text("No device events: the host's operators stand in for the device.", style="dim"))
    _print_problems(out, [("", p) for p in result.all_problems])


# ---------------------------------------------------------------- shared


def _print_problems(out: Console, problems: Sequence[tuple[str, Problem]]) -> None:
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
