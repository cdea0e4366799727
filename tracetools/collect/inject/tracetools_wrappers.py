"""The wrappers that are put around functions of the training stack, by kind.

In: a function and the hook's settings. Out: a function that behaves the same and puts ranges into the trace while a recording runs.
Standard library only. Wrappers may be pickled by value into processes that have no recorder (Ray copies classes that way),
so each finds what it needs in sys.modules when it is called, refers to nothing but `sys`, and else is the plain call.
Knows nothing of where the function was found (tracetools_hooks).

A plain function    one range per call
A generator         one range per item it makes, whether that is asked for by next(), send() or throw()
A coroutine         one range per piece that runs between two awaits, on the thread that ran it: tasks of an event loop take
                    turns, and one range from start to end would hold what others did meanwhile
An async generator  the same, for each of its items
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]
Maker = Callable[[Function], Function]


def ranged(function: Function, name: str, described: Function | None = None) -> Function:
    """`described`: the function whose parameters have the names that card rules use, where `function` hides them."""
    if inspect.iscoroutinefunction(function):
        return _coroutine(function, name)
    if inspect.isasyncgenfunction(function):
        return _async_generator(function, name)
    if inspect.isgeneratorfunction(function):
        return _generator(function, name)
    known = described or function
    is_step = _is_step(name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = sys.modules.get("tracetools_recorder")
        if recorder is None or not (recorder.recording or is_step):
            return function(*args, **kwargs)
        return sys.modules["tracetools_ranges"].run(function, name, args, kwargs, known)

    return call


def _is_step(name: str) -> bool:
    """Decided when the function is wrapped: the profile does not change afterwards."""
    ranges = sys.modules.get("tracetools_ranges")
    return ranges is not None and name in ranges.step_names


def _coroutine(function: Function, name: str) -> Function:
    is_step = _is_step(name)

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        recorder = sys.modules.get("tracetools_recorder")
        if recorder is None or not (recorder.recording or is_step):
            return await function(*args, **kwargs)
        return await sys.modules["tracetools_ranges"].Awaited(function(*args, **kwargs), name)

    return call


def _generator(function: Function, name: str) -> Function:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        generator = function(*args, **kwargs)
        if "tracetools_recorder" not in sys.modules:
            return (yield from generator)
        # it may live longer than a recording, or begin before it: each item decides for itself
        return (yield from sys.modules["tracetools_ranges"].resumed(generator, name, items=True))

    return call


def _async_generator(function: Function, name: str) -> Function:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        generator = function(*args, **kwargs)
        ranges = sys.modules.get("tracetools_ranges")
        go, value = generator.asend, None
        while True:
            piece = go(value)
            try:
                item = await (piece if ranges is None else ranges.Awaited(piece, name))
            except StopAsyncIteration:
                return
            try:
                value = yield item
                go = generator.asend
            except GeneratorExit:
                await generator.aclose()
                raise
            except BaseException as error:  # noqa: BLE001  it is the wrapped generator's to handle
                go, value = generator.athrow, error

    return call


def step(function: Function) -> Function:
    """Each call is one step."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        ranges = sys.modules.get("tracetools_ranges")
        if ranges is None:
            return function(*args, **kwargs)
        return ranges.run_step(function, args, kwargs)

    return call


def preceded(function: Function, before: Callable[[], None]) -> Function:
    """`before()` is called first. Only for functions that are never pickled by value."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before()
        return function(*args, **kwargs)

    return call


def factory(function: Function) -> Function:
    """`function(name)` returns a decorator: what it decorates runs in ranges of that name."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        decorator = function(*args, **kwargs)
        name = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(name, str) or not callable(decorator):
            return decorator

        @functools.wraps(decorator)
        def decorate(decorated: Function) -> Any:
            made = decorator(decorated)
            ours = sys.modules.get("tracetools_wrappers")
            if ours is None or not inspect.isfunction(made):
                return made
            return ours.ranged(made, name, decorated)

        return decorate

    return make


# ---------------------------------------------------------------- pairs of functions


def timer_start(function: Function, label: str | None) -> Function:
    """A method start(label, ...), or one whose object has its name in the attribute `label`.

    The range begins when it has returned: one that refuses has started nothing.
    """
    parameter = _second_parameter(function)

    @functools.wraps(function)
    def start(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        recorder = sys.modules.get("tracetools_recorder")
        if recorder is not None:
            ranges = sys.modules["tracetools_ranges"]
            if recorder.recording or ranges.step_names:  # steps count while nothing records, too
                name = _label(label, parameter, args, kwargs)
                if isinstance(name, str) and (recorder.recording or name in ranges.step_names):
                    ranges.start(id(args[0]), name)
        return result

    return start


def timer_stop(function: Function, label: str | None) -> Function:
    """The method stop(label, ...) beside it."""
    parameter = _second_parameter(function)

    @functools.wraps(function)
    def stop(*args: Any, **kwargs: Any) -> Any:
        ranges = sys.modules.get("tracetools_ranges")
        if ranges is not None and ranges.timers:
            ranges.stop(id(args[0]), _label(label, parameter, args, kwargs))
        return function(*args, **kwargs)

    return stop


def _second_parameter(function: Function) -> str | None:
    parameters = list(inspect.signature(function).parameters)
    return parameters[1] if len(parameters) > 1 else None


def _label(attribute: str | None, parameter: str | None, args: Any, kwargs: Any) -> Any:
    if attribute:
        return getattr(args[0], attribute, None)
    return args[1] if len(args) > 1 else kwargs.get(parameter)


def push(function: Function) -> Function:
    """range_push(name)."""

    @functools.wraps(function)
    def range_push(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        recorder = sys.modules.get("tracetools_recorder")
        if recorder is not None and recorder.recording:
            sys.modules["tracetools_ranges"].push(str(args[0] if args else next(iter(kwargs.values()))))
        return result

    return range_push


def pop(function: Function) -> Function:
    """range_pop(), for what `push` has put on this thread."""

    @functools.wraps(function)
    def range_pop(*args: Any, **kwargs: Any) -> Any:
        ranges = sys.modules.get("tracetools_ranges")
        if ranges is not None and ranges.nvtx:
            ranges.pop()
        return function(*args, **kwargs)

    return range_pop


# ---------------------------------------------------------------- Ray


def actor_methods(function: Function, wanted: Callable[[str], object]) -> Function:
    """FunctionActorManager._make_actor_method_executor: the one place in a worker where a method of an actor is bound to be called.

    Patching the class is of no use: Ray copies its methods to another class, which it pickles by value.
    """

    @functools.wraps(function)
    def make_executor(self: Any, method_name: str, method: Function, *args: Any, **kwargs: Any) -> Any:
        # what is bound already (a class method) has another protocol; Ray asks for it by its attributes
        if inspect.isfunction(method) and wanted(method_name):
            method = ranged(method, f"actor/{method_name}")
        return function(self, method_name, method, *args, **kwargs)

    return make_executor
