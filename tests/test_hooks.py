"""Hooks of every kind: what they put into the trace, and that nothing else about the hooked function changes.

Most tests run the real wrappers with a recorder that keeps a log of what opens (+) and closes (-); the last ones run real processes.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

INJECT = Path(__file__).resolve().parents[1] / "tracetools" / "collect" / "inject"
sys.path.append(str(INJECT))

import tracetools_cards as cards  # noqa: E402
import tracetools_hooks as hooks  # noqa: E402
import tracetools_ranges as ranges  # noqa: E402
import tracetools_wrappers as wrappers  # noqa: E402

sys.path.remove(str(INJECT))


class Log(ModuleType):
    """Stands for the recorder: what wrappers look for in sys.modules."""

    def __init__(self) -> None:
        super().__init__("tracetools_recorder")
        self.recording = True
        self.events: list[str] = []

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        self.events.append(f"+{name}")
        yield
        self.events.append(f"-{name}")

    def enter_step(self) -> object:
        self.events.append("+step")
        return object()

    def exit_step(self, _: object, numbers: dict[str, Any]) -> None:
        assert numbers == {}
        self.events.append("-step")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    made = Log()
    monkeypatch.setitem(sys.modules, "tracetools_recorder", made)
    monkeypatch.setattr(ranges, "_local", threading.local())
    yield made
    assert not ranges.timers and not ranges.nvtx  # every test leaves nothing open
    ranges.failures.clear()
    ranges.step_names = frozenset()
    cards.install([])
    cards.take()
    cards.missed.clear()


# ---------------------------------------------------------------- calls


def test_a_call_is_one_range_and_otherwise_the_same(log: Log) -> None:
    def f(a: int, *, b: int = 2) -> int:
        """Docs."""
        return a * b

    hooked = wrappers.ranged(f, "f")

    assert hooked(3, b=4) == 12 and log.events == ["+f", "-f"]
    assert (hooked.__name__, hooked.__doc__, inspect.signature(hooked)) == ("f", "Docs.", inspect.signature(f))
    with pytest.raises(TypeError, match=r"f\(\) missing 1 required positional argument"):
        hooked()


def test_exceptions_pass_and_close_the_range(log: Log) -> None:
    def f() -> None:
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        wrappers.ranged(f, "f")()
    assert log.events == ["+f", "-f"]


def test_nothing_is_opened_while_nothing_records(log: Log) -> None:
    log.recording = False
    assert wrappers.ranged(len, "f")([1, 2]) == 2
    assert log.events == []


def test_a_hook_that_fails_is_noted_once_and_steps_aside(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def broken(name: str) -> Any:
        asked.append(name)
        raise OSError("no ranges today")

    monkeypatch.setattr(log, "region", broken)
    hooked = wrappers.ranged(len, "f")

    assert [hooked([1]), hooked([1, 2])] == [1, 2]
    assert asked == ["f"]  # not asked again
    assert hooks.status([])["failed"] == [["f", "OSError: no ranges today"]]


# ---------------------------------------------------------------- generators and coroutines


def test_a_generator_has_a_range_per_item(log: Log) -> None:
    def numbers() -> Iterator[int]:
        for i in range(2):
            log.events.append(f"make {i}")
            yield i

    hooked = wrappers.ranged(numbers, "g")
    seen = []
    for i in hooked():
        log.events.append(f"use {i}")
        seen.append(i)

    assert inspect.isgeneratorfunction(hooked) and seen == [0, 1]
    # the third piece runs to the generator's end
    assert log.events == ["+g", "make 0", "-g", "use 0", "+g", "make 1", "-g", "use 1", "+g", "-g"]


def test_a_generator_keeps_send_throw_close_and_its_result(log: Log) -> None:
    closed = []

    def talk() -> Any:
        try:
            got = yield "ready"
            try:
                yield f"got {got}"
            except ValueError as error:
                yield f"caught {error}"
            return "result"
        finally:
            closed.append(True)

    def drive(function: Callable[[], Any]) -> list[Any]:
        g = function()
        out = [next(g), g.send(5), g.throw(ValueError("x"))]
        try:
            next(g)
        except StopIteration as done:
            out.append(done.value)
        g = function()
        next(g)
        g.close()
        return out

    assert drive(wrappers.ranged(talk, "g")) == drive(talk) == ["ready", "got 5", "caught x", "result"]
    assert closed == [True] * 4
    assert log.events.count("+g") == log.events.count("-g")


def test_a_generator_made_before_the_recording_is_in_it(log: Log) -> None:
    log.recording = False
    items = wrappers.ranged(lambda: iter(()), "unused")  # a plain function that returns an iterator is a plain function
    assert list(items()) == []

    def numbers() -> Iterator[int]:
        yield from (1, 2)

    g = wrappers.ranged(numbers, "g")()
    next(g)
    log.recording = True
    next(g)
    assert log.events == ["+g", "-g"]


def test_ranges_of_tasks_that_take_turns_hold_only_their_own_pieces(log: Log) -> None:
    async def work(name: str) -> str:
        log.events.append(f"{name} begins")
        await asyncio.sleep(0)
        log.events.append(f"{name} ends")
        return name

    hooked = wrappers.ranged(work, "work")

    async def both() -> list[str]:
        return list(await asyncio.gather(hooked("a"), hooked("b")))

    assert inspect.iscoroutinefunction(hooked)
    assert asyncio.run(both()) == ["a", "b"]
    # a and b each run in two pieces; no range of one holds a piece of the other
    piece = ["+work", None, "-work"]
    order = ["a begins", "b begins", "a ends", "b ends"]
    assert log.events == [event or who for who in order for event in piece]


def test_an_async_generator(log: Log) -> None:
    async def numbers() -> AsyncIterator[int]:
        for i in range(2):
            await asyncio.sleep(0)
            yield i

    hooked = wrappers.ranged(numbers, "ag")

    async def use() -> list[int]:
        return [i async for i in hooked()]

    assert inspect.isasyncgenfunction(hooked)
    assert asyncio.run(use()) == [0, 1]
    # per item one piece up to the sleep and one after it; the last piece runs to the end
    assert log.events == ["+ag", "-ag"] * 5


def test_a_coroutine_that_raises_and_one_that_is_cancelled(log: Log) -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("own")

    async def waits() -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        with pytest.raises(KeyError, match="own"):
            await wrappers.ranged(fails, "f")()
        task = asyncio.create_task(wrappers.ranged(waits, "w")())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert log.events == ["+f", "-f"] * 2 + ["+w", "-w"] * 2


# ---------------------------------------------------------------- timers


class Timer:
    """As training stacks have them: refuses what runs already and what does not run."""

    def __init__(self) -> None:
        self.running: set[str] = set()

    def start(self, label: str, barrier: bool = False) -> None:
        assert not barrier
        if label in self.running:
            raise ValueError(f"{label} runs already")
        self.running.add(label)

    def stop(self, label: str) -> float:
        if label not in self.running:
            raise ValueError(f"{label} does not run")
        self.running.remove(label)
        return 1.0

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        self.start(label)
        try:
            yield
        finally:
            self.stop(label)


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    monkeypatch.setattr(Timer, "start", wrappers.timer_start(Timer.start, None))
    monkeypatch.setattr(Timer, "stop", wrappers.timer_stop(Timer.stop, None))
    return Timer()


def test_labels_of_a_timer_are_ranges(log: Log, timer: Timer) -> None:
    with timer.time("outer"):
        timer.start(label="inner", barrier=False)
        assert timer.stop("inner") == 1.0

    assert log.events == ["+outer", "+inner", "-inner", "-outer"]


def test_unbalanced_starts_and_stops_do_nothing(log: Log, timer: Timer) -> None:
    with pytest.raises(ValueError, match="does not run"):
        timer.stop("a")
    timer.start("a")
    with pytest.raises(ValueError, match="runs already"):
        timer.start("a")
    timer.stop("a")
    log.recording = False
    timer.start("before the recording")
    log.recording = True
    timer.stop("before the recording")

    assert log.events == ["+a", "-a"]


def test_labels_that_overlap_are_split_so_that_ranges_nest(log: Log, timer: Timer) -> None:
    timer.start("a")
    timer.start("b")
    timer.stop("a")
    timer.stop("b")

    assert log.events == ["+a", "+b", "-b", "-a", "+b", "-b"]


def test_a_label_that_outlives_the_call_it_was_started_in(log: Log, timer: Timer) -> None:
    wrappers.ranged(lambda: timer.start("a"), "call")()
    timer.stop("a")

    assert log.events == ["+call", "+a", "-a", "-call", "+a", "-a"]


def test_a_label_may_be_stopped_on_another_thread(log: Log, timer: Timer) -> None:
    timer.start("a")
    thread = threading.Thread(target=timer.stop, args=("a",))
    thread.start()
    thread.join()
    wrappers.ranged(len, "next")([])

    assert log.events == ["+a", "-a", "+next", "-next"]


def test_a_recording_that_ends_within_a_label(log: Log, timer: Timer) -> None:
    timer.start("a")
    log.recording = False
    timer.stop("a")

    assert log.events == ["+a", "-a"]


def test_a_timer_that_has_its_name_in_an_attribute(log: Log) -> None:
    class Named:
        name = "forward-backward"

        def start(self, barrier: bool = False) -> None: ...

        def stop(self, barrier: bool = False) -> None: ...

    start, stop = wrappers.timer_start(Named.start, "name"), wrappers.timer_stop(Named.stop, "name")
    of = Named()
    start(of, barrier=True)
    stop(of)

    assert log.events == ["+forward-backward", "-forward-backward"]


# ---------------------------------------------------------------- NVTX and factories


def test_nvtx_ranges(log: Log) -> None:
    pushed: list[str] = []
    push, pop = wrappers.push(pushed.append), wrappers.pop(lambda: pushed.pop())
    push("a")
    push("b")
    assert (pop(), pop()) == ("b", "a")
    push("left by an exception")

    def fails() -> None:
        push("inner")
        raise KeyError

    with pytest.raises(KeyError):
        wrappers.ranged(fails, "call")()
    pop()  # NVTX itself would take "inner" off here

    assert log.events == [
        *("+a", "+b", "-b", "-a"),
        *("+left by an exception", "+call", "+inner", "-inner", "-call", "-left by an exception"),
    ]


def test_what_a_factory_decorates_has_ranges_of_its_name(log: Log) -> None:
    def wrap_with_name(name: str) -> Callable[[Any], Any]:
        def decorator(function: Any) -> Any:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                log.events.append(f"own {name}")
                return function(*args, **kwargs)

            return wrapper

        return decorator

    hooked = wrappers.factory(wrap_with_name)

    def add(x: int) -> int:
        return x + 1

    train = hooked("worker/train")(add)
    assert train(1) == 2 and log.events == ["+worker/train", "own worker/train", "-worker/train"]
    assert train.__name__ == "wrapper"  # as without us
    assert hooked(name="b")(lambda: 5)() == 5 and log.events[3] == "+b"


def test_an_nvtx_range_of_the_same_name_is_not_shown_twice(log: Log) -> None:
    push, pop = wrappers.push(lambda _: 0), wrappers.pop(lambda: 0)

    def train() -> None:
        push("train")
        pop()

    wrappers.ranged(train, "train")()
    assert log.events == ["+train", "-train"]


# ---------------------------------------------------------------- steps and cards


def test_a_range_that_is_a_step(log: Log, timer: Timer) -> None:
    ranges.step_names = frozenset({"total", "train"})
    cards.install([], ["eval_mode"])
    with timer.time("total"):
        pass
    train = wrappers.ranged(lambda data, eval_mode=False: (data, eval_mode), "train")
    train(1)
    train(1, eval_mode=True)
    log.recording = False  # steps count all the same
    train(1)

    assert log.events == [
        *("+step", "+total", "-total", "-step"),
        *("+step", "+train", "-train", "-step"),
        *("+train", "-train"),
        *("+step", "-step"),
    ]


@pytest.mark.usefixtures("log")
def test_cards_read_arguments_and_results() -> None:
    np = pytest.importorskip("numpy")
    rule = {
        "ranges": ["train"],
        "within": [],
        "tokens": ["data.gone | sum", "data.mask | skip_first | times data.samples | sum"],
        "sequences": ["data.lengths | len"],
        "sum_squared_lengths": ["data.lengths | sum_squares"],
        "microbatches": ["result.losses | len"],
        "padded_tokens": ["data.mask | count"],
    }
    cards.install([rule])
    data = {
        "mask": np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1]]),
        "samples": np.array([1, 1, 0]),
        "lengths": [3, 2, 3],
    }
    train = wrappers.ranged(lambda data: {"losses": [0.5, 0.25][: len(data)]}, "train")
    train(data)
    train(data=data)  # two calls in one step add up

    card, sources = cards.resolved(cards.take())
    # without the first column: 2 + 1 + 2 tokens, of which the last sample's do not count
    assert card == {
        "tokens": 6,
        "sequences": 6,
        "sum_squared_lengths": 2 * (9 + 4 + 9),
        "microbatches": 4,
        "padded_tokens": 2,
    }
    assert sources["tokens"] == "train: data.mask | skip_first | times data.samples | sum"
    assert cards.missed == {"train: data.gone | sum": "AttributeError: 'dict' object has no attribute 'gone'"}
    assert cards.take() == {}


@pytest.mark.usefixtures("log")
def test_card_rules_in_order_and_within() -> None:
    cards.install(
        [
            {"ranges": ["micro"], "within": ["train"], "padded_tokens": ["result | sum"]},
            {"ranges": ["train"], "within": [], "padded_tokens": ["n"], "tokens": ["n | times n"]},
        ]
    )
    micro = wrappers.ranged(lambda: [3, [4]], "micro")
    train = wrappers.ranged(lambda n: [n, micro()], "train")
    micro()  # a pass that is no training

    train(10)
    assert cards.resolved(cards.take())[0] == {"padded_tokens": 7, "tokens": 100}


@pytest.mark.usefixtures("log")
def test_tensors_are_read_without_an_operator() -> None:
    torch = pytest.importorskip("torch")
    cards.install([{"ranges": ["f"], "within": [], "tokens": ["x | sum"], "padded_tokens": ["x | numel"]}])
    x = torch.arange(6).reshape(2, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        wrappers.ranged(lambda x: x, "f")(x)

    assert cards.resolved(cards.take())[0] == {"tokens": 15, "padded_tokens": 6}
    assert [e.name for e in profiler.events() if e.name.startswith("aten::")] == []


@pytest.mark.usefixtures("log")
def test_a_tensor_is_read_later_and_only_if_unchanged() -> None:
    torch = pytest.importorskip("torch")
    kept, changed = torch.tensor([1, 2]), torch.tensor([1, 2])
    later = [cards.Later(t, (("sum",),)) for t in (kept, changed)]
    changed += 1

    assert [v.read() for v in later] == [3, None]


def test_the_functions_that_profiles_may_name_are_the_ones_that_cards_know() -> None:
    from tracetools.profilefile import CARD_NUMBERS, PATH_FUNCTIONS

    assert set(PATH_FUNCTIONS) == {*cards.FUNCTIONS, "numel", "len", "count", "skip_first", "times"}
    assert CARD_NUMBERS == cards.KEYS


# ---------------------------------------------------------------- finding the functions


def module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(textwrap.dedent(text))


def test_modules_imported_before_and_after_and_names_taken_from_them(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(tmp_path, "hk_early", "def f(): return 1\nclass C:\n  @classmethod\n  def make(cls): return cls.__name__\n")
    module(tmp_path, "hk_user", "from hk_early import f\n")
    module(tmp_path, "hk_late", "class C:\n  @staticmethod\n  def size(): return 3\n\nclass D(C): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    early, user = importlib.import_module("hk_early"), importlib.import_module("hk_user")
    common: dict[str, Any] = {"kind": "call", "also": []}
    targets = hooks.targets(
        {
            "step_functions": [],
            "hooks": [
                {**common, "target": "hk_early:f", "range": "f", "also": ["hk_user:f"]},
                {**common, "target": "hk_early:C.make", "range": "make"},
                {**common, "target": "hk_late:C.size", "range": "size"},
                {**common, "target": "hk_late:D.size", "range": "size"},
                {**common, "target": "hk_late:C.gone", "range": "gone"},
            ],
        }
    )
    hooks.install(targets)
    late = importlib.import_module("hk_late")

    assert (user.f(), early.f(), early.C.make(), late.C.size(), late.D().size()) == (1, 1, "C", 3, 3)
    assert [e for e in log.events if e[0] == "+"] == ["+f", "+f", "+make", "+size", "+size"]
    why = dict(hooks.status(targets)["missed"])
    assert "hook the class that does" in why["hk_late:D.size"] and "no attribute 'gone'" in why["hk_late:C.gone"]


# ---------------------------------------------------------------- pickled by value, and real Ray

PICKLED = """
    import sys
    sys.path.insert(0, {inject!r})
    import tracetools_ranges, tracetools_wrappers as wrappers, types
    recorder = types.ModuleType("tracetools_recorder")
    recorder.recording = False
    sys.modules["tracetools_recorder"] = recorder

    def factory(name):
        return lambda function: lambda *args: function(*args)

    class Worker:  # of __main__: pickled by value, as Ray does with an actor's class
        @wrappers.factory(factory)("train")
        def train(self, x):
            return x + 1

        def numbers(self):
            yield from (1, 2)

        async def wait(self):
            return 3

        numbers = wrappers.ranged(numbers, "numbers")
        wait = wrappers.ranged(wait, "wait")

    assert Worker().train(1) == 2
    from ray import cloudpickle
    sys.stdout.buffer.write(cloudpickle.dumps(Worker))
