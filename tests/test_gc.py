"""Collections of Python's garbage are ranges while a job is recorded, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import record, run_json

from tracetools.analysis import analyze
from tracetools.load import load_run

pytest.importorskip("torch")

BODY = """
    import gc
    gc.disable()  # but for those asked for
    for i in range(6):
        with tracetools.step():
            gc.collect(0)
            cycles = [[] for _ in range(20000)]
            for cycle in cycles:
                cycle.append(cycle)
            del cycles, cycle
            gc.collect()
            forward_backward()
    assert not [c for c in gc.callbacks if c.__module__ == "tracetools_gc"], gc.callbacks
"""


def test_collections_are_named_in_the_steps_that_are_recorded(tmp_path: Path) -> None:
    found = record(tmp_path, BODY, 2, 4)

    assert found.exit_code == 0
    run = load_run(found.folder)
    trace = run.processes[0].trace
    assert [trace.names[i] for i in trace.events.name].count(
        "garbage_collection"
    ) == 2  # not of generation 0, not in other steps
    for step in analyze(run).processes[0].steps:
        assert sum(c.ns for c in step.causes if c.region == "garbage_collection") > 0


def test_the_priority_of_a_process_is_told(tmp_path: Path) -> None:
    found = record(tmp_path, "import os; os.nice(3); train(5)", 2, 4)

    assert run_json(found.folder)["processes"][0]["nice"] == 3
