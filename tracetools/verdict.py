"""What a comparison says in words: what the sides are, whether they can be compared, the verdict, the sentence.

In: finished figures. Out: short texts for people. Computes no time. Knows nothing of where the texts are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tracetools.conditions import DECISIVE
from tracetools.diff_records import Comparability, PerToken, Row, Side, StepDelta
from tracetools.match import RunStep, working
from tracetools.model import RunBreakdown

SAME = 0.01  # an interval within 1 % of the step on both sides of zero is no difference


def side(run: RunBreakdown, steps: Sequence[RunStep]) -> Side:
    processes = working(run)
    tokens = [s.tokens for s in steps]
    known = [t for t in tokens if t is not None]
    return Side(
        path=run.path,
        stack=run.stack,
        device=_common([p.device for p in processes]),
        world_size=next((p.world_size for p in processes if p.world_size), None),
        ranks=tuple(p.rank for p in processes),
        steps=tuple(s.name for s in steps),
        tokens_per_step=round(sum(known) / len(known)) if known and len(known) == len(tokens) else None,
    )


def _common(values: Sequence[str | None]) -> str | None:
    distinct = list(dict.fromkeys(v for v in values if v))
    return " and ".join(distinct) if distinct else None


def comparability(a: RunBreakdown, b: RunBreakdown, side_a: Side, side_b: Side) -> tuple[Comparability, ...]:
    """What differs between the sides besides what is measured."""
    checks: list[tuple[str, Callable[[RunBreakdown, Side], str | None], str]] = [
        ("device", lambda _, s: s.device, "warning"),
        ("world size", lambda _, s: None if s.world_size is None else str(s.world_size), "warning"),
        ("ranks compared", lambda _, s: _ranks(s.ranks), "warning"),
        ("steps", lambda _, s: str(len(s.steps)), "note"),
        (
            "tokens per step and rank",
            lambda _, s: None if s.tokens_per_step is None else str(s.tokens_per_step),
            "note",
        ),
        ("profiler options", lambda r, _: ", ".join(r.profiler) or "none", "warning"),
        ("steps found by", lambda r, _: ", ".join(dict.fromkeys(p.steps_from for p in working(r))), "note"),
        ("stack profile", lambda r, _: r.stack, "note"),
    ]
    found = []
    for what, value, severity in checks:
        x, y = value(a, side_a), value(b, side_b)
        if x != y:
            found.append(Comparability(what, x, y, severity))
    return (*found, *_conditions(a, b))


def _conditions(a: RunBreakdown, b: RunBreakdown) -> list[Comparability]:
    """What both runs' records speak of and differ in. Where a run has no record nothing is known, which is no difference."""
    if not (a.conditions and b.conditions):
        return []
    in_a, in_b = dict(a.conditions), dict(b.conditions)
    both = [what for what in (*in_a, *(w for w in in_b if w not in in_a)) if in_a.get(what) != in_b.get(what)]
    either = [w for w in both if w.startswith("environment") or (w in in_a and w in in_b)]
    return [
        Comparability(what, in_a.get(what), in_b.get(what), "warning" if what in DECISIVE else "note")
        for what in either
    ]


def _ranks(ranks: Sequence[int | None]) -> str | None:
    known = [r for r in ranks if r is not None]
    if not known:
        return None
    if len(known) > 2 and known == list(range(known[0], known[-1] + 1)):
        return f"{known[0]}-{known[-1]}"
    return ", ".join(map(str, known))


def verdict(step: StepDelta) -> str:
    if step.delta == 0:
        return "no difference"
    if step.interval is None:
        return "inconclusive"
    low, high = step.interval
    if low > 0:
        return "slower"
    if high < 0:
        return "faster"
    return "no difference" if max(-low, high) <= SAME * step.a else "inconclusive"


def sentence(verdict: str, step: StepDelta, rows: Sequence[Row], per_token: PerToken | None) -> str:
    change = f"{abs(step.delta) / 1e6:.2f} ms per step"
    ratio = f" ({step.ratio:.2f}x)" if step.ratio is not None else ""
    lengths = f"{step.a / 1e6:.2f} -> {step.b / 1e6:.2f} ms"
    if verdict in ("slower", "faster"):
        head = f"B is {verdict} by {change}{ratio}, {lengths}"
    elif verdict == "no difference":
        head = f"No difference: {lengths}{ratio}"
    elif step.interval is None:
        direction = "longer" if step.delta > 0 else "shorter"
        head = (
            f"B's step is {change} {direction}{ratio}, {lengths}, but a single step on a side says nothing about noise"
        )
    else:
        head = f"Inconclusive: {lengths}{ratio}, and the steps scatter more than they differ"
    with_step = [r for r in rows if r.delta_ns * step.delta > 0]
    biggest = sorted(with_step, key=lambda r: -abs(r.delta_ns))[:3]
    why = ", ".join(f"{label(r)} {r.delta_ns / 1e6:+.2f} ms" for r in biggest)
    tokens = f"; per token {per_token.ratio:.2f}x" if per_token else ""
    return f"{head}{tokens}{f': mostly {why}' if why and verdict != 'no difference' else ''}."


def label(row: Row) -> str:
    """How reports call a part: `compute`, `driver: data_processing`, `backward (launch latency)`."""
    if row.part == "exposed_comm" and row.kind in _COMMUNICATION:
        return f"exposed comm, {_waited_for(row)}"
    if row.part != "idle":
        return row.part.replace("_", " ").replace("comm", "communication")
    region = row.region or ("no region" if row.kind in ("host", "sync") else None)
    who = f"{row.process}: " if row.process == "driver" else ""
    kind = (row.kind or "").replace("_", " ")
    if region is None:
        return f"{who}{kind}"
    return f"{who}{region}" if row.kind == "host" else f"{who}{region} ({kind})"


_COMMUNICATION = {
    "transfer": "transfer",
    "unpaired": "not paired across ranks",
    "wait_compute": "a slower rank computes",
    "wait_comm": "a slower rank communicates",
    "wait_memory": "a slower rank copies",
    "wait": "a slower rank is idle",
}


def _waited_for(row: Row) -> str:
    if row.kind != "wait" or (row.region is None and row.process != "driver"):
        return _COMMUNICATION[row.kind or ""]
    who = "the driver" if row.process == "driver" else "a slower rank"
    return f"waiting for {who}: {row.region or 'no region'}"
