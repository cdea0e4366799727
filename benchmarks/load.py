"""What reading a trace costs: ours, HTA's, and the least that any reader in Python must do.

In: trace files (by default those of a corpus that the project's requirements name). Out: on standard output, per file, CPU seconds
(user + system) and peak memory of
  ours     `tracetools.load_run`: columns of exact integers, names interned, faults counted
  hta      HTA's own loader of the same file, as its users call it
  decode   gunzip + a bare `msgspec.json.decode` of the whole document
each in a process of its own, the best of several, taken in turns. Imports are made before the clock starts and counted apart.
With --scale: built traces of growing size, and the cost per event of loading and of the whole analysis.

    python benchmarks/load.py [FILE...] [--repeat 3] [--scale]
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HTA_AT_LEAST = 15.0  # times our CPU time, on the first file
DECODE_AT_MOST = 2.5  # times the bare decode, ours, on the first file
DIFF_AT_MOST_S = 2.0  # CPU seconds of a whole `tracetools diff`, start-up included
FIRST = "hta__df_index_resolver*"
PAIR = ("hta__trace_diff_control*", "hta__trace_diff_test*")
MIB = 1024  # ru_maxrss is in KiB


# ---------------------------------------------------------------- what is measured, in a process of its own


def _ours(path: str) -> Callable[[], object]:
    from tracetools import load_run

    return lambda: load_run(path)


def _hta(path: str) -> Callable[[], object]:
    import logging

    from hta.trace_analysis import TraceAnalysis

    logging.getLogger("hta").setLevel(logging.ERROR)
    return lambda: TraceAnalysis(trace_files={0: path}, trace_dir=os.sep)


def _decode(path: str) -> Callable[[], object]:
    import msgspec

    opener = gzip.open if path.endswith(".gz") else open

    def read() -> object:
        with opener(path, "rb") as file:
            return msgspec.json.decode(file.read())

    return read


def _analyze(path: str) -> Callable[[], object]:
    from tracetools import analyze, load_run

    run = load_run(path)
    return lambda: analyze(run)


MEASURED = {"ours": _ours, "hta": _hta, "decode": _decode, "analyze": _analyze}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _peak_kib() -> int:
    """Of this process alone: ru_maxrss would start with what the parent's fork held."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1])


def child(what: str, path: str) -> None:
    work = MEASURED[what](path)
    imported, before = _cpu_s(), _peak_kib()
    kept = work()
    print(json.dumps({"cpu_s": _cpu_s() - imported, "import_s": imported, "peak_kib": _peak_kib() - before}))
    del kept


def measure(what: str, path: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", what, str(path)]
    found = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONWARNINGS": "ignore"}
    )
    values: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return values


def best(whats: list[str], path: Path, repeat: int) -> dict[str, dict[str, float]]:
    """The run with the least CPU time of each, taken in turns."""
    rounds = [{what: measure(what, path) for what in whats} for _ in range(repeat)]
    return {what: min((r[what] for r in rounds), key=lambda v: v["cpu_s"]) for what in whats}


# ---------------------------------------------------------------- the report


def corpus() -> Path | None:
    here = Path(__file__).resolve().parents[1]
    named = os.environ.get("TRACETOOLS_CORPUS")
    places = [Path(named)] if named else [here.parent / "shared"]
    return next((p / "traces" for p in places if (p / "traces").is_dir()), None)


def report(path: Path, repeat: int) -> dict[str, dict[str, float]]:
    found = best(["ours", "hta", "decode"], path, repeat)
    print(f"{path.name}  ({path.stat().st_size / 2**20:.1f} MiB on disk; best of {repeat})")
    for what, v in found.items():
        ratio = "" if what == "ours" else f"   {v['cpu_s'] / found['ours']['cpu_s']:6.2f} x ours"
        memory = f"{v['peak_kib'] / MIB:8.1f} MiB"
        print(f"  {what:<8}{v['cpu_s']:8.3f} s{memory} above its imports ({v['import_s']:.2f} s){ratio}")
    return found


def diff_cost(a: Path, b: Path, repeat: int) -> float:
    """CPU seconds of the command as a user runs it, start-up included."""
    costs = []
    for _ in range(repeat):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "tracetools", "diff", str(a), str(b)], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(costs)


