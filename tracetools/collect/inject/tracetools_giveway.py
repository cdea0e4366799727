"""The job's own torch profiler comes first: torch has room for one, and ends the process where two meet.

In: torch's own methods that prepare and end a profiler. Out: the same, with our recording stopped before theirs begins, and the
knowledge whether theirs is there. Standard library only. Nothing in here raises into the training code.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import tracetools_hooks as hooks

WHY = "the job started a torch profiler of its own"

theirs: set[int] = set()  # ids of the profilers that the job has prepared and not ended
_thread = threading.local()  # .ours: it is we who call


def targets(current: Callable[[], Any]) -> list[hooks.Target]:
    """`current()`: the Recorder of this process, or None."""
    module = "torch.autograd.profiler"
    return [
        hooks.Target(f"{module}:profile._prepare_trace", functools.partial(_begins, current=current), "give way"),
        hooks.Target(f"{module}:profile.__exit__", _ends, "take turns"),
    ]


@contextmanager
def ours() -> Iterator[None]:
    """Around our own use of torch's profiler."""
    _thread.ours = True
    try:
        yield
    finally:
        _thread.ours = False


def _begins(function: Callable[..., Any], current: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(_thread, "ours", False):
            theirs.add(id(self))
            with suppress(Exception):
                recorder = current()
                if recorder is not None:
                    recorder.give_way(WHY)
        return function(self, *args, **kwargs)

    return prepare


def _ends(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def leave(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        finally:
            theirs.discard(id(self))

    return leave
