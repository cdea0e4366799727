"""The same collective on all its ranks: how it is paired, when it is not, and what is told of waiting, transfer and stragglers."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from builders import Event, kernel, launch, op, region, step, write, x

from tracetools.analysis import analyze
from tracetools.collective_calls import What, kind_of, message_bytes, type_of
from tracetools.load import load_run
from tracetools.model import RunBreakdown

US = 1000
NAME = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def collective(ts: float, dur: float, corr: int = 0, *, stream: int = 20, name: str = NAME, **said: Any) -> Event:
    """A communication kernel. `said`: kind, group, ranks, size, elements, dtype, seq, as Kineto's arguments name them."""
    keys = {
        "kind": "Collective name",
        "group": "Process Group Name",
        "ranks": "Process Group Ranks",
        "size": "Group size",
    }
    keys |= {"elements": "In msg nelems", "out": "Out msg nelems", "dtype": "dtype", "seq": "Seq"}
    args = {keys[key]: str(value) if key == "ranks" else value for key, value in said.items()}
    if args:
        args.setdefault("Collective name", "allreduce")
    return kernel(name, ts, dur, corr, stream=stream, **args)


def folder(
    tmp_path: Path, ranks: Mapping[int, Sequence[Event]], *, world: int | None = None, **top: Any
) -> RunBreakdown:
    for rank, events in ranks.items():
        write(tmp_path / f"rank-{rank}.json", events, rank=rank, world=world or len(ranks), **top)
    return analyze(load_run(tmp_path))


