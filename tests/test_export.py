"""The Perfetto export, judged by Perfetto's own trace processor."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import HOST, MAIN, Event, document, kernel, launch, op, region, step, write, x
from hypothesis import given
from hypothesis import strategies as st
from perfetto_tp import TraceProcessor, assert_loads_clean, thread_slices

from tracetools.analysis import export_run
from tracetools.errors import TracetoolsError
from tracetools.load import load_run
from tracetools.model import Run
from tracetools.render.jsontext import arguments, finite_numbers, string
from tracetools.render.lanes import assign, surrounding
from tracetools.render.perfetto import Tally

ORIGINAL = "where coalesce(category, '') != 'tracetools'"  # slices that are not ours


def export(source: Path, out: Path) -> tuple[Tally, Run]:
    """`tracetools export SOURCE -o OUT`."""
    run = load_run(source)
    tally = export_run(run, out)
    return tally, run


def exported(tmp_path: Path, events: Sequence[Event], **options: Any) -> tuple[TraceProcessor, Tally]:
    """Loaded, and clean, and holding exactly what was written."""
    tally, _ = export(write(tmp_path / "t.json", events, **options), tmp_path / "out.json.gz")
    return loaded(tmp_path / "out.json.gz", tally), tally


def loaded(path: Path, tally: Tally) -> TraceProcessor:
    slices = tally.slices + tally.instants
    return assert_loads_clean(path, slices=slices, flows=tally.flows, counters=tally.counters)


def rows(found: TraceProcessor, *names: str) -> list[tuple[str, str, int, int]]:
    return [s for s in thread_slices(found) if s[0] in names]


def arguments_of(found: TraceProcessor, name: str, *, ours: bool = False) -> dict[str, str]:
    """The arguments of the one slice of that name."""
    sql = "select key, display_value from args join slice using (arg_set_id) where key like 'args.%' and name = "
    which = f" and coalesce(category, '') {'=' if ours else '!='} 'tracetools'"
    return {str(key)[len("args.") :]: str(value) for key, value in found.query(f"{sql}'{name}'{which}")}


def written(tmp_path: Path) -> list[dict[str, Any]]:
    """The events of the file, through a parser that accepts nothing but JSON."""
    text = gzip.decompress((tmp_path / "out.json.gz").read_bytes())
    found: list[dict[str, Any]] = msgspec.json.decode(text)["traceEvents"]
    return found


def test_kernels_that_overlap_on_one_stream_all_show(tmp_path: Path) -> None:
    """0-100 and 50-110 overlap in part; 50-60 lies inside the first: two lanes, nothing clipped."""
    found, _ = exported(tmp_path, [kernel("a", 0, 100), kernel("b", 50, 60), kernel("c", 50, 10)])

    assert rows(found, "stream 7", "stream 7 (overlap 1)") == [
        ("stream 7", "a", 0, 100_000),
        ("stream 7", "c", 50_000, 10_000),
        ("stream 7 (overlap 1)", "b", 50_000, 60_000),
    ]


def test_a_child_that_bleeds_over_its_parent_by_a_nanosecond_keeps_its_length(tmp_path: Path) -> None:
    found, _ = exported(tmp_path, [op("parent", 0, 10), op("child", 5, 5.001), op("next", 10.001, 1)])

    assert rows(found, "thread 100", "thread 100 (overlap 1)") == [
        ("thread 100", "parent", 0, 10_000),
        ("thread 100", "next", 10_001, 1_000),
        ("thread 100 (overlap 1)", "child", 5_000, 5_001),
    ]


def test_equal_times_nest_by_length_and_then_by_place_in_the_file(tmp_path: Path) -> None:
    events = [op("child", 0, 5), op("parent", 0, 9), op("twin 1", 20, 3), op("twin 2", 20, 3), op("empty", 23, 0)]
    found, _ = exported(tmp_path, events)

    depths = found.query(f"select name, depth, ts, dur from slice {ORIGINAL} order by ts, depth")
    assert depths == [
        ("parent", 0, 0, 9_000),
        ("child", 1, 0, 5_000),
        ("twin 1", 0, 20_000, 3_000),
        ("twin 2", 1, 20_000, 3_000),
        ("empty", 0, 23_000, 0),
    ]


def test_times_are_exact_nanoseconds_from_the_runs_first_event(tmp_path: Path) -> None:
    """Wall-clock microseconds with fractions are beyond a double: 1.7e15 us and 1 ns, 500 ns later 333 ns."""
    events = [op("a", 0, 0), op("b", 0, 0)]
    events[0] |= {"ts": 1, "dur": 2}
    events[1] |= {"ts": 3, "dur": 4}
    text = (
        json.dumps(document(events)).replace('"ts": 1,', '"ts": 1700000000000000.001,').replace('"dur": 2', '"dur": 9')
    )
    text = text.replace('"ts": 3,', '"ts": 1700000000000000.501,').replace('"dur": 4', '"dur": 0.333')
    (tmp_path / "t.json").write_text(text)
    tally, _ = export(tmp_path / "t.json", tmp_path / "out.json.gz")

    found = loaded(tmp_path / "out.json.gz", tally)
    assert found.query(f"select name, ts, dur from slice {ORIGINAL} order by ts") == [("a", 0, 9_000), ("b", 500, 333)]


def test_two_ranks_with_the_same_numbers_stay_apart(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    flow = [{"ph": "s", "id": 7, "name": "ac2g", "cat": "ac2g", "pid": HOST, "tid": MAIN, "ts": 1}]
    flow += [{"ph": "f", "id": 7, "name": "ac2g", "cat": "ac2g", "pid": 0, "tid": 7, "ts": 10, "bp": "e"}]
    for rank in (1, 0):
        events = [launch(1, 7), kernel(f"k{rank}", 10, 5 + rank, 7), *flow]
        write(folder / f"r{rank}.json", events, rank=rank, world=2, baseTimeNanoseconds=10**18)
    tally, _ = export(folder, tmp_path / "out.json.gz")

    found = loaded(tmp_path / "out.json.gz", tally)
    arrows = found.query(
        "select a.name, b.name, b.dur from flow join slice a on slice_out = a.id join slice b on slice_in = b.id "
        "order by b.name"
    )
    assert arrows == [("cudaLaunchKernel", "k0", 5_000), ("cudaLaunchKernel", "k1", 6_000)]
    assert tally.flows == 2
    assert [name for (name,) in found.query("select name from process where pid > 0 order by pid")] == [
        "rank 0: steps, gaps, regions",
        "rank 0: pid 0",  # the device, as the file calls it
        "rank 0: pid 1000",
        "rank 1: steps, gaps, regions",
        "rank 1: pid 0",
        "rank 1: pid 1000",
    ]
    assert len({e["id"] for e in written(tmp_path) if e["ph"] == "s"}) == 2


def test_numbers_of_rows_are_unique_and_never_0_whatever_the_file_says(tmp_path: Path) -> None:
    """tid 0 would become the pid, -1 and 2^32 would become 0, text would become a number that changes."""
    odd: list[Any] = [0, -1, 2**32, 2**64, "", "10.0.0.1", "stream 7", 3.5, None, True]
    events = [
        x(f"e{i}", "cpu_op", i, 1, pid=pid, tid=tid) for i, (pid, tid) in enumerate(zip(odd, odd[::-1], strict=True))
    ]
    found, _ = exported(tmp_path, events)

    ids = {(e["pid"], e["tid"]) for e in written(tmp_path) if e["ph"] == "X"}
    flat = [pid for pid, _ in ids] + [tid for _, tid in ids]
    assert all(isinstance(n, int) and 0 < n < 2**32 for n in flat)
    # the analysis has a process of its own with the row of the step; each of the ten has its own process and row
    assert len({tid for _, tid in ids} | {pid for pid, _ in ids}) == len(ids) + len({pid for pid, _ in ids})
    names = {str(n) for (n,) in found.query("select name from thread where tid > 0")}
    assert {"thread 0", "-1", "10.0.0.1", "stream 7", f"thread {2**64}"} <= names


def test_rows_of_the_profiler_itself_have_a_title(tmp_path: Path) -> None:
    """Kineto's pid of these is a word, or nothing."""
    found, _ = exported(
        tmp_path, [op("o", 0, 9), x("s", "Trace", 0, 9, pid="Spans", tid=1), x("w", "Trace", 0, 9, pid="")]
    )

    names = {name for (name,) in found.query("select name from process where pid > 0")}
    assert {"rank 0: Spans", "rank 0: profiler", "rank 0: pid 1000"} <= names


