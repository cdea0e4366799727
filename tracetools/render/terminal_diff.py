"""A comparison on a terminal: one sentence, one waterfall, one table.

In: a finished `Diff`. Out: text on standard output. Computes no figure of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from tracetools.diff_records import ClassDelta, Diff, Row, Side
from tracetools.render.grid import Grid
from tracetools.render.terminal import clean, console, grid_of, ms, print_problems, show, signed_ms
from tracetools.verdict import label

BAR_WIDTH = 20
SHOWN_CLASSES = 10
SMALL = 0.005  # parts below this share of the step are summed up in one line


def print_diff(d: Diff) -> None:
    out = console()
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
    show(out, _waterfall(d))
    if d.kernel_classes:
        out.print()
        show(out, _classes(d.kernel_classes, on_device=d.a.device != "cpu" or d.b.device != "cpu"))
    print_problems(out, [(f"{side.upper()}: ", p) for side, p in d.problems])


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
    grid = grid_of("one step, ms", "A", "B", "B - A", "95 % of B - A?", "<?")
    limit = SMALL * max(d.step.a, d.step.b)
    large = [r for r in d.waterfall if abs(r.delta_ns) >= limit or (r.kind is None and (r.a_ns or r.b_ns))]
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
            f"{len(rest)} smaller parts",
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
    grid = grid_of(what, "A", "B", "B - A", "more of them", "each slower", "count A?", "count B?")
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