def waits(run: RunBreakdown) -> list[int | None]:
    """In microseconds, of every step of every process."""
    return [None if s.comm_wait_ns is None else s.comm_wait_ns // US for p in run.processes for s in p.steps]


def said(run: RunBreakdown, kind: str) -> list[str]:
    return [p.detail for p in run.all_problems if p.kind == kind]


def test_waiting_lasts_until_the_last_rank_starts_and_the_rest_is_transfer(tmp_path: Path) -> None:
    run = folder(tmp_path, {0: [collective(100, 60)], 1: [collective(130, 30)]})
    (row,) = run.collectives

    assert waits(run) == [30, 0]
    assert (row.duration_ns, row.wait_ns, row.transfer_ns) == (90 * US, 30 * US, 60 * US)
    assert [(r.rank, r.wait_ns, r.transfer_ns, r.last) for r in row.per_rank] == [
        (0, 30 * US, 30 * US, 0),
        (1, 0, 30 * US, 1),
    ]


def test_nobody_waits_longer_than_its_own_call(tmp_path: Path) -> None:
    # a broadcast's root may leave before the others enter: 10-15 on rank 0, 20-30 on rank 1
    run = folder(tmp_path, {0: [collective(10, 5, kind="broadcast")], 1: [collective(20, 10, kind="broadcast")]})

    assert waits(run) == [5, 0]
    assert not said(run, "collectives_contradict_clocks")


def test_one_file_has_nobody_to_wait_for(tmp_path: Path) -> None:
    run = analyze(load_run(write(tmp_path / "t.json", [collective(0, 10)])))

    assert (waits(run), run.collectives, run.stragglers, run.problems) == ([None], (), (), ())


def test_sequence_numbers_pair_what_was_recorded_on_both_sides(tmp_path: Path) -> None:
    # rank 1 lost number 1; by order its number 2 would be paired with rank 0's number 1
    run = folder(
        tmp_path,
        {
            0: [collective(t, 30, group="g", ranks=[0, 1], seq=i) for i, t in enumerate((0, 100, 200))],
            1: [collective(10, 20, group="g", ranks=[0, 1], seq=0), collective(225, 5, group="g", ranks=[0, 1], seq=2)],
        },
    )

    assert waits(run) == [10 + 25, 0]
    assert run.collectives[0].count == 2


def test_a_coalesced_call_of_several_kernels_is_paired_kernel_by_kernel(tmp_path: Path) -> None:
    run = folder(
        tmp_path,
        {
            0: [collective(0, 20, seq=7), collective(20, 20, seq=7)],
            1: [collective(5, 15, seq=7), collective(30, 10, seq=7)],
        },
    )

    assert waits(run) == [5 + 10, 0]


def test_the_sequence_number_may_be_on_the_host_only(tmp_path: Path) -> None:
    def rank(first: int, start: int) -> list[Event]:
        numbered: dict[str, Any] = {"Collective name": "allreduce", "Process Group Name": "g", "Seq": first}
        note = op("record_param_comms", start - 5, 4, **numbered)
        return [note, launch(start - 4, 1), collective(start, 10, 1, group="g", kind="allreduce")]

    run = folder(tmp_path, {0: rank(3, 10), 1: rank(4, 10)})

    assert waits(run) == [None, None]  # two different collectives


def test_two_groups_of_equal_sizes_are_not_mixed(tmp_path: Path) -> None:
    # ranks 0-3, pairs [0,1] [2,3] ("t") and [0,2] [1,3] ("d"); each rank's order of the two groups differs
    def call(start: int, name: str, ranks: list[int]) -> Event:
        return collective(
            start, 100 - start % 100, group=name, ranks=ranks, elements=8, dtype="Float", stream=20 + (name == "d")
        )

    run = folder(
        tmp_path,
        {
            0: [call(0, "t", [0, 1]), call(101, "d", [0, 2])],
            1: [call(10, "t", [0, 1]), call(103, "d", [1, 3])],
            2: [call(102, "d", [0, 2]), call(3, "t", [2, 3])],
            3: [call(104, "d", [1, 3]), call(5, "t", [2, 3])],
        },
    )

    assert waits(run) == [10 + 1, 0 + 1, 2 + 0, 0 + 0]
    assert len(run.collectives) == 4
    assert run.problems == ()


def test_equal_names_of_different_groups_are_not_mixed(tmp_path: Path) -> None:
    run = folder(
        tmp_path,
        {r: [collective(10 * r, 100 - 10 * r, group="1", ranks=[0, 1] if r < 2 else [2, 3])] for r in range(4)},
    )

    assert waits(run) == [10, 0, 10, 0]


def test_more_ranks_than_a_group_has_are_not_paired(tmp_path: Path) -> None:
    run = folder(tmp_path, {r: [collective(r, 100 - r, group="1", size=2)] for r in range(4)})

    assert waits(run) == [None] * 4
    assert said(run, "collectives_unpaired") == [
        "group 1: calls on 4 ranks of a group of 2: more than one group has this name; not paired"
    ]


def test_ranks_of_a_group_may_come_from_the_files_header(tmp_path: Path) -> None:
    for rank in range(4):
        ranks = [0, 1] if rank < 2 else [2, 3]
        info = {"rank": rank, "world_size": 4, "pg_config": [{"pg_name": "1", "pg_desc": "TP", "ranks": ranks}]}
        events = [collective(10 * rank, 100 - 10 * rank, group="1")]
        write(tmp_path / f"rank-{rank}.json", events, rank=None, distributedInfo=info)

    assert waits(analyze(load_run(tmp_path))) == [10, 0, 10, 0]


def test_different_counts_are_not_paired_and_say_so(tmp_path: Path) -> None:
    run = folder(tmp_path, {0: [collective(0, 9), collective(10, 9)], 1: [collective(1, 8)]})

    assert waits(run) == [None, None]
    assert said(run, "collectives_unpaired") == [
        "stream 0: the ranks recorded different numbers of calls (rank 0: 2, rank 1: 1); not paired"
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"elements": 9}, "rank 0: all_reduce of 8 float32, rank 1: all_reduce of 9 float32"),
        ({"dtype": "Half"}, "rank 0: all_reduce of 8 float32, rank 1: all_reduce of 8 float16"),
        ({"kind": "allgather"}, "rank 0: all_reduce of 8 float32, rank 1: all_gather of 8 float32"),
    ],
)
@pytest.mark.parametrize("sequence", [{}, {"seq": 5}])
def test_different_operations_sizes_or_types_are_not_paired(
    tmp_path: Path, change: dict[str, Any], words: str, sequence: dict[str, int]
) -> None:
    usual: dict[str, Any] = {"group": "g", "elements": 8, "dtype": "Float", **sequence}
    run = folder(tmp_path, {0: [collective(0, 9, **usual)], 1: [collective(0, 9, **(usual | change))]})

    assert waits(run) == [None, None]
    assert words in said(run, "collectives_unpaired")[0]