def test_original_names_of_processes_and_threads_are_kept(tmp_path: Path) -> None:
    names = [
        {"ph": "M", "name": "process_name", "pid": HOST, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": HOST, "tid": 0, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "thread_name", "pid": HOST, "tid": MAIN, "args": {"name": "thread 100 (python)"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7 "}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
    ]
    found, _ = exported(tmp_path, [*names, op("o", 0, 9), kernel("k", 1, 2)])

    threads = found.query(
        "select process.name, thread.name from thread join process using (upid) where thread.name is not null order by tid"
    )
    assert threads[-2:] == [
        ("rank 0: [GPU 0] pid 0", "stream 7"),
        ("rank 0: python [CPU] pid 1000", "thread 100 (python)"),
    ]


def test_steps_causes_and_regions_come_first(tmp_path: Path) -> None:
    """One step of 100 us; its kernel runs 40-90, launched at 30 in a region that began at 10.

    Idle: 0-10 host without region, 10-30 the region, 30-40 launch latency, 90-100 host again.
    """
    events = [step(3, 0, 100), region("data_loading", 10, 20), launch(30, 1), kernel("k", 40, 50, 1)]
    found, tally = exported(tmp_path, events)

    assert rows(found, "rank 0 steps", "rank 0 idle: causes", "rank 0 regions thread 100") == [
        ("rank 0 idle: causes", "host", 0, 10_000),
        ("rank 0 idle: causes", "data_loading", 10_000, 20_000),
        ("rank 0 idle: causes", "launch_latency", 30_000, 10_000),
        ("rank 0 idle: causes", "host", 90_000, 10_000),
        ("rank 0 regions thread 100", "data_loading", 10_000, 20_000),
        ("rank 0 steps", "ProfilerStep#3", 0, 100_000),
    ]
    assert tally.slices == 4 + 6
    assert arguments_of(found, "ProfilerStep#3", ours=True) == {
        "compute_ns": "50000",
        "exposed_comm_ns": "0",
        "exposed_memory_ns": "0",
        "idle_ns": "50000",
    }
    order = [e["args"]["name"] for e in written(tmp_path) if e["ph"] == "M" and e["name"] == "thread_name"]
    assert order == ["rank 0 steps", "rank 0 idle: causes", "rank 0 regions thread 100", "stream 7", "thread 100"]


