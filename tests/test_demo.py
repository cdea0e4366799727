"""The demo: exact packing, hook targets that exist, and one real run of both halves that must train alike."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracetools.demo import run as demo_run
from tracetools.demo.data import PADDING_SEGMENT, build, documents, encode, pack
from tracetools.demo.metrics import Line, read_metrics
from tracetools.demo.plant import LargeArgument, Plant, due, parse_plant
from tracetools.demo.run import metrics_file, run_demo
from tracetools.demo.settings import Options, Settings, read_options
from tracetools.errors import TracetoolsError, UsageError
from tracetools.load import load_run
from tracetools.stackprofile import load_profile

INSTALLED = find_spec("torch") and find_spec("ray") and find_spec("megatron") and find_spec("megatron.core")
needs_stacks = pytest.mark.skipif(
    not INSTALLED, reason="needs torch, ray and megatron-core: pip install 'tracetools[demo]'"
)


# ---------------------------------------------------------------- packing


def test_pack_puts_the_longest_first_where_it_fits() -> None:
    # 6 opens a bin of 10, 5 another; 4 fits beside 6, 3 beside 5, and 2 fills what 5 + 3 left
    assert pack([2, 3, 4, 5, 6], 10) == [[4, 2], [3, 1, 0]]


def test_pack_gives_every_rank_as_many_bins() -> None:
    # all three fit into one bin; two ranks need two
    assert pack([3, 2, 1], 10, multiple=2) == [[0, 1], [2]]


@given(st.lists(st.integers(1, 64), min_size=4, max_size=60), st.integers(1, 4))
def test_pack_loses_nothing_and_overfills_nothing(lengths: list[int], multiple: int) -> None:
    fewest = -(-len(pack(lengths, 64)) // multiple) * multiple
    if fewest > len(lengths):  # a rank would be without a document
        with pytest.raises(ValueError, match="cannot fill"):
            pack(lengths, 64, multiple)
        return
    bins = pack(lengths, 64, multiple)

    assert len(bins) == fewest
    assert sorted(number for numbers in bins for number in numbers) == list(range(len(lengths)))
    assert all(0 < sum(lengths[number] for number in numbers) <= 64 for numbers in bins)


@pytest.mark.parametrize("lengths", [[65], [0]])
def test_pack_refuses_what_no_bin_holds(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="document 0"):
        pack(lengths, 64)


def test_pack_refuses_ranks_without_a_document() -> None:
    with pytest.raises(ValueError, match="1 documents cannot fill a multiple of 2 bins"):
        pack([5], 64, multiple=2)


def test_build_writes_documents_side_by_side() -> None:
    encoded = [encode("abc"), encode("de")]
    batch = build(encoded, [[0, 1]], 6)

    # labels are one further than tokens and end with the end of the document (0); the sixth place is padding
    assert batch.tokens.tolist() == [[97, 98, 99, 100, 101, 0]]
    assert batch.labels.tolist() == [[98, 99, 0, 101, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, PADDING_SEGMENT]]
    assert batch.card() == {
        "tokens": 5,
        "padded_tokens": 6,
        "sequences": 2,
        "microbatches": 1,
        "sum_squared_lengths": 9 + 4,
    }


@pytest.mark.parametrize("step", range(4))
def test_no_token_of_a_step_is_lost_and_both_ways_to_share_are_one(step: int) -> None:
    settings = Settings()
    encoded = [encode(text) for text in documents(settings, step)]
    bins = pack([len(document) - 1 for document in encoded], settings.bin_length, multiple=2)
    whole = build(encoded, bins, settings.bin_length)

    in_bins = whole.tokens[whole.segments != PADDING_SEGMENT]
    assert np.array_equal(np.sort(in_bins), np.sort(np.concatenate([document[:-1] for document in encoded])))
    assert len(bins) == settings.bins
    for rank in range(2):
        # the Ray driver builds all and deals the bins; a plain rank builds its own only
        dealt, own = whole.shard(rank, 2), build(encoded, bins[rank::2], settings.bin_length)
        assert dealt.card() == own.card()
        for name in ("tokens", "labels", "positions", "segments"):
            assert np.array_equal(getattr(dealt, name), getattr(own, name))


# ---------------------------------------------------------------- options and plants


def test_a_plant_is_read_and_written() -> None:
    assert parse_plant("data_processing:40") == Plant("data_processing", 40.0)
    assert str(Plant("data_processing", 2.5)) == "data_processing:2.5"
    assert parse_plant("gc:40@1/4") == Plant("gc", 40.0, 1, 4)
    assert str(Plant("gc", 40.0, 1, 4)) == "gc:40@1/4"


def test_a_plant_may_be_for_some_steps_only() -> None:
    plants = (Plant("gc", 1.0), Plant("setup", 1.0, 1, 4))

    assert [step for step in range(10) if plants[1] in due(plants, step)] == [1, 5, 9]
    assert all(plants[0] in due(plants, step) for step in range(10))


def test_an_unknown_plant_names_what_there_is() -> None:
    with pytest.raises(UsageError) as raised:
        parse_plant("weather:40")

    assert str(raised.value) == (
        "--plant weather:40: there is no cause 'weather' to plant. There is: data_processing, ray_submit, ray_transport, logging, "
        "setup, forward, optimizer, straggler, late_collective, gc."
    )


def test_a_plant_of_ray_needs_ray(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the megatron half has no Ray\. Nothing was started"):
        run_demo(tmp_path / "out", halves=("megatron",), plants=[Plant("ray_submit", 1.0)])
    assert not (tmp_path / "out").exists()


def test_a_large_argument_takes_its_time_when_it_is_read() -> None:
    written = pickle.dumps(LargeArgument([1, 2], 30.0))
    began = time.perf_counter()

    assert pickle.loads(written) == [1, 2]
    assert time.perf_counter() - began >= 0.03
    assert len(written) > 400_000  # 30 pages


@pytest.mark.parametrize("amount", ["", ":", ":x", ":0", ":-4", ":inf", ":nan", ":4@", ":4@1", ":4@4/4", ":4@-1/4"])
def test_a_plant_needs_a_sane_amount(amount: str) -> None:
    with pytest.raises(UsageError, match="above 0 and at most 10000 ms"):
        parse_plant(f"data_processing{amount}")


def test_options_survive_the_command_line() -> None:
    options = Options(12, 2, Path("m.jsonl"), (Plant("data_processing", 40.0), Plant("gc", 2.5, 1, 4)))

    assert read_options(options.arguments()) == options


# ---------------------------------------------------------------- refusals


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_run, "find_spec", lambda name: None if name == "ray" else object())

    with pytest.raises(TracetoolsError, match=r"needs ray\. Install with: pip install 'tracetools\[demo\]'"):
        run_demo(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_stacks
@pytest.mark.parametrize("recorded", [(0, 2), (3, 3), (3, 5)])
def test_steps_that_cannot_be_recorded_are_refused(tmp_path: Path, recorded: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="of 4 steps"):
        run_demo(tmp_path / "out", steps=4, recorded=recorded)


# ---------------------------------------------------------------- hook targets


def _targets(*profiles: str) -> list[str]:
    found = [load_profile(name) for name in profiles]
    return sorted({t for p in found for t in [*(h.target for h in p.hooks if not h.optional), *p.step_functions]})


def _is_megatron_lm(target: str) -> bool:
    """Megatron-LM's own loop is in no wheel: these names cannot be looked up here."""
    return target.startswith("megatron.training.")