def test_ranks_of_an_all_to_all_may_send_different_amounts(tmp_path: Path) -> None:
    run = folder(
        tmp_path,
        {r: [collective(r, 9 - r, kind="all_to_allv", elements=100 * (r + 1), dtype="Byte")] for r in range(2)},
    )

    assert waits(run) == [1, 0]
    assert run.collectives[0].bytes == 200


def steps_of(first: int, calls: Sequence[int], late: int) -> list[Event]:
    """Steps of 100 us from number `first`, with so many collectives of 10 us in each; this rank comes `late` us late."""
    events: list[Event] = []
    for i, n in enumerate(calls):
        number = first + i
        events.append(step(number, number * 100, 90))
        for k in range(n):
            at, corr = number * 100 + 20 * k, 1000 * number + k + 1
            events += [launch(at + 1, corr, 1), collective(at + 5 + late, 10 - late, corr)]
    return events


def test_ranks_with_different_steps_are_paired_where_they_have_the_same(tmp_path: Path) -> None:
    # steps 1, 2 and 2, 3 with two collectives each: by order step 1 would be paired with step 2
    run = folder(tmp_path, {0: steps_of(1, [2, 2], 0), 1: steps_of(2, [2, 2], 3)})

    assert waits(run) == [None, 6, 0, None]


def test_a_step_with_different_counts_leaves_the_others_alone(tmp_path: Path) -> None:
    run = folder(tmp_path, {0: steps_of(1, [2, 3, 2], 0), 1: steps_of(1, [2, 2, 2], 3)})

    assert waits(run) == [6, None, 6, 0, None, 0]
    assert said(run, "collectives_unpaired") == [
        "stream 0, step 2: the ranks recorded different numbers of calls (rank 0: 3, rank 1: 2); not paired"
    ]


def test_of_a_rank_that_died_the_calls_before_its_end_are_paired(tmp_path: Path) -> None:
    run = folder(tmp_path, {0: steps_of(1, [3, 3, 3], 0), 1: steps_of(1, [3, 1], 4)})

    assert waits(run) == [12, 4, None, 0, 0]
    assert said(run, "collectives_incomplete") == [
        "stream 0: the recording of a rank ends in step 2 (rank 0: 3, rank 1: 1); only what all ranks recorded is paired"
    ]


def test_a_call_that_slips_into_the_next_step_is_still_paired_by_order(tmp_path: Path) -> None:
    early = [
        step(1, 0, 50),
        step(2, 100, 50),
        launch(10, 1, 1),
        launch(90, 2, 1),
        collective(20, 20, 1),
        collective(110, 30, 2),
    ]
    late = [
        step(1, 0, 50),
        step(2, 100, 50),
        launch(10, 1, 1),
        launch(105, 2, 1),
        collective(25, 15, 1),
        collective(130, 10, 2),
    ]
    for events in (early, late):
        events += [launch(120, 3, 1), collective(150, 10, 3)]
    run = folder(tmp_path, {0: early, 1: late})

    assert sum(w or 0 for w in waits(run)[:2]) == 5 + 20
    assert run.problems == ()


def test_missing_ranks_make_waits_lower_bounds(tmp_path: Path) -> None:
    run = folder(tmp_path, {r: [collective(r, 9 - r, group="g", ranks=[0, 1, 2, 3])] for r in (0, 2)}, world=4)

    assert waits(run) == [2, 0]
    assert said(run, "missing_rank") == ["rank 1, 3 of world size 4 not in the folder"]
    assert said(run, "collectives_incomplete") == [
        "group g: rank 1, 3 not in the folder: the others' waits are lower bounds"
    ]
    assert (run.collectives[0].recorded_ranks, run.collectives[0].ranks) == (2, 4)


