"""Ranges of the trace, as hooks open and close them.

In: names, from wrapped functions of the training code. Out: spans in the trace that nest on every thread, steps, and what cards need.
Standard library only. Nothing in here raises into the caller: a hook that fails is noted once and left out from then on.
Knows nothing of what is hooked (tracetools_hooks) or how (tracetools_wrappers); spans and steps are the recorder's.

Annotations of one thread must nest, or a trace means nothing. Where training code closes its own names in another order
(a timer stopped while a later one runs), the later range is split: it ends and begins again at that instant.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import tracetools_cards as cards

CALL, TIMER, NVTX = "call", "timer", "nvtx"

step_names: frozenset[str] = frozenset()  # ranges with these names are steps, unless cards.unless says otherwise
timers: dict[tuple[int, str], _Open] = {}  # running, by (timer, label)
nvtx: list[_Open] = []  # pushed, of all threads
failures: dict[str, str] = {}  # name of a range or hook -> the first error in its handling

_local = threading.local()


class _Open:
    """An open range. `stack` holds the open ranges of the thread it was opened on."""

    __slots__ = ("kind", "marker", "name", "noted", "span", "stack", "thread")

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self.thread = threading.get_ident()
        self.stack: list[_Open] = _stack()
        self.span: Any = None
        self.marker: Any = None
        self.noted: Any = None


def _stack() -> list[_Open]:
    try:
        found: list[_Open] = _local.stack
    except AttributeError:
        found = _local.stack = []
    return found


def failed(name: str, error: BaseException) -> None:
    failures.setdefault(name, f"{type(error).__name__}: {error}")


# ---------------------------------------------------------------- ranges of calls


def begin(
    name: str,
    kind: str = CALL,
    arguments: Callable[[], dict[str, Any]] | None = None,
    *,
    quiet: bool = False,
    steps: bool = True,
) -> _Open | None:
    """Open a range on this thread. `arguments()` -> the call's arguments by name.

    `quiet`: keep count of it, show nothing. `steps`: it is a step if the profile says so of its name.
    """
    if name in failures:
        return None
    opened = _Open(name, kind)
    try:
        recorder = sys.modules["tracetools_recorder"]
        if steps and name in step_names and not (arguments and cards.excused(arguments())):
            opened.marker = recorder.enter_step()
        if recorder.recording:
            if arguments is not None and name in cards.watched:
                opened.noted = cards.before(name, arguments, [o.name for o in opened.stack])
            if not quiet:
                opened.span = recorder.region(name)
                opened.span.__enter__()
        opened.stack.append(opened)
        return opened
    except Exception as error:  # noqa: BLE001  the training code has not asked for us
        failed(name, error)
        _leave_step(opened)
        return None


def _leave_step(opened: _Open) -> None:
    if opened.marker is not None:
        marker, opened.marker = opened.marker, None
        sys.modules["tracetools_recorder"].exit_step(marker, {})


def end(opened: _Open | None, result: Any = None, *, raised: bool = False) -> None:
    """Close a range, on whichever thread; what was opened on it in between stays open, as a range of its own from here on."""
    if opened is None:
        return
    try:
        above = _taken_off(opened)
        if opened.thread != threading.get_ident():  # only the thread's own ranges can be split without a race
            above = []
        for inner in reversed(above):
            _close(inner)
        _close(opened)
        if opened.noted is not None and not raised:
            cards.after(opened.noted, result)
        _leave_step(opened)
        if raised:  # nobody pops what was pushed in a call that raised
            for leaked in [o for o in above if o.kind == NVTX]:
                above.remove(leaked)
                opened.stack.remove(leaked)
                nvtx.remove(leaked)
        for inner in above:
            _reopen(inner)
    except Exception as error:  # noqa: BLE001  the training code has not asked for us
        failed(opened.name, error)


def _taken_off(opened: _Open) -> list[_Open]:
    """Take a range off its stack -> what lay above it."""
    stack = opened.stack
    if stack and stack[-1] is opened:
        stack.pop()
        return []
    at = stack.index(opened)
    above = stack[at + 1 :]
    del stack[at]
    return above


def _close(opened: _Open) -> None:
    if opened.span is not None:
        span, opened.span = opened.span, None
        span.__exit__(None, None, None)


def _reopen(opened: _Open) -> None:
    recorder = sys.modules["tracetools_recorder"]
    if recorder.recording:
        opened.span = recorder.region(opened.name)
        opened.span.__enter__()


def run(function: Callable[..., Any], name: str, args: Any, kwargs: Any, described: Callable[..., Any]) -> Any:
    """`function(*args, **kwargs)` in a range. `described`: the function whose parameters have the names."""
    opened = begin(name, arguments=lambda: cards.bound(described, args, kwargs))
    try:
        result = function(*args, **kwargs)
    except BaseException:
        end(opened, raised=True)
        raise
    end(opened, result)
    return result


def run_step(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`function(*args, **kwargs)` as one step."""
    recorder = sys.modules["tracetools_recorder"]
    marker = None
    try:
        marker = recorder.enter_step()
    except Exception as error:  # noqa: BLE001  the training code has not asked for us
        failed("step", error)
    try:
        return function(*args, **kwargs)
    finally:
        if marker is not None:
            try:
                recorder.exit_step(marker, {})
            except Exception as error:  # noqa: BLE001  the training code has not asked for us
                failed("step", error)


