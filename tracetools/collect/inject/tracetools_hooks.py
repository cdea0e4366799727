"""Wrap functions of the training stack when their modules are imported.

In: targets ("module:attribute.path") and, for each, what to wrap it with. Out: the wrapped functions, and a record of which targets were
wrapped and which were missed, with the reason. Standard library only. A wrapped function keeps its name, signature,
result and exceptions. Knows nothing of profilers: `around(label)` is given.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

MARK = "__tracetools_hook__"

Function = Callable[..., Any]
Maker = Callable[[Function], Function]

wrapped: list[str] = []  # targets
missed: list[tuple[str, str]] = []  # (target, why)


class Target:
    """One function to wrap: `make(function)` returns the wrapper."""

    def __init__(self, target: str, make: Maker) -> None:
        self.name = target
        self.module, _, path = target.partition(":")
        self.path = path.split(".")
        self.make = make

    def apply(self, module: ModuleType) -> None:
        try:
            self._apply(module)
        except (AttributeError, TypeError) as error:
            missed.append((self.name, f"{type(error).__name__}: {error}"))
        else:
            wrapped.append(self.name)

    def _apply(self, module: ModuleType) -> None:
        owner: Any = module
        for part in self.path[:-1]:
            owner = getattr(owner, part)
        name = self.path[-1]
        found = inspect.getattr_static(owner, name)
        if isinstance(owner, type) and name not in vars(owner):
            raise AttributeError(f"{self.path[-2]} does not define {name} itself: hook the class that does")
        kind = type(found) if isinstance(found, (staticmethod, classmethod)) else None
        function = found.__func__ if kind else found
        if getattr(function, MARK, False):
            return
        if not callable(function):
            raise TypeError(f"{name} is not callable")
        if (
            inspect.iscoroutinefunction(function)
            or inspect.isgeneratorfunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise TypeError(f"{name} is a coroutine or generator function, which a range cannot enclose")
        wrapper = self.make(function)
        setattr(wrapper, MARK, True)
        setattr(owner, name, kind(wrapper) if kind else wrapper)
        # a re-export (ray.get): also where it is defined, or pickle would not find it under its own name
        own_name = getattr(function, "__qualname__", "")
        home = sys.modules.get(getattr(function, "__module__", None) or "")
        if home is not None and home is not module and getattr(home, own_name, None) is function:
            setattr(home, own_name, wrapper)


def ranged(around: Callable[[], AbstractContextManager[Any] | None]) -> Maker:
    """A maker of wrappers that run the function inside `around()`, which returns a context manager or None."""

    def make(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            context = around()
            if context is None:
                return function(*args, **kwargs)
            with context:
                return function(*args, **kwargs)

        return call

    return make


def preceded(before: Callable[[], None]) -> Maker:
    """A maker of wrappers that call `before()` first."""

    def make(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before()
            return function(*args, **kwargs)

        return call

    return make


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules that have targets, by asking everybody else, and sees to it that they are hooked once executed."""

    def __init__(self, by_module: dict[str, list[Target]]) -> None:
        self.by_module = by_module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.by_module:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self.by_module[fullname])
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Executes the module with its real loader, which it puts back first: inspect, pickle and importlib.resources look at it."""

    def __init__(self, real: Any, targets: list[Target]) -> None:
        self.real = real
        self.targets = targets

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.real.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.real
        if module.__spec__ is not None:
            module.__spec__.loader = self.real
        self.real.exec_module(module)
        for target in self.targets:
            target.apply(module)


def install(targets: Iterable[Target]) -> None:
    """Wrap what is imported already, and the rest when it is."""
    by_module: dict[str, list[Target]] = {}
    for target in targets:
        by_module.setdefault(target.module, []).append(target)
    sys.meta_path.insert(0, _Finder(by_module))
    for name, waiting in by_module.items():
        if name in sys.modules:
            for target in waiting:
                target.apply(sys.modules[name])


def status(targets: Iterable[Target]) -> dict[str, Any]:
    """What became of the targets: missed ones include those whose module was never imported."""
    done = set(wrapped) | {name for name, _ in missed}
    absent = [(t.name, "module not imported") for t in targets if t.name not in done]
    return {"wrapped": sorted(set(wrapped)), "missed": [list(m) for m in missed + absent]}