def test_a_collective_recorded_on_one_rank_only_is_named(tmp_path: Path) -> None:
    run = folder(tmp_path, {0: [collective(0, 9, group="g", ranks=[0, 1])], 1: [kernel("gemm", 0, 9)]})

    assert waits(run) == [None, 0]  # rank 1 does not communicate at all
    assert said(run, "collectives_incomplete") == ["group g: rank 1 recorded no call of it: not paired"]


def test_a_group_of_one_rank_waits_for_nobody(tmp_path: Path) -> None:
    run = folder(tmp_path, {r: [collective(0, 9, group=str(r), ranks=[r])] for r in range(2)})

    assert waits(run) == [0, 0]
    assert run.problems == ()


def test_two_files_of_one_rank_are_not_paired_with_each_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.json", [collective(0, 9)], rank=0, world=2)

    assert waits(analyze(load_run(tmp_path))) == [None, None]


def test_policy_and_generation_ranks_are_not_paired(tmp_path: Path) -> None:
    for role in ("policy", "generation"):
        for rank in range(2):
            top: dict[str, Any] = {"tracetools": {"role": role, "rank": rank}}
            events = [collective(rank + 5 * (role == "policy"), 9 - rank, group="0", ranks=[0, 1])]
            write(tmp_path / f"{role}-{rank}.json", events, rank=None, **top)

    assert waits(analyze(load_run(tmp_path))) == [1, 1, 0, 0]


def test_on_one_host_nobody_leaves_before_all_have_entered(tmp_path: Path) -> None:
    # the second pair contradicts that; numbered, so the others are kept. 15 us: more than device clocks differ by
    early = [collective(0, 9, seq=0), collective(20, 9, seq=1), collective(100, 9, seq=2)]
    late = [collective(2, 7, seq=0), collective(45, 9, seq=1), collective(103, 6, seq=2)]
    run = folder(tmp_path, {0: early, 1: late}, host_name="h")

    assert waits(run) == [2 + 3, 0]
    assert said(run, "collectives_contradict_clocks") == [
        "stream 0: in 1 of 3 collectives a rank leaves before another enters; these are not paired"
    ]


def test_an_order_that_time_contradicts_is_not_trusted(tmp_path: Path) -> None:
    # rank 1 recorded one collective later than rank 0: equal counts and sizes, all pairs wrong
    run = folder(
        tmp_path,
        {0: [collective(100 * i, 9) for i in range(4)], 1: [collective(100 * i + 3, 6) for i in range(1, 5)]},
        host_name="h",
    )

    assert waits(run) == [None, None]
    assert said(run, "collectives_contradict_clocks") == [
        "stream 0: in 4 of 4 collectives a rank leaves before another enters; none of them is paired"
    ]


def test_bandwidths_are_those_of_nccl_tests(tmp_path: Path) -> None:
    # 2 ranks, 4 MB of float32, 20 us from the last start to the last end: 200 GB/s; all-reduce 2(n-1)/n = 1, all-gather 1/2 of 8 MB
    said_of: dict[str, Any] = {"dtype": "Float", "elements": 10**6}
    run = folder(
        tmp_path,
        {
            0: [collective(0, 30, **said_of), collective(50, 20, kind="_allgather_base", **said_of)],
            1: [collective(10, 20, **said_of), collective(50, 20, kind="_allgather_base", **said_of)],
        },
    )
    reduce, gather = sorted(run.collectives, key=lambda c: c.type, reverse=True)

    assert (reduce.bytes, reduce.algorithm_gb_per_s, reduce.bus_gb_per_s) == (4 * 10**6, 200.0, 200.0)
    assert (gather.bytes, gather.algorithm_gb_per_s, gather.bus_gb_per_s) == (8 * 10**6, 400.0, 200.0)


