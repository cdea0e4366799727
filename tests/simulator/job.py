"""A whole job: ranks side by side, or a driver with one actor per rank.

In: a `Program`. Out: `Job`: the length of its steps, and its traces where a folder is given. `worth` runs the program twice.
Knows nothing of the analysis.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from simulator.engine import Engine, Signal
from simulator.engine import Work as Running
from simulator.host import Stop, Thread
from simulator.program import US, Program
from simulator.rank import Group, Rank
from simulator.record import Record

DRIVER_PID = 900


@dataclass(frozen=True, slots=True)
class Job:
    """`step_ns`: from the start of the first step to the end of the last and of its device work, per step, mean over ranks."""

    step_ns: Fraction


def run(program: Program, folder: Path | None = None) -> Job:
    """Simulate it; write its traces (and, but for stack `torch`, its run.json) into `folder`, which must exist."""
    return _Ray(program).run(folder) if program.stack == "ray" else _Plain(program).run(folder)


def worth(program: Program, cause: str) -> Fraction:
    """ns per step that the program saves without this cause."""
    return run(program).step_ns - run(program.having(cause, 0)).step_ns


class _Plain:
    """Every rank has a loop of its own."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.engine = Engine()
        group = Group(self.engine, program.ranks)
        self.ranks = [Rank(self.engine, program, r, group) for r in range(program.ranks)]
        self.spans = [[0, 0] for _ in self.ranks]

    def run(self, folder: Path | None) -> Job:
        skew = self.program.skew_ns or (0,) * len(self.ranks)
        for rank in self.ranks:
            self.engine.spawn(self._loop(rank), skew[rank.number])
        self.engine.run()
        if folder is not None:
            _write(self.program, folder, [("rank", r.number, r.record) for r in self.ranks])
        return _job(self.program, self.ranks, self.spans)

    def _loop(self, rank: Rank) -> Running:
        p, main = self.program, rank.main
        self.spans[rank.number][0] = self.engine.now
        for step in range(p.steps):
            with main.span(f"{'ProfilerStep' if p.stack == 'torch' else 'tracetools.step'}#{step}"):
                with main.span(rank.name("data_loading")):
                    yield from rank.spend(main, "data_loading")
                yield from rank.train(step)
                if p.logs == "all" or rank.number == 0:
                    with main.span("logging"):
                        yield from rank.spend(main, "logging")
            self.spans[rank.number][1] = self.engine.now


class _Ray:
    """A driver without a device; an actor per rank, which trains when it is called."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.engine = Engine()
        group = Group(self.engine, program.ranks)
        self.ranks = [Rank(self.engine, program, r, group) for r in range(program.ranks)]
        self.record = Record(DRIVER_PID, 0, {})
        every = program.gc_every_ns
        stop = Stop("garbage_collection", every, program.amount("driver_gc"), every // 3)
        self.thread = Thread(self.engine, self.record, DRIVER_PID, stops=(stop,))
        self.span = [0, 0]

    def run(self, folder: Path | None) -> Job:
        self.engine.spawn(self._drive())
        self.engine.run()
        if folder is not None:
            policies = [("policy", r.number, r.record) for r in self.ranks]
            _write(self.program, folder, [("driver", None, self.record), *policies])
        return _job(self.program, self.ranks, [self.span] * len(self.ranks))

    def _drive(self) -> Running:
        p, thread = self.program, self.thread
        for step in range(p.steps):
            with thread.span(f"tracetools.step#{step}"):
                with thread.span("data_processing"):
                    yield from thread.spend(p.amount("data_processing"), p.natural.get("data_processing", 0))
                with thread.span("sharding"):
                    yield from thread.spend(30 * US)
                with thread.span("ray_submit"):
                    results = []
                    for rank in self.ranks:
                        share = p.natural.get("ray_submit", 0) // p.ranks
                        yield from thread.spend(p.amount("ray_submit") // p.ranks, share)
                        results.append(self._call(rank, step))
                with thread.span("ray_wait"):
                    yield from results
                with thread.span("metrics"):
                    yield from thread.spend(20 * US)
                with thread.span("logging"):
                    yield from thread.spend(p.amount("logging"), p.natural.get("logging", 0))
            self.span[1] = self.engine.now

    def _call(self, rank: Rank, step: int) -> Signal:
        """Returns what fires when the driver has the result."""
        p, received = self.program, Signal()
        delay = p.amount("ray_transport") if p.transport == "all" or (p.transport == "one" and rank.is_last) else 0
        self.engine.spawn(self._method(rank, step, received), p.call_ns + delay)
        return received

    def _method(self, rank: Rank, step: int, received: Signal) -> Running:
        p = self.program
        with rank.main.span("actor/train"):
            yield from rank.train(step)
        delay = p.amount("ray_transport") if p.transport == "back" else 0
        self.engine.fire_after(received, p.result_ns + delay)


def _job(program: Program, ranks: Sequence[Rank], spans: Sequence[Sequence[int]]) -> Job:
    ends = [
        max(end, rank.compute.last.at or 0, rank.comm.last.at or 0) for rank, (_, end) in zip(ranks, spans, strict=True)
    ]
    total = sum(end - start for end, (start, _) in zip(ends, spans, strict=True))
    return Job(Fraction(total, program.steps * len(ranks)))


def _write(program: Program, folder: Path, processes: Sequence[tuple[str, int | None, Record]]) -> None:
    entries: list[dict[str, Any]] = []
    for role, number, record in processes:
        file = f"{role}-{number}.json" if number is not None else f"{role}.json"
        record.write(folder / file)
        entries.append(
            {
                "file": file,
                "role": role,
                "rank": number,
                "world_size": program.ranks,
                "host": "node",
                "pid": record.pid,
                "steps": [],
            }
        )
    if program.stack != "torch":
        profile = "ray" if program.stack == "ray" else "megatron_lm"
        run_json = {"schema": "tracetools.run/1", "profile": profile, "processes": entries, "missing": []}
        (folder / "run.json").write_text(json.dumps(run_json))