def test_arguments_are_kept_and_what_json_or_perfetto_cannot_hold_is_made_readable(tmp_path: Path) -> None:
    args = (
        '{ "f" : 0.10, "id":98765432109876543210987,"max":9223372036854775807,"inf":Infinity,"e":1e400,"path":"C:\\\\"}'
    )
    event = '{"ph":"X","name":"a","cat":"cpu_op","pid":1,"tid":2,"ts":0,"dur":1,"args":' + args + "}"
    (tmp_path / "t.json").write_text('{"traceName":"D:\\\\","traceEvents":[' + event + "]}")
    tally, _ = export(tmp_path / "t.json", tmp_path / "out.json.gz")

    found = loaded(tmp_path / "out.json.gz", tally)
    assert arguments_of(found, "a") == {
        "f": "0.1",
        "id": "98765432109876543210987",
        "max": "9223372036854775807",
        "e": "1e400",
        "path": "C:\\u005c",  # Perfetto shows the escape
    }
    text = gzip.decompress((tmp_path / "out.json.gz").read_bytes())
    assert b'"args":{ "f" : 0.10, ' in text
    assert msgspec.json.decode(text)["metadata"]["files"]["t.json"]["traceName"] == "D:\\"


NAMES = ["tab\tnewline\nbell\x07", 'quote " backslash \\ end', "é 汉 😀", "", "a\u2028b", "void k<int>(T*)[8]"]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_arrives(tmp_path: Path, name: str) -> None:
    found, _ = exported(tmp_path, [x(name, "kernel", 0, 1, pid=0, tid=7)])

    (shown,) = found.query(f"select name from slice {ORIGINAL}")[0]
    # Perfetto shows control characters in their escaped form, and a name for none
    escaped = json.dumps(name, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    assert shown == (escaped or "[No name]")


def test_flows_are_kept_only_where_both_ends_lie_in_slices(tmp_path: Path) -> None:
    def flow(ph: str, number: int, ts: float, tid: int) -> Event:
        return {"ph": ph, "id": number, "name": "f", "cat": "ac2g", "pid": HOST, "tid": tid, "ts": ts, "bp": "e"}

    events = [op("outer", 0, 50), op("caller", 10, 10), op("one", 20, 10, tid=7), op("two", 35, 10, tid=7)]
    events += [flow("s", 1, 10, MAIN), flow("f", 1, 20, 7), flow("f", 1, 35, 7)]  # one start, two ends: both kept
    events += [flow("f", 2, 36, 7)]  # no start
    events += [flow("s", 3, 11, MAIN)]  # no end
    events += [flow("s", 4, 60, MAIN), flow("f", 4, 36, 7)]  # starts outside any slice
    events += [flow("s", 5, 40, MAIN), flow("f", 5, 21, 7)]  # ends before it starts
    events += [flow("f", 6, 20, 7), flow("s", 6, 20, MAIN)]  # at one instant, the end first in the file: kept
    found, tally = exported(tmp_path, events)

    arrows = found.query(
        "select a.name, b.name from flow join slice a on slice_out = a.id join slice b on slice_in = b.id"
    )
    assert Counter(arrows) == {("caller", "one"): 2, ("caller", "two"): 1}
    assert tally.left_out == {
        "flow points outside any slice": 1,
        "flow ends without a start before them": 3,  # of 2, 4 and 5
        "flow starts without an end after them": 2,  # of 3 and 5
    }


def test_an_arrow_follows_its_slice_to_the_lane_it_lies_on(tmp_path: Path) -> None:
    flow: Event = {"id": 1, "name": "f", "cat": "ac2g"}
    events = [launch(0, 1), kernel("first", 5, 10), kernel("bleeds", 10, 10, 1)]
    events += [
        {"ph": "s", "pid": HOST, "tid": MAIN, "ts": 0, **flow},
        {"ph": "f", "pid": 0, "tid": 7, "ts": 10, "bp": "e", **flow},
    ]
    found, _ = exported(tmp_path, events)

    assert found.query("select b.name from flow join slice b on slice_in = b.id") == [("bleeds",)]


def test_instants_and_counters_are_kept(tmp_path: Path) -> None:
    def at(ph: str, name: str, ts: float, **more: Any) -> Event:
        return {"ph": ph, "name": name, "pid": HOST, "tid": MAIN, "ts": ts, **more}

    events = [
        op("o", 10, 10),
        at("i", "thread", 12, s="t", args={"Bytes": 5}),
        at("i", "global", 13, s="g"),
        at("I", "early", 3),
    ]
    events += [
        at("C", "memory", 11, args={"allocated": 5, "reserved": 7.5}),
        at("C", "memory", 12, args={"allocated": None}),
    ]
    found, tally = exported(tmp_path, events)

    instants = found.query("select name, ts from slice where name in ('thread', 'global', 'early') order by ts")
    assert instants == [("early", 0), ("thread", 2_000), ("global", 3_000)]  # early: put at the first slice's start
    assert found.query("select value from counter order by value") == [(5.0,), (7.5,)]
    assert (tally.instants, tally.counters, tally.moved) == (3, 2, 1)
    assert tally.left_out == {"counters without a number": 1}


def test_begin_and_end_events_become_slices(tmp_path: Path) -> None:
    """As the reader pairs them: `never ends` lasts to the last mark of its thread. Async pairs get a row of their own."""

    def at(ph: str, name: str, ts: float, **more: Any) -> Event:
        return {"ph": ph, "name": name, "cat": "c", "pid": HOST, "tid": MAIN, "ts": ts, **more}

    events = [
        at("B", "outer", 0, args={"b": 1}),
        at("B", "inner", 2),
        at("E", "", 5),
        at("E", "", 9, args={"e": 2}),
        at("E", "", 9),
    ]
    events += [at("B", "never ends", 10), at("B", "last", 11), at("E", "", 14)]
    events += [
        at("b", "one", 1, id="0x1"),
        at("b", "two", 3, id="0x2"),
        at("e", "one", 6, id="0x1"),
        at("e", "two", 8, id="0x2"),
    ]
    found, tally = exported(tmp_path, events)

    assert rows(found, "thread 100", "async c", "async c (overlap 1)") == [
        ("async c", "one", 1_000, 5_000),
        ("async c (overlap 1)", "two", 3_000, 5_000),
        ("thread 100", "outer", 0, 9_000),
        ("thread 100", "inner", 2_000, 3_000),
        ("thread 100", "never ends", 10_000, 4_000),
        ("thread 100", "last", 11_000, 3_000),
    ]
    keys = found.query(
        "select key from args join slice using (arg_set_id) where name = 'outer' and key like 'args.%' order by key"
    )
    assert keys == [("args.b",), ("args.e",)]
    assert tally.left_out == {"ends without a begin": 1}


def test_slices_that_the_reader_rejects_are_counted_not_drawn(tmp_path: Path) -> None:
    events = [op("good", 1000, 5), op("backwards", 1001, -1), x("no time", "cpu_op", None, 1)]  # type: ignore[arg-type]
    _, tally = exported(tmp_path, events)

    assert tally.left_out == {"slices whose time makes no sense": 1, "slices without a time": 1}


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    source = write(tmp_path / "t.json", [step(1, 0, 50), launch(1, 1), kernel("k", 5, 5, 1)])
    export(source, tmp_path / "a.json.gz")
    export(source, tmp_path / "b.json.gz")

    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


@pytest.mark.parametrize("name", ["C:\\", "two \\\\", '\\"', '"\\'])
def test_a_backslash_at_the_end_of_a_name_does_not_spoil_the_file(tmp_path: Path, name: str) -> None:
    """trace_processor v52 takes the quote after an escaped backslash for an escaped quote, and gives up."""
    exported(tmp_path, [x(name, "kernel", 0, 1, pid=0, tid=7, **{name: name}), op("after", 5, 1)])

    assert [e["name"] for e in written(tmp_path) if e.get("cat") in ("kernel", "cpu_op")] == [name, "after"]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12))))