"""

UNPICKLED = """
    import asyncio, pickle, sys
    Worker = pickle.loads(sys.stdin.buffer.read())
    assert not [m for m in sys.modules if m.startswith("tracetools")]
    assert (Worker().train(1), list(Worker().numbers()), asyncio.run(Worker().wait())) == (2, [1, 2], 3)
"""


def test_wrappers_pickled_by_value_are_plain_calls_where_there_is_no_recorder() -> None:
    pytest.importorskip("ray")
    pickled = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PICKLED).format(inject=str(INJECT))], capture_output=True, check=True
    ).stdout
    subprocess.run([sys.executable, "-c", textwrap.dedent(UNPICKLED)], input=pickled, check=True)


ACTORS = """
    import asyncio, ray
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)

    class Base:
        def __init__(self): self.n = 0
        def inherited(self): return "inherited"

    @ray.remote
    class Plain(Base):
        @classmethod
        def of_class(cls): return "class"
        @staticmethod
        def static(): return "static"
        def items(self):
            for i in range(3):  # Ray sends things into it, which a `yield from` would have to take
                yield i
        def train(self, i):
            with tracetools.step():
                return forward_backward()

    @ray.remote
    class Async:
        async def wait(self, i):
            await asyncio.sleep(0.001)
            return i
        async def items(self):
            for i in range(3):
                yield i
        async def train(self, i):
            with tracetools.step():
                return forward_backward()

    plain, other = Plain.remote(), Async.remote()
    for i in range(5):
        with tracetools.step():
            assert ray.get([plain.inherited.remote(), plain.of_class.remote(), plain.static.remote()]) == ["inherited", "class", "static"]
            assert [ray.get(x) for x in plain.items.options(num_returns="streaming").remote()] == [0, 1, 2]
            assert ray.get([other.wait.remote(i) for i in range(4)]) == [0, 1, 2, 3]
            assert [ray.get(x) for x in other.items.options(num_returns="streaming").remote()] == [0, 1, 2]
            ray.get([plain.train.remote(i), other.train.remote(i)])
"""


@pytest.mark.xdist_group("ray")
def test_methods_of_real_ray_actors(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    jobs = pytest.importorskip("jobs")
    from tracetools.load import load_run

    found = jobs.record(tmp_path, ACTORS, profile="ray")
    assert found.exit_code == 0
    ranges_of = [
        {p.trace.names[n] for n in p.trace.events.name if p.trace.names[n].startswith("actor/")}
        for p in load_run(found.folder).processes
    ]
    # a class method is bound before Ray sees it, and is left alone
    assert sorted(map(sorted, ranges_of)) == [
        [],
        ["actor/inherited", "actor/items", "actor/static", "actor/train"],
        ["actor/items", "actor/train", "actor/wait"],
    ]
