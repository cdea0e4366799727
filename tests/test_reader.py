"""The reader: every container and every fault a profiler is known for gives the right events, or an error with file and place."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest
from builders import document, kernel, launch, op, x

from tracetools.errors import TracetoolsError
from tracetools.load import read_trace
from tracetools.model import Category, Trace

EVENTS = [op("aten::mm", 0, 10), launch(2, 1), kernel("gemm", 5, 20, 1), kernel("add", 30, 1.5, 2)]
TEXT = json.dumps(document(EVENTS))


def kernels(trace: Trace) -> list[tuple[str, int, int]]:
    """(name, start, end) in ns since the first event."""
    ev = trace.events
    return [(trace.names[ev.name[i]], int(ev.start[i]), int(ev.end[i])) for i in ev.where(Category.KERNEL)]


WANTED = [("gemm", 5000, 25000), ("add", 30000, 31500)]


def problems(trace: Trace) -> dict[str, int]:
    return {p.kind: p.count for p in trace.problems}


def read(tmp_path: Path, data: bytes, name: str = "t.json") -> Trace:
    (tmp_path / name).write_bytes(data)
    return read_trace(tmp_path / name)


def two_members(text: str) -> bytes:
    return gzip.compress(text[:100].encode()) + gzip.compress(text[100:].encode())


def zipped(tmp_path: Path, *names: str) -> bytes:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in names:
            archive.writestr(name, TEXT)
    return (tmp_path / "a.zip").read_bytes()


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode(),
        b"\xef\xbb\xbf" + TEXT.encode(),
        TEXT.encode("utf-16"),
        gzip.compress(TEXT.encode()),
        two_members(TEXT),
        gzip.compress(TEXT.encode()) + b"\0" * 512,
        json.dumps(EVENTS).encode(),
        json.dumps(EVENTS).encode()[:-1],
        json.dumps(EVENTS).encode()[:-1] + b",\n",
    ],
    ids=[
        "plain",
        "bom",
        "utf-16",
        "gzip",
        "two members",
        "padded gzip",
        "bare array",
        "open array",
        "open array, comma",
    ],
)
def test_every_container_gives_the_same_events(tmp_path: Path, data: bytes) -> None:
    assert kernels(read(tmp_path, data)) == WANTED


def test_zip_with_one_trace_is_read_and_with_two_is_refused(tmp_path: Path) -> None:
    assert kernels(read(tmp_path, zipped(tmp_path, "t.json"), "one.zip")) == WANTED
    with pytest.raises(TracetoolsError, match=r"two\.zip: the zip archive holds 2 files"):
        read(tmp_path, zipped(tmp_path, "t.json", "u.json"), "two.zip")


def test_zstd_is_read_where_a_decoder_is_installed(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    assert kernels(read(tmp_path, zstandard.compress(TEXT.encode()), "t.json.zst")) == WANTED


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ('"Test GPU"', '"Test\x01\tGPU"', "json_repaired"),
        ('"gemm"', '"ge\\mm"', "json_repaired"),
        ('"correlation": 1', '"correlation": NaN', "json_repaired"),
        ('"correlation": 1', '"correlation": -Infinity', "json_repaired"),
        ('"correlation": 1', '"correlation":', "json_repaired"),
        ('"correlation": 1', '"correlation": 1,', "json_repaired"),
        ('"gemm"', '"ge"m"m"', "event_repaired"),
        ('"gemm"', '"a, \\"b\\": \\"c"', None),
    ],
    ids=["control", "backslash", "nan", "infinity", "no value", "comma", "quotes", "escaped quotes are no fault"],
)
def test_faults_in_the_text_are_mended_and_counted(tmp_path: Path, old: str, new: str, kind: str | None) -> None:
    trace = read(tmp_path, TEXT.replace(old, new).encode())

    assert [k[1:] for k in kernels(trace)] == [k[1:] for k in WANTED]
    assert list(problems(trace)) == ([kind] if kind else [])
    assert trace.info.rank == 0


def test_a_repaired_name_keeps_its_characters(tmp_path: Path) -> None:
    backslash = read(tmp_path, TEXT.replace('"gemm"', '"C:\\work\\x.py"').encode())
    quotes = read(tmp_path, TEXT.replace('"gemm"', '"f<"a",4>"').encode())

    assert kernels(backslash)[0][0] == "C:\\work\\x.py"
    assert kernels(quotes)[0][0] == 'f<"a",4>'


@pytest.mark.parametrize("compress", [False, True])
def test_a_file_cut_in_an_event_keeps_the_whole_ones_and_says_where(tmp_path: Path, compress: bool) -> None:
    cut = TEXT.encode()[: TEXT.index('"add"') + 2]
    trace = read(tmp_path, gzip.compress(cut) if compress else cut)

    assert kernels(trace) == WANTED[:1]
    assert [p.detail for p in trace.problems] == [f"truncated at byte {len(cut)}, last event dropped"]


def test_a_gzip_file_cut_short_gives_what_it_holds(tmp_path: Path) -> None:
    many = json.dumps(document([kernel(f"k{i}", 10 * i, 1, i + 1) for i in range(500)])).encode()
    packed = gzip.compress(many)
    trace = read(tmp_path, packed[: len(packed) // 2])

    assert 0 < len(trace.events) < 500
    assert set(problems(trace)) == {"gzip_truncated", "truncated"}


def test_one_hopeless_event_costs_one_event(tmp_path: Path) -> None:
    trace = read(tmp_path, TEXT.replace('"name": "gemm"', '"name": }{').encode())

    assert kernels(trace) == WANTED[1:]
    assert problems(trace)["event_rejected"] == 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (gzip.compress(b"", mtime=0), "holds nothing"),
        (b"# a readme", "not JSON"),
        (b"{}", "no traceEvents"),
        (b'{"nodes": [], "schema": "1.0"}', "execution trace"),
        (b'{"traceEvents": 5}', "traceEvents is not a list"),
        (b'{"traceEvents": []}', "no events with a duration"),
        (b"[]", "no events with a duration"),
        (b'"text"', "a single JSON value"),
        (b'{"traceEvents": [{"ph": "X"', "no event"),
        (b'[{"ph": "X", "name": "a", "ts": "soon", "dur": 1}]', "none of its 1 events has a usable time"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_files_name(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(TracetoolsError, match=says) as caught:
        read(tmp_path, data, "odd.json")
    assert "odd.json" in str(caught.value)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(TracetoolsError, match=r"gone\.json: cannot be read: No such file"):
        read_trace(tmp_path / "gone.json")


def test_times_are_exact_at_every_scale(tmp_path: Path) -> None:
    # as text, because a double of 1.7e15 has no third decimal
    for base in (0, 10**12, 1_700_000_000_000_000):
        first = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 0, "dur": 0}
        text = json.dumps([first, first]).replace('"ts": 0, "dur": 0', '"ts": @, "dur": 0.001')
        text = text.replace("@", f"{base}.123", 1).replace("@", f"{base}.684", 1)

        assert [k[1:] for k in kernels(read(tmp_path, text.encode()))] == [(0, 1), (561, 562)]


def test_odd_events_are_rejected_and_counted(tmp_path: Path) -> None:
    events = [
        *EVENTS,
        op("unfinished", 5, -1),
        kernel("backwards", 5, -3, 9),
        x("no time", "kernel", None, 4),  # type: ignore[arg-type]
        kernel("two centuries", 5, 7e15, 9),
    ]
    trace = read(tmp_path, json.dumps(document(events)).encode())

    assert kernels(trace) == WANTED
    assert problems(trace) == {"no_time": 1, "unfinished": 1, "negative_duration": 1, "endless": 1}


def test_begin_and_end_events_become_slices(tmp_path: Path) -> None:
    def mark(ph: str, ts: float, name: str, tid: int = 5) -> dict[str, object]:
        return {"ph": ph, "ts": ts, "name": name, "cat": "user", "pid": 9, "tid": tid}

    events = [
        mark("B", 0, "outer"),
        mark("B", 10, "inner"),
        mark("E", 30, ""),
        mark("B", 4, "other", 6),
        mark("E", 5, "other", 6),
    ]
    events += [mark("E", 100, "outer"), mark("E", 110, "orphan"), mark("B", 120, "open"), mark("E", 2, "early", 7)]
    trace = read(tmp_path, json.dumps(events).encode())
    ev = trace.events

    # `open` lasts to the last time of its thread, which is its own begin
    assert [(trace.names[n], int(s), int(e)) for n, s, e in zip(ev.name, ev.start, ev.end, strict=True)] == [
        ("outer", 0, 100_000),
        ("other", 4_000, 5_000),
        ("inner", 10_000, 30_000),
        ("open", 120_000, 120_000),
    ]
    assert problems(trace) == {"end_without_begin": 2, "unfinished": 1}


def test_strings_and_numbers_are_the_same_stream(tmp_path: Path) -> None:
    events = [kernel("a", 0, 1), kernel("b", 2, 1), kernel("c", 4, 1)]
    events[0]["args"]["stream"] = "7"
    del events[1]["args"]["stream"]
    events[1]["tid"] = "stream 7"
    trace = read(tmp_path, json.dumps(events).encode())

    assert trace.events.stream.tolist() == [7, 7, 7]


def test_ids_beyond_64_bits_do_not_stop_the_reader(tmp_path: Path) -> None:
    events = [kernel("a", 0, 1, 98765432109876543210987), kernel("b", 2, 1, 5)]
    trace = read(tmp_path, json.dumps(events).encode())

    assert trace.events.correlation.tolist() == [0, 5]


def test_equal_starts_are_ordered_longer_first_then_as_in_the_file(tmp_path: Path) -> None:
    events = [op("child", 0, 5), op("parent", 0, 9), op("twin a", 0, 5), op("next", 9, 1)]
    trace = read(tmp_path, json.dumps(events).encode())

    assert [trace.names[n] for n in trace.events.name] == ["parent", "child", "twin a", "next"]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank-3.json", 3),
        ("x_rank11.pt.trace.json", 11),
        ("worker4_step_12.169.pt.trace.json", 4),
        ("num_workers_0.json", None),
    ],
)
def test_rank_from_the_files_name(tmp_path: Path, name: str, rank: int | None) -> None:
    trace = read(tmp_path, json.dumps(document(EVENTS, rank=None)).encode(), name)

    assert (trace.info.rank, trace.info.rank_source) == (rank, "file name" if rank is not None else None)


def test_wrapped_trace(tmp_path: Path) -> None:
    trace = read(tmp_path, json.dumps({"traceEvents": document(EVENTS)}).encode())

    assert kernels(trace) == WANTED
    assert problems(trace) == {"wrapped": 1}