def test_on_a_lane_slices_nest_or_follow_each_other(spans: list[tuple[int, int]]) -> None:
    slices = sorted(((s, s + d) for s, d in spans), key=lambda se: (se[0], -se[1]))
    lanes = assign([s for s, _ in slices], [e for _, e in slices])

    for i, (start, end) in enumerate(slices):
        for j in range(i + 1, len(slices)):
            later, ends = slices[j]
            if lanes[i] == lanes[j]:
                assert later >= end or ends <= end, ((start, end), (later, ends))
    if all(b >= e for (_, e), (b, _) in pairwise(slices)):
        assert set(lanes) <= {0}  # nothing overlaps: one lane is enough


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12))), st.lists(st.integers(0, 45)))
def test_the_surrounding_slice_is_the_one_that_began_last(spans: list[tuple[int, int]], instants: list[int]) -> None:
    slices = sorted(((s, s + d) for s, d in spans), key=lambda se: (se[0], -se[1]))
    found = surrounding([s for s, _ in slices], [e for _, e in slices], instants)

    for at, index in zip(instants, found, strict=True):
        around = [i for i, (s, e) in enumerate(slices) if s <= at <= e]
        assert index == (around[-1] if around else -1)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", b""),
        (b"{}", b""),
        (b'{"a": 1.50}', b'{"a": 1.50}'),  # byte for byte
        (
            b'{"a":9223372036854775808,"b":-9223372036854775808}',
            b'{"a":"9223372036854775808","b":-9223372036854775808}',
        ),
        (b'{"a":"12345678901234567890"}', b'{"a":"12345678901234567890"}'),
        (b'{"a":12345678901234567890.5,"b":1e308}', b'{"a":"12345678901234567890.5","b":1e308}'),
        (b'{"a":"\xff"}', '{"a":"\ufffd"}'.encode()),
        (b"[1]", b'{"value":[1]}'),
        (
            rb'{"a\\":["b\\"],"c":"d\\\""}',
            rb'{"a\u005c":["b\u005c"],"c":"d\\\""}',
        ),  # a backslash before the closing quote
    ],
)
def test_argument_text(raw: bytes, expected: bytes) -> None:
    assert arguments(raw) == expected