def test_sizes_follow_nccl_tests() -> None:
    assert message_bytes(What("reduce_scatter", "", 800, 100, "float16"), 8) == 1600
    assert message_bytes(What("reduce_scatter", "", None, 100, "float16"), 8) == 1600
    assert message_bytes(What("all_to_all", "", 800, 800, "bool"), 8) == 800
    assert message_bytes(What("all_reduce", "", 800, None, None), 8) is None
    assert message_bytes(What("all_reduce", "", None, None, "int64"), 8) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (NAME, "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "reduce_scatter"),
        ("ncclKernel_Reduce_RING_LL_Sum_float(x)", "reduce"),
        ("void vllm::cross_device_reduce_2stage<float, 8>(x)", "all_reduce"),
        ("nccl:_all_gather_base", "all_gather"),
        ("gloo:all_to_all", "all_to_all"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", "send_recv"),
        ("ncclDevKernel_Generic(x)", "other"),
    ],
)
def test_kinds_of_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_types_have_one_name() -> None:
    assert [type_of(t) for t in ("c10::BFloat16", "BFloat16", "long int", "Byte", "nonsense", None)] == [
        "bfloat16", "bfloat16", "int64", "uint8", None, None,
    ]  # fmt: skip


def test_older_traces_say_size_and_type_around_the_launch(tmp_path: Path) -> None:
    def rank(late: int) -> list[Event]:
        note = x("nccl:all_to_all", "user_annotation", 0, 9, **{"Input Dims": [[2, 500]], "Input type": ["c10::Half"]})
        return [
            note,
            launch(2, 5),
            collective(10 + late, 10 - late, 5, name="ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)"),
        ]

    run = folder(tmp_path, {0: rank(0), 1: rank(4)})
    (row,) = run.collectives

    assert waits(run) == [4, 0]
    assert (row.type, row.dtype, row.bytes) == ("all_to_all", "float16", 2000)


def test_sends_and_receives_are_counted_but_not_split(tmp_path: Path) -> None:
    run = folder(tmp_path, {r: [collective(0, 9, name="ncclKernel_SendRecv(x)")] for r in range(2)})

    assert waits(run) == [None, None]
    assert said(run, "point_to_point") == ["sends and receives between two ranks, not split into waiting and transfer"]