@needs_stacks
@pytest.mark.filterwarnings("ignore")  # what megatron-core says on import
@pytest.mark.parametrize("target", [t for t in _targets("megatron_lm", "ray") if not _is_megatron_lm(t)])
def test_hook_targets_exist(target: str) -> None:
    module, _, path = target.partition(":")
    owner: ModuleType | type[Any] = import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)

    # an inherited method is hooked where it is defined, or a subclass would be hooked twice
    assert name in vars(owner)
    assert callable(inspect.getattr_static(owner, name))


# ---------------------------------------------------------------- training

PACKED_AND_APART = """
import json
from tracetools.demo.data import build, encode
from tracetools.demo.settings import Settings
from tracetools.demo.trainer import Trainer

def first_loss(*bins):
    return trainer.train_step(build(encoded, bins, 64))

encoded = [encode("some kernel waits for the driver"), encode("an actor sends")]
trainer = Trainer(Settings(bin_length=64, learning_rate=0.0))
packed = first_loss([0, 1])
apart = first_loss([0], [1])
trainer.close()
print(json.dumps([packed.loss, apart.loss, packed.tokens, apart.tokens]))
"""


@needs_stacks
def test_packed_documents_do_not_see_each_other() -> None:
    """Two documents in one bin give the loss that they give in bins of their own: mask, positions and labels are right."""
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**os.environ, **group, "TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(
        [sys.executable, "-c", PACKED_AND_APART], env=environment, capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stderr
    packed, apart, tokens_packed, tokens_apart = json.loads(ran.stdout.splitlines()[-1])
    assert tokens_packed == tokens_apart == 32 + 14
    assert packed == pytest.approx(apart, rel=1e-6)  # float32 sums in another order


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both halves, 4 steps each of which 2 are recorded. About 30 s."""
    out = tmp_path_factory.mktemp("demo") / "out"
    seen: list[tuple[str, int, int]] = []
    folders = run_demo(
        out, steps=4, recorded=(1, 3), plants=[Plant("data_processing", 1.0)], progress=lambda *at: seen.append(at)
    )

    assert folders == (out / "megatron", out / "ray")
    assert [at for at in seen if at[1] == at[2]] == [("megatron", 4, 4), ("ray", 4, 4)]
    return out


def _logs(out: Path) -> tuple[list[Line], list[Line]]:
    return read_metrics(metrics_file(out, "megatron")), read_metrics(metrics_file(out, "ray"))


@needs_stacks
@pytest.mark.xdist_group("ray")
def test_both_halves_train_alike_to_the_last_bit(trained: Path) -> None:
    plain, ray = _logs(trained)

    assert [line.loss for line in plain] == [line.loss for line in ray]
    assert [line.grad_norm for line in plain] == [line.grad_norm for line in ray]
    assert [line.tokens for line in plain] == [line.tokens for line in ray]
    assert plain[-1].loss < plain[0].loss


@needs_stacks
@pytest.mark.xdist_group("ray")
def test_both_halves_record_the_same_work(trained: Path) -> None:
    plain, ray = (json.loads((trained / half / "run.json").read_text()) for half in ("megatron", "ray"))

    assert [(p["role"], p["rank"]) for p in plain["processes"]] == [("rank", 0), ("rank", 1)]
    assert [(p["role"], p["rank"]) for p in ray["processes"]] == [("driver", None), ("policy", 0), ("policy", 1)]
    assert plain["missing"] == ray["missing"] == []
    cards = [
        [_card(step) for p in run["processes"] if p["rank"] is not None for step in p["steps"]] for run in (plain, ray)
    ]
    assert cards[0] == cards[1]
    # what the ranks worked on is what the driver sent
    driver, *policies = ray["processes"]
    for at, step in enumerate(driver["steps"]):
        assert _card(step) == _sum([_card(policy["steps"][at]) for policy in policies])


def _card(step: dict[str, Any]) -> dict[str, int]:
    return {k: v for k, v in step.items() if k not in ("start_unix_ns", "end_unix_ns", "sources")}


def _sum(cards: list[dict[str, int]]) -> dict[str, int]:
    return {k: cards[0][k] if k == "number" else sum(card[k] for card in cards) for k in cards[0]}


@needs_stacks
@pytest.mark.xdist_group("ray")
def test_every_part_of_the_loops_is_in_the_traces(trained: Path) -> None:
    everywhere = {
        "forward_backward",
        "forward",
        "backward",
        "optimizer",
        "zero_grad",
        "grad_sync",
        "data_loading",
        "metrics",
    }
    plain_only = {"data_processing", "logging"}
    driver = {"data_processing", "sharding", "ray_submit", "ray_wait", "metrics", "logging"}

    for half, role, expected in (
        ("megatron", "rank", everywhere | plain_only),
        ("ray", "policy", everywhere),
        ("ray", "driver", driver),
    ):
        traces = [p.trace for p in load_run(trained / half).processes if p.role == role]
        assert traces
        for trace in traces:
            assert expected <= set(trace.names), (half, role)


@needs_stacks
@pytest.mark.xdist_group("ray")
def test_nothing_is_left_behind(trained: Path) -> None:
    mark = str(trained).encode()
    alive = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                alive.append((process / "cmdline").read_bytes())
        except OSError:  # it ended meanwhile, or belongs to somebody else
            continue
    assert alive == []