def test_counter_values_are_the_numbers_of_an_object() -> None:
    found = finite_numbers(b'{"a":1,"b":"2.5","c":null,"d":"x","e":1e400,"f":{"g":1},"h":true}')

    assert found == [("a", b"1"), ("b", b"2.5")]
    assert finite_numbers(b"[1]") == finite_numbers(b"") == []
    assert string("a\x00\u00e9") == b'"a\\u0000\xc3\xa9"'


def test_every_real_trace_loads_clean_with_every_slice(corpus: Path, tmp_path: Path) -> None:
    """No error, no data loss; (ts, dur) of all original slices, as one set, is what the reader read, to the nanosecond."""
    out = tmp_path / "out.json.gz"
    refused = []
    for source in sorted((corpus / "traces").iterdir()):
        try:
            tally, run = export(source, out)
        except TracetoolsError:
            refused.append(source.name.split("__")[1].split(".")[0])
            continue
        found = loaded(out, tally)
        shown: Counter[tuple[object, ...]] = Counter(found.query(f"select ts, dur, name from slice {ORIGINAL}"))
        trace = run.processes[0].trace
        events = trace.events
        names = [trace.names[i] for i in events.name.tolist()]
        meant: Counter[tuple[object, ...]] = Counter(
            zip(events.start.tolist(), (events.end - events.start).tolist(), names, strict=True)
        )
        assert (shown - meant).total() == tally.instants, source.name
        assert not meant - shown, source.name
    assert refused == ["eg", "rocprof_908_results"]  # no Kineto traces: test_cli shows what is said of such files


def test_every_tricky_case_loads_clean(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json.gz"
    for source in sorted((corpus / "cases").glob("[0-9]*")):
        tally, _ = export(source, out)
        loaded(out, tally)
        json.loads(gzip.decompress(out.read_bytes()), parse_constant=pytest.fail)