def verdict(what: str, value: float, limit: float, *, at_least: bool) -> bool:
    holds = value >= limit if at_least else value <= limit
    print(f"{'holds' if holds else 'FAILS'}  {what}: {value:.2f} ({'at least' if at_least else 'at most'} {limit:g})")
    return holds


def requirements(traces: Path, repeat: int) -> bool:
    first = next(iter(sorted(traces.glob(FIRST))), None)
    pair = [next(iter(sorted(traces.glob(p))), None) for p in PAIR]
    if first is None or None in pair:
        print(f"{traces}: no {FIRST} or {' or '.join(PAIR)} in it.", file=sys.stderr)
        return False
    found = report(first, repeat)
    control, test = (p for p in pair if p is not None)
    report(control, repeat)
    ours = found["ours"]["cpu_s"]
    cost = diff_cost(control, test, repeat)
    checks = [
        verdict("HTA's load, times ours", found["hta"]["cpu_s"] / ours, HTA_AT_LEAST, at_least=True),
        verdict("ours, times gunzip + decode", ours / found["decode"]["cpu_s"], DECODE_AT_MOST, at_least=False),
        verdict("diff of the pair, CPU s with start-up", cost, DIFF_AT_MOST_S, at_least=False),
    ]
    return all(checks)


# ---------------------------------------------------------------- cost per event


def synthetic(events: int) -> Iterator[dict[str, Any]]:
    """Steps of a launch-bound loop: per iteration an operator, its launch, its kernel; now and then a wait and a region."""
    rng = random.Random(1)
    at, device, correlation, made, steps = 1000.0, 1000.0, 0, 0, 0
    per_step = max(events // 10, 100)
    while made < events:
        begin = at
        for i in range(per_step // 3):
            correlation += 1
            length = rng.randint(3, 12)
            yield {"ph": "X", "cat": "cpu_op", "name": f"aten::op{i % 40}", "pid": 1, "tid": 1, "ts": at, "dur": length,
                   "args": {"External id": correlation, "Input Dims": [[i % 7, 64]]}}  # fmt: skip
            yield {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": at + 1, "dur": 1,
                   "args": {"correlation": correlation}}  # fmt: skip
            device = max(device, at + 4.25)
            work = rng.randint(2, 14)
            yield {"ph": "X", "cat": "kernel", "name": f"kernel_{i % 60}", "pid": 0, "tid": 7, "ts": device, "dur": work,
                   "args": {"device": 0, "stream": 7, "correlation": correlation}}  # fmt: skip
            device += work
            at += length + rng.randint(0, 3)
            made += 3
        yield {
            "ph": "X",
            "cat": "user_annotation",
            "name": "forward_step",
            "pid": 1,
            "tid": 1,
            "ts": begin,
            "dur": (at - begin) / 2,
        }
        yield {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{steps}",
            "pid": 1,
            "tid": 1,
            "ts": begin,
            "dur": at - begin,
        }
        steps += 1


def scale(sizes: list[int]) -> None:
    print("   events     load ns/event  analyze ns/event   peak MiB")
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            path = Path(folder) / "trace.json"
            with path.open("w", encoding="utf-8") as out:
                out.write('{"traceEvents":[')
                out.writelines("," * bool(i) + json.dumps(e) for i, e in enumerate(synthetic(size)))
                out.write("]}")
            load, whole = measure("ours", path), measure("analyze", path)
            per_event = (1e9 * v["cpu_s"] / size for v in (load, whole))
            print("{:9,}  {:16,.0f}  {:16,.0f}  {:9,.0f}".format(size, *per_event, load["peak_kib"] / MIB), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU time and memory of reading traces.")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scale", action="store_true", help="cost per event of built traces instead")
    parser.add_argument("--sizes", type=int, nargs="*", default=[100_000, 1_000_000, 5_000_000])
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return 0
    if options.scale:
        scale(options.sizes)
        return 0
    if options.files:
        for path in options.files:
            report(path, options.repeat)
        return 0
    traces = corpus()
    if traces is None:
        print("no corpus: name files, or set TRACETOOLS_CORPUS to a folder with traces/.", file=sys.stderr)
        return 1
    return 0 if requirements(traces, options.repeat) else 1


if __name__ == "__main__":
    sys.exit(main())
