"""A file read piece by piece gives what the same file gives when it is read whole; what is not as it should be is read whole."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from builders import Event, document, kernel, launch, memcpy, region, step, x

from tracetools.load import read_trace, stream
from tracetools.load import trace as trace_module
from tracetools.load.stream import NotUsual, each_piece
from tracetools.model import Trace


def events() -> list[Event]:
    """Forty iterations with everything that the columns keep."""
    made: list[Event] = [
        {"ph": "M", "name": "thread_name", "pid": 1000, "tid": 100, "args": {"name": 'main }, {"ph": 7'}}
    ]
    for i in range(40):
        at = 100 * i + 0.125
        made += [
            step(i, at, 90), region("forward_step", at, 40), x(f"aten::op{i % 7}", "cpu_op", at, 20, **{"Input Dims": [[i % 3, 4]]}),
            launch(at + 1, i + 1), kernel(f"k{i % 5}", at + 20, 30, i + 1), memcpy(at + 60, 5),
            x("nccl:all_reduce", "user_annotation", at + 70, 5, **{"Input type": ["float"]}),
            x("ncclDevKernel", "kernel", at + 72, 3, pid=0, tid=20, stream=20, device=0, correlation=0,
              **{"Collective name": "allreduce", "In msg nelems": i, "dtype": "Float", "Process Group Name": "0"}),
            {"ph": "s", "id": i, "name": "ac2g", "cat": "ac2g", "pid": 1000, "tid": 100, "ts": at},
            x("f.py(1): f", "python_function", at, 5, **{"Python id": i, "Python parent id": None if i == 0 else i - 1}),
        ]  # fmt: skip
    return made


def resolved(t: Trace) -> list[Any]:
    """All of a trace, indexes looked up."""
    e = t.events
    return [
        t.origin_ns, t.info, t.problems, e.start.tolist(), e.end.tolist(), [t.names[i] for i in e.name],
        [t.threads[i] for i in e.thread], e.category.tolist(), e.correlation.tolist(), e.external_id.tolist(), e.device.tolist(),
        e.stream.tolist(), e.size.tolist(), [t.dims[i] if i >= 0 else None for i in e.dims], e.python_id.tolist(),
        e.python_parent.tolist(), [t.collectives[i] if i >= 0 else None for i in e.collective],
    ]  # fmt: skip


def both(path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> tuple[Trace, Trace]:
    monkeypatch.setattr(stream, "PIECE", piece)
    seen: list[int] = []
    each_piece(path, lambda p: seen.append(len(p.events)))  # raises where the file is not read in pieces
    assert len(seen) > 1
    in_pieces = read_trace(path)
    monkeypatch.setattr(trace_module, "_usual", lambda _: None)
    return in_pieces, read_trace(path)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("piece", [700, 5000])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_pieces_add_up_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, piece: int, name: str
) -> None:
    made = document(events(), traceName="a", rank=3, world=4)
    made["baseTimeNanoseconds"] = 10**18  # behind the events
    text = json.dumps(made, indent=indent).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    in_pieces, whole = both(tmp_path / name, monkeypatch, piece)

    assert resolved(in_pieces) == resolved(whole)
    assert len(in_pieces.events) == 40 * 9
    assert (in_pieces.info.rank, in_pieces.origin_ns) == (3, 10**18 + 125)
    assert in_pieces.threads[in_pieces.events.thread[0]].name == 'main }, {"ph": 7'


def test_a_bare_array_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.json").write_text(json.dumps(events()))
    in_pieces, whole = both(tmp_path / "t.json", monkeypatch, 900)

    assert resolved(in_pieces) == resolved(whole)


def test_times_beyond_a_double_are_read_from_the_text_of_their_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1.7e15 us with fractions: a double knows these to a quarter of a microsecond only.
    rows = [
        f'{{"ph": "X", "name": "a", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 1700000000000{i:03}.123, "dur": 0.5}}'
        for i in range(90)
    ]
    (tmp_path / "t.json").write_text('{"traceEvents": [' + ", ".join(rows) + '], "host_name": "h"}')
    in_pieces, whole = both(tmp_path / "t.json", monkeypatch, 900)

    assert resolved(in_pieces) == resolved(whole)
    assert (in_pieces.events.start[-1], in_pieces.info.host) == (89_000, "h")


def nothing(_: stream.Piece) -> None:
    pass


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"traceEvents": [{"ph": "B", "name": "a", "ts": 1}]}', "Invalid value 'B'"),
        (b'{"traceEvents": [{"name": "a", "ts": 1}]}', "missing required field `ph`"),
        (b'{"traceEvents": [{"ph": "X", "args": {"correlation": "7"}}]}', "Expected `int`, got `str`"),
        (b'{"traceEvents": [{"ph": "X"}, {"ph": "X"', "truncated"),
        (b'{"nodes": []}', "no list of events"),
        (b'{"traceEvents": {"traceEvents": [{"ph": "X"}]}}', "truncated"),
        (b"", "no list of events"),
        (gzip.compress(b'[{"ph": "X"}]', mtime=0) * 2, "more than one gzip member"),
        (gzip.compress(b'[{"ph": "X"}]' * 99, mtime=0)[:-9], "cut off|malformed|trailing"),
    ],
)
def test_what_is_not_as_it_should_be_is_refused(tmp_path: Path, text: bytes, why: str) -> None:
    (tmp_path / "t.json").write_bytes(text)
    with pytest.raises(NotUsual, match=why):
        each_piece(tmp_path / "t.json", nothing)


def test_text_without_any_end_of_an_event_is_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PIECE", 100)
    monkeypatch.setattr(stream, "LONGEST_EVENT", 1000)
    (tmp_path / "t.json").write_text('{"traceEvents": [' + '{"ph": "X", "name": "' + "a" * 5000 + '"}]}')
    with pytest.raises(NotUsual, match="no end of an event"):
        each_piece(tmp_path / "t.json", nothing)


def test_every_real_trace_in_pieces_as_whole(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = trace_module._usual
    whole = []
    for source in sorted((corpus / "traces").iterdir()):
        if usual(source) is None:
            whole.append(source.name.split("__")[1].split(".")[0])
            continue
        monkeypatch.setattr(trace_module, "_usual", usual)
        in_pieces = read_trace(source)
        monkeypatch.setattr(trace_module, "_usual", lambda _: None)
        assert resolved(in_pieces) == resolved(read_trace(source)), source.name
    assert sorted(whole) == ["allreduce_tp4", "eg", "rocprof_908_results"]
