"""The accounting of one process, instant by instant: slow, obvious, and written from the rules, not from the product.

In: trace events as plain dictionaries (the shape of builders.py) whose times are small whole microseconds.
Out: `Account`: the steps' walls, the four parts, and who is charged with every idle microsecond.
Knows nothing of tracetools: each rule is one loop over everything, and is quoted above the loop that follows it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]
Thread = tuple[Any, Any]
Cause = tuple[str | None, str]  # (region, kind)

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
STEP = re.compile(r"^ProfilerStep#(\d+)$")
COMMUNICATION = re.compile("nccl")
COLLECTIVE = re.compile(r"^(c10d::|gloo:|nccl:)")
SYNCHRONISING = re.compile(r"^cuda(Device|Stream|Event)Synchronize$")
REGIONS = {  # what torch names by itself; every other annotation is a region under its own name
    r"^Optimizer\.step#": "optimizer",
    r"^Optimizer\.zero_grad#": "zero_grad",
    r"^enumerate\(DataLoader\)": "data_loading",
    r"^autograd::engine::evaluate_function": "backward",
    r"^forward_step$": "forward",
    r"^(nccl|gloo):": "collective",
    r"^c10d::": "collective",
}


@dataclass
class StepAccount:
    """One step, [start, end), in microseconds."""

    name: str
    start: int
    end: int
    parts: Counter[str] = field(default_factory=Counter)  # compute, comm (exposed), memory (exposed), idle
    comm: int = 0  # exposed or not
    causes: Counter[Cause] = field(default_factory=Counter)
    kernels: int = 0

    @property
    def wall(self) -> int:
        return self.end - self.start


@dataclass
class Account:
    steps: list[StepAccount]
    linked: int = 0  # device time, each event counted in full
    unlinked: int = 0


def account(events: list[Event]) -> Account:
    """The whole accounting of one process that has step markers."""
    return _Process(events).account()


def _end(e: Event) -> int:
    return int(e["ts"] + e["dur"])


def _runs(e: Event, at: int) -> bool:
    return bool(e["ts"] <= at < _end(e))


def _thread(e: Event) -> Thread:
    return (e["pid"], e["tid"])


def _innermost(events: Iterable[Event]) -> Event | None:
    """The last one of (earlier start first, longer first, file order): what was opened last is what runs."""
    last = None
    for e in events:
        if last is None or (e["ts"], -e["dur"]) >= (last["ts"], -last["dur"]):
            last = e
    return last


def region_of(e: Event) -> str | None:
    """The region an event opens, if it opens one. Step markers, plain operators and Python frames open none."""
    if e["cat"] not in ("user_annotation", "cpu_op") or STEP.match(e["name"]):
        return None
    for pattern, region in REGIONS.items():
        if re.search(pattern, e["name"]):
            return region
    return e["name"] if e["cat"] == "user_annotation" else None


class _Process:
    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.work = sorted((e for e in events if e["cat"] in DEVICE), key=lambda e: (e["ts"], -e["dur"]))
        self.marks = sorted((e for e in events if e["cat"] == "user_annotation" and STEP.match(e["name"])),
                            key=lambda e: e["ts"])  # fmt: skip
        self.launch_of = [self.launch(w) for w in self.work]

    # A kernel's launch: one launch may own many kernels; correlation 0 means none; ids can repeat, so pair in time order:
    # the first call with the first kernel and so on where there are as many, else a kernel with the last call before it.
    def launch(self, work: Event) -> Event | None:
        number = work["args"]["correlation"]
        calls = [e for e in self.events if e["cat"] == "cuda_runtime" and e["args"].get("correlation") == number]
        if number == 0 or not calls:
            return None
        calls.sort(key=lambda e: e["ts"])
        owned = [w for w in self.work if w["args"]["correlation"] == number]
        if len(owned) == len(calls):
            return calls[next(i for i, w in enumerate(owned) if w is work)]
        before = [c for c in calls if c["ts"] <= work["ts"]]
        return before[-1] if before else calls[0]

    # Work without a launch that runs before the first linked work of its stream was launched before the recording.
    def launched_at(self, index: int) -> int | None:
        work, call = self.work[index], self.launch_of[index]
        if call is not None:
            return int(call["ts"])
        stream = work["args"]["stream"]
        linked = [w["ts"] for w, c in zip(self.work, self.launch_of, strict=True)
                  if c is not None and w["args"]["stream"] == stream]  # fmt: skip
        return -1 if linked and work["ts"] < min(linked) else None

    # The boundary is max(CPU start of the step, end of the last device work launched before it).
    def boundary(self, at: int) -> int:
        edge = at
        for i, w in enumerate(self.work):
            launched = self.launched_at(i)
            if launched is not None and launched < at:
                edge = max(edge, _end(w))
        return edge

    def account(self) -> Account:
        # The last step ends at the later of its CPU end and its last kernel.
        edges = [self.boundary(m["ts"]) for m in self.marks] + [self.boundary(_end(self.marks[-1]))]
        steps = [StepAccount(m["name"], a, b) for m, a, b in zip(self.marks, edges, edges[1:], strict=False)]
        for step in steps:
            for at in range(step.start, step.end):
                part = self.part(at)
                step.parts[part] += 1
                step.comm += self.communicates(at)
                if part == "idle":
                    step.causes[self.cause(at)] += 1
        self.count_kernels(steps)
        return Account(
            steps,
            linked=sum(w["dur"] for w, c in zip(self.work, self.launch_of, strict=True) if c is not None),
            unlinked=sum(w["dur"] for w, c in zip(self.work, self.launch_of, strict=True) if c is None),
        )

    # A kernel belongs to the step whose CPU interval holds its launch call (a step runs to the next marker's start);
    # one without a launch belongs to the step during which it starts.
    def count_kernels(self, steps: list[StepAccount]) -> None:
        until = [m["ts"] for m in self.marks[1:]] + [_end(self.marks[-1])]
        for w, call in zip(self.work, self.launch_of, strict=True):
            for step, mark, end in zip(steps, self.marks, until, strict=True):
                by_launch = call is not None and mark["ts"] <= call["ts"] < end
                by_time = call is None and step.start <= w["ts"] < step.end
                step.kernels += w["cat"] == "kernel" and (by_launch or by_time)

    # ------------------------------------------------------------------ the partition
    # compute | exposed communication | exposed memory | idle, priority in that order, over the union of all streams.
    def part(self, at: int) -> str:
        if not self.work:
            return self.host_part(at)
        running = [w for w in self.work if _runs(w, at)]
        if any(w["cat"] == "kernel" and not COMMUNICATION.search(w["name"]) for w in running):
            return "compute"
        if any(w["cat"] == "kernel" for w in running):
            return "comm"
        return "memory" if running else "idle"

    def communicates(self, at: int) -> bool:
        if not self.work:
            return self.host_communicates(at)
        return any(w["cat"] == "kernel" and COMMUNICATION.search(w["name"]) for w in self.work if _runs(w, at))

    # CPU only: compute when the innermost operator of a thread is no collective, communication when a collective runs
    # (c10d::* operators, gloo:* annotations), idle otherwise. What runs inside such an annotation on its own thread, as on
    # gloo's threads, is part of the collective.
    def host_part(self, at: int) -> str:
        threads = [t for t in self.operator_threads() if not self.annotated_collectives(at, t)]
        running = [self.operator(thread, at) for thread in threads]
        if any(name is not None and not COLLECTIVE.search(name) for name in running):
            return "compute"
        return "comm" if self.host_communicates(at) else "idle"

    def host_communicates(self, at: int) -> bool:
        calls = [self.operator(thread, at) for thread in self.operator_threads()]
        return bool(self.annotated_collectives(at)) or any(
            name is not None and COLLECTIVE.search(name) for name in calls
        )

    def operator(self, thread: Thread, at: int) -> str | None:
        inner = _innermost(e for e in self.events if e["cat"] == "cpu_op" and _thread(e) == thread and _runs(e, at))
        return None if inner is None else str(inner["name"])

    def operator_threads(self) -> list[Thread]:
        return sorted({_thread(e) for e in self.events if e["cat"] == "cpu_op"})

    def annotated_collectives(self, at: int, thread: Thread | None = None) -> list[Event]:
        return [e for e in self.events if e["cat"] == "user_annotation" and COLLECTIVE.search(e["name"])
                and _runs(e, at) and thread in (None, _thread(e))]  # fmt: skip

    # ------------------------------------------------------------------ the causes
    def cause(self, at: int) -> Cause:
        """Who is charged with the idle microsecond `at`."""
        # A gap ends with kernel K, launched by call L on thread T. (Several begin there: one with a launch speaks.)
        closing = self.closing(at)
        call = None if closing is None else self.launch_of[closing]
        # What follows a launch whose device events were never recorded: the device may have been busy.
        if self.follows_lost_launch(at):
            return "unrecorded_launch", "unknown"
        # Profiler overhead events are `profiler_overhead`, not idle blamed on the user's code.
        if any(e["cat"] == "overhead" and _runs(e, at) for e in self.events):
            return None, "profiler_overhead"
        if closing is not None and call is None:  # nobody knows when and where K was launched
            return None, "unknown"
        marker_thread = _thread(self.marks[0])
        thread = marker_thread if call is None else _thread(call)
        # Up to the start of L: host time, or `sync` inside a synchronising call. From L to K's start: launch latency,
        # or waiting on another stream where the trace shows it.
        if closing is None or call is None or at < call["ts"]:
            spoken_for = self.region(thread, at) is None
            waits = self.synchronises(thread, at) or (spoken_for and self.synchronises(marker_thread, at))
            kind = "sync" if waits else "host"
        else:
            kind = "dependency" if self.waits(self.work[closing]["args"]["stream"], at) else "launch_latency"
        # The innermost region active on T, after L the one in which T called it; where T has none, the thread that carries
        # the step's marker speaks for it.
        asked = at if closing is None or call is None or at < call["ts"] else call["ts"]
        region = self.region(thread, asked) or self.region(marker_thread, asked)
        if region is None and self.between_steps(at):
            region = "between_steps"
        return region, kind

    def closing(self, at: int) -> int | None:
        """Index of the work that ends the gap that holds `at`."""
        later = [i for i, w in enumerate(self.work) if w["ts"] > at and w["dur"] > 0]
        together = [i for i in later if self.work[i]["ts"] == self.work[later[0]]["ts"]]
        together.sort(key=lambda i: self.launch_of[i] is None)
        return together[0] if together else None

    # A launch whose work was lost, later than every launch whose work had begun when the gap opened: its work ran in the gap,
    # for all that is known. (An earlier one had run by then.)
    def follows_lost_launch(self, at: int) -> bool:
        owned = {w["args"]["correlation"] for w in self.work}
        lost = [e["ts"] for e in self.events if e["cat"] == "cuda_runtime" and "Launch" in e["name"]
                and e["args"].get("correlation") and e["args"]["correlation"] not in owned]  # fmt: skip
        begun = [call["ts"] for w, call in zip(self.work, self.launch_of, strict=True) if call and w["ts"] <= at]
        return any(max(begun, default=-1) < ts <= at for ts in lost)

    def waits(self, stream: int, at: int) -> bool:
        return any(e["cat"] == "cuda_sync" and e["name"] == "Stream Wait Event" and e["args"]["stream"] == stream
                   and _runs(e, at) for e in self.events)  # fmt: skip

    def synchronises(self, thread: Thread, at: int) -> bool:
        return any(SYNCHRONISING.match(e["name"]) for e in self.events if _thread(e) == thread and _runs(e, at))

    def region(self, thread: Thread, at: int) -> str | None:
        inner = _innermost(e for e in self.events if _thread(e) == thread and _runs(e, at) and region_of(e) is not None)
        return None if inner is None else region_of(inner)

    # What lies between two marker ranges is inside the step, as region `between_steps` where nothing better names it.
    def between_steps(self, at: int) -> bool:
        inside = any(_runs(m, at) for m in self.marks)
        return not inside and self.marks[0]["ts"] <= at < _end(self.marks[-1])