def test_a_straggler_is_named_with_what_it_did_meanwhile(tmp_path: Path) -> None:
    # rank 0 waits 20-60; rank 1 computes 0-30, copies nothing, is idle 30-60: in `data` until its launch at 50, then launch latency
    waiting = [step(1, 0, 90), launch(1, 1), collective(20, 50, 1)]
    slow = [
        step(1, 0, 90),
        region("data", 5, 45),
        launch(1, 1),
        kernel("gemm", 2, 28, 1),
        launch(50, 2),
        collective(60, 10, 2),
    ]
    run = folder(tmp_path, {0: waiting, 1: slow})
    (worst,) = run.stragglers
    causes = {(c.region, c.kind): c.ns // US for c in worst.causes}

    assert (worst.rank, worst.last, worst.collectives, worst.waited_ns, worst.meanwhile_ns) == (
        1,
        1,
        1,
        40 * US,
        40 * US,
    )
    assert (worst.compute_ns, worst.exposed_comm_ns, worst.exposed_memory_ns) == (10 * US, 0, 0)
    assert (worst.idle_ns, worst.not_recorded_ns) == (30 * US, 0)
    assert causes == {("data", "host"): 20, (None, "launch_latency"): 10}


def test_without_waiting_there_is_no_straggler(tmp_path: Path) -> None:
    assert folder(tmp_path, {r: [collective(5, 9)] for r in range(2)}).stragglers == ()


def test_overlapping_collectives_wait_once(tmp_path: Path) -> None:
    # 0-10 and 5-15 wait on two streams of rank 0: 15 us of its time, not 20
    mine = [collective(0, 20, group="a", ranks=[0, 1]), collective(5, 20, group="b", ranks=[0, 1], stream=21)]
    theirs = [collective(10, 10, group="a", ranks=[0, 1]), collective(15, 10, group="b", ranks=[0, 1], stream=21)]
    run = folder(tmp_path, {0: mine, 1: theirs})

    assert waits(run) == [15, 0]
    assert sum(c.wait_ns for c in run.collectives) == 20 * US


# ---------------------------------------------------------------- gloo


def gloo(ts: float, dur: float, *, thread: int = 200, kind: str = "all_reduce", **args: Any) -> Event:
    return x(f"gloo:{kind}", "user_annotation", ts, dur, tid=thread, **args)


def test_gloo_collectives_are_split_without_a_device(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"Input Dims": [[250]], "Input type": ["float"]}
    run = folder(
        tmp_path,
        {
            0: [op("aten::mm", 0, 10), op("c10d::allreduce_", 10, 1), gloo(12, 28, **shape)],
            1: [op("aten::mm", 0, 30), op("c10d::allreduce_", 30, 1), gloo(32, 8, **shape)],
        },
        host_name="h",
    )

    assert waits(run) == [20, 0]
    assert (run.collectives[0].bytes, run.collectives[0].dtype) == (1000, "float32")


def gloo_run(tmp_path: Path, calls: int) -> RunBreakdown:
    """Four ranks that alternate between all of them (threads 200) and pairs of them (threads 300), as many calls of each."""
    for rank in range(4):
        pair = [0, 1] if rank < 2 else [2, 3]
        events = [op("aten::mm", 0, 1)]
        for i in range(calls):
            at = 1000 * i + 10 * rank
            events += [
                gloo(at, 100 - 10 * rank),
                gloo(at + 200 + 100 * pair[0], 50 - 10 * (rank % 2) - 10 * pair[0], thread=300),
            ]
        config = [{"pg_name": str(i), "ranks": r} for i, r in enumerate(([0, 1, 2, 3], pair))]
        info = {"backend": "gloo", "rank": rank, "world_size": 4, "pg_config": config}
        write(tmp_path / f"rank-{rank}.json", events, rank=None, distributedInfo=info, host_name="h")
    return analyze(load_run(tmp_path))


def test_groups_of_gloo_are_told_apart_by_threads_and_times(tmp_path: Path) -> None:
    # all: rank r waits 30 - 10 r; the pairs' calls lie 200 us apart, so they cannot be one: the first of a pair waits 10
    run = gloo_run(tmp_path, 8)

    assert waits(run) == [8 * (30 + 10), 8 * 20, 8 * (10 + 10), 0]
    assert said(run, "groups_inferred") == [
        "process groups of 16 gloo collectives per rank inferred from threads and times: gloo [0, 1, 2, 3], gloo [0, 1], gloo [2, 3]"
    ]
    assert not said(run, "collectives_unpaired")


def test_few_gloo_calls_do_not_tell_their_group(tmp_path: Path) -> None:
    # two calls that all ranks could have made may be those of pairs that met by chance; the pairs' own cannot be anything else
    run = gloo_run(tmp_path, 2)

    assert waits(run) == [2 * 10, 0, 2 * 10, 0]
    assert said(run, "collectives_unpaired") == [
        "gloo: calls of several process groups that the trace does not tell apart; not paired"
    ]


# ---------------------------------------------------------------- real traces and cases


def of_corpus(corpus: Path, tmp_path: Path, pattern: str) -> RunBreakdown:
    for file in sorted(corpus.glob(pattern)):
        shutil.copy(file, tmp_path)
    return analyze(load_run(tmp_path))


def test_tensor_parallel_megatron(corpus: Path, tmp_path: Path) -> None:
    run = of_corpus(corpus, tmp_path, "traces/astrasim-megatron-tp8__*")
    large, small = run.collectives

    assert [(c.type, c.count, c.ranks, c.recorded_ranks) for c in run.collectives] == [
        ("all_reduce", 81, 8, 8),
        ("all_reduce", 3, 8, 8),
    ]
    assert (large.dtype, large.bytes, small.dtype, small.bytes) == (
        "float16",
        2 * 4 * 2048 * 4096,
        "float32",
        4 * 4 * 2048,
    )
    assert [s.rank for s in run.stragglers[:2]] == [0, 6]
    for i, process in enumerate(run.processes):
        (only,) = process.steps
        per_rank = [next(r for r in c.per_rank if r.rank == process.rank) for c in run.collectives]
        assert only.comm_wait_ns == sum(r.wait_ns for r in per_rank), i  # one stream: no two at once
        assert only.comm_ns - only.comm_wait_ns == sum(r.transfer_ns for r in per_rank)
        assert sum(r.count for r in per_rank) == 84
    for s in run.stragglers:
        parts = s.compute_ns + s.exposed_comm_ns + s.exposed_memory_ns + s.idle_ns + s.not_recorded_ns
        assert parts == s.meanwhile_ns
        assert sum(c.ns for c in s.causes) == s.idle_ns
    assert run.problems == ()


def test_all_to_all_and_all_reduce_of_dlrm(corpus: Path, tmp_path: Path) -> None:
    run = of_corpus(corpus, tmp_path, "traces/param-dlrm8__*")
    counts: dict[str, int] = {}
    for row in run.collectives:
        counts[row.type] = counts.get(row.type, 0) + row.count

    assert counts == {"all_to_all": 5, "all_reduce": 3}
    assert {r.recorded_ranks for r in run.collectives} == {8}
    assert run.stragglers[0].rank == 7


def test_case_54_the_first_collective_holds_the_late_start(corpus: Path, tmp_path: Path) -> None:
    run = of_corpus(corpus, tmp_path, "cases/54_*")
    (row,) = run.collectives
    spans = [p.device_span for p in run.processes]

    assert [(s.compute_ns, s.comm_ns) for s in spans if s] == [(300 * US, 17_000_042 * US), (300 * US, 72 * US)]
    assert waits(run) == [16_999_970, 0]
    assert (row.median_ns, row.longest_ns) == (14 * US, 17_000_000 * US)
    assert [(s.rank, s.last) for s in run.stragglers] == [(1, 1)]
    assert said(run, "outlier_collective") == [
        "54_start_skew.rank0.json: the first of 4 collectives lasts 17,000.000 ms, 99.9998% of the time in them; "
        "the median of the others is 0.014 ms"
    ]
    assert run.clocks[0].ahead_ns == 0


def test_case_17_files_of_one_rank(corpus: Path, tmp_path: Path) -> None:
    run = of_corpus(corpus, tmp_path, "cases/17_*")
    spans = [p.device_span for p in run.processes]

    assert [(s.busy_ns, s.span_ns, s.idle_ns) for s in spans if s] == [
        (40 * US, 50 * US, 10 * US),
        (70 * US, 80 * US, 10 * US),
    ]
    assert waits(run) == [None, None]
    assert "rank 0 in 2 files" in said(run, "duplicate_rank")[0]
    assert said(run, "missing_rank") == ["rank 1 of world size 2 not in the folder"]


def test_case_18_ranks_from_names(corpus: Path, tmp_path: Path) -> None:
    run = of_corpus(corpus, tmp_path, "cases/18_*")

    assert [p.rank for p in run.processes] == [3, 11]
    assert [s.compute_ns for p in run.processes if (s := p.device_span)] == [30 * US, 110 * US]
    assert said(run, "no_world_size")


def test_gloo_calls_in_groups_of_one_rank_are_nobodys_wait(tmp_path: Path) -> None:
    # Data parallel over ranks 0 and 1 (thread 200: both leave at 90), tensor parallel of one rank each (thread 300: 10 us long,
    # at any time). What the files list says which split is possible, that a rank leaves before the other enters which is not.
    for rank in range(2):
        config = [
            {"pg_name": "0", "pg_desc": "DP", "ranks": [0, 1]},
            {"pg_name": str(1 + rank), "pg_desc": "TP", "ranks": [rank]},
        ]
        events = []
        for i in range(4):
            at = 1000 * i
            events += [gloo(at + 10 * rank, 90 - 10 * rank), gloo(at + 300 + 200 * rank, 10, thread=300)]
        info = {"backend": "gloo", "rank": rank, "world_size": 2, "pg_config": config}
        top: dict[str, Any] = {"tracetools": {"host": "h"}, "baseTimeNanoseconds": 10**18}
        write(tmp_path / f"rank-{rank}.json", [*events, op("aten::mm", 0, 1)], rank=None, distributedInfo=info, **top)
    run = analyze(load_run(tmp_path))

    assert sorted((c.group, c.count, c.wait_ns) for c in run.collectives) == [
        ("gloo [0, 1]", 4, 40_000), ("gloo [0]", 4, 0), ("gloo [1]", 4, 0),
    ]  # fmt: skip
    assert said(run, "collectives_unpaired") == []