# ---------------------------------------------------------------- functions that run in pieces


def resumed(pieces: Any, name: str, *, items: bool) -> Generator[Any, Any, Any]:
    """Drive a generator or a coroutine to its end, with a range around each piece that it runs, on the thread that runs it.

    The time in which it waits for its caller or for the event loop is in no range: others run then.
    `items`: what it yields are results (a generator's), not signs for an event loop.
    """
    recorder = sys.modules["tracetools_recorder"]
    go, value = pieces.send, None
    while True:
        opened = begin(name, arguments=dict, steps=False) if recorder.recording else None
        try:
            item = go(value)
        except StopIteration as done:
            end(opened, None if items else done.value, raised=items)  # `raised`: no item, nothing for a card
            return done.value
        except BaseException:
            end(opened, raised=True)
            raise
        end(opened, item if items else None, raised=not items)
        try:
            value = yield item
            go = pieces.send
        except GeneratorExit:
            pieces.close()
            raise
        except BaseException as error:  # noqa: BLE001  it is the driven function's to handle
            go, value = pieces.throw, error


class Awaited:
    """An awaitable that runs a coroutine by `resumed`. A step lasts from its first piece to its last."""

    __slots__ = ("coroutine", "name")

    def __init__(self, coroutine: Any, name: str) -> None:
        self.coroutine = coroutine
        self.name = name

    def __await__(self) -> Generator[Any, Any, Any]:
        recorder = sys.modules["tracetools_recorder"]
        marker = None
        if self.name in step_names:
            with suppress(Exception):
                marker = recorder.enter_step()
        try:
            return (yield from resumed(self.coroutine, self.name, items=False))
        finally:
            if marker is not None:
                with suppress(Exception):
                    recorder.exit_step(marker, {})


# ---------------------------------------------------------------- names that are started and stopped by hand


def start(timer: int, label: str) -> None:
    """A timer has started a label. It would have refused one that runs: a label that runs here was lost with its timer."""
    key = timer, label
    end(timers.pop(key, None))
    opened = begin(label, TIMER)
    if opened is not None:
        timers[key] = opened


def stop(timer: int, label: Any) -> None:
    """A label that was never started here, or before the recording, does nothing."""
    if isinstance(label, str):
        end(timers.pop((timer, label), None))


def push(name: str) -> None:
    """An NVTX range. One that repeats the range it lies in (of a hooked decorator that pushes it) is not shown twice."""
    stack = _stack()
    opened = begin(name, NVTX, quiet=bool(stack) and stack[-1].name == name)
    if opened is not None:
        nvtx.append(opened)


def pop() -> None:
    """Ends the latest NVTX range of this thread."""
    opened = next((o for o in reversed(_stack()) if o.kind == NVTX), None)
    if opened is not None:
        nvtx.remove(opened)
        end(opened)
