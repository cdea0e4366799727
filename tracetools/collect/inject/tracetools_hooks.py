"""Find the functions that a profile names, when their modules are imported, and put wrappers around them.

In: targets ("module:attribute.path") and the kind of wrapper for each. Out: the wrapped functions, and a record of which targets were
wrapped and which were missed, with the reason. Standard library only. Knows nothing of profilers, or of what a wrapper does.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import tracetools_ranges as ranges
import tracetools_wrappers as wrappers

Function = Callable[..., Any]
Maker = Callable[[Function], Function]

wrapped: list[str] = []  # targets
missed: list[tuple[str, str]] = []  # (target, why)
_ours: dict[int, tuple[Function, str]] = {}  # wrappers by id, kept alive, and what they do


class Target:
    """One function to wrap: `make(function)` returns the wrapper. `also`: modules that hold it under a name of their own."""

    def __init__(self, target: str, make: Maker, does: str, also: Sequence[str] = ()) -> None:
        self.name = target
        self.module, _, path = target.partition(":")
        self.path = path.split(".")
        self.make = make
        self.does = does  # two targets that reach the same function to do the same wrap it once
        self.also = {m: n for m, _, n in (a.partition(":") for a in also)}
        self.original: Function | None = None
        self.wrapper: Function | None = None

    def apply(self, imported: str, module: ModuleType) -> None:
        """Called with the target's own module, and with those of `also`, under the names they were imported by."""
        try:
            if imported == self.module:
                self._apply(module)
                wrapped.append(self.name)
            for other, name in self.also.items():
                if other in sys.modules:
                    self._replace(sys.modules[other], name)
        except (AttributeError, TypeError, ValueError) as error:
            missed.append((self.name, f"{type(error).__name__}: {error}"))

    def _apply(self, module: ModuleType) -> None:
        owner: Any = module
        for part in self.path[:-1]:
            owner = getattr(owner, part)
        name = self.path[-1]
        try:
            found = inspect.getattr_static(owner, name)
        except AttributeError:
            raise AttributeError(f"{'.'.join([self.module, *self.path[:-1]])} has no attribute {name!r}") from None
        if isinstance(owner, type) and name not in vars(owner):
            raise AttributeError(f"{self.path[-2]} does not define {name} itself: hook the class that does")
        kind = type(found) if isinstance(found, (staticmethod, classmethod)) else None
        function = found.__func__ if kind else found
        if _ours.get(id(function), (None, ""))[1] == self.does:
            return
        if not callable(function):
            raise TypeError(f"{name} is not callable")
        wrapper = self.make(function)
        _ours[id(wrapper)] = wrapper, self.does
        self.original, self.wrapper = function, wrapper
        setattr(owner, name, kind(wrapper) if kind else wrapper)
        # a re-export (ray.get): also where it is defined, or pickle would not find it under its own name
        home = sys.modules.get(getattr(function, "__module__", None) or "")
        if home is not None and home is not module:
            self._replace(home, getattr(function, "__qualname__", ""))

    def _replace(self, module: ModuleType, name: str) -> None:
        """In a module that holds the very function that was wrapped."""
        if self.original is not None and getattr(module, name, None) is self.original:
            setattr(module, name, self.wrapper)


def targets(config: dict[str, Any]) -> list[Target]:
    """From the launcher's configuration: `hooks` and `step_functions`."""
    made = [Target(t, wrappers.step, "step") for t in config["step_functions"]]
    for hook in config["hooks"]:
        made += MAKERS[hook["kind"]](hook)
    return made


def _call(hook: dict[str, Any]) -> list[Target]:
    name = hook["range"]
    return [Target(hook["target"], partial(wrappers.ranged, name=name), name, hook["also"])]


def _factory(hook: dict[str, Any]) -> list[Target]:
    return [Target(hook["target"], wrappers.factory, "factory", hook["also"])]


def _timer(hook: dict[str, Any]) -> list[Target]:
    label = hook["label"]
    return [
        Target(hook["target"], partial(wrappers.timer_start, label=label), "start"),
        Target(_beside(hook), partial(wrappers.timer_stop, label=label), "stop"),
    ]


def _nvtx(hook: dict[str, Any]) -> list[Target]:
    return [Target(hook["target"], wrappers.push, "push"), Target(_beside(hook), wrappers.pop, "pop")]


def _actor_methods(hook: dict[str, Any]) -> list[Target]:
    wanted = partial(_wanted, tuple(map(re.compile, hook["methods"])))
    return [Target(hook["target"], partial(wrappers.actor_methods, wanted=wanted), "actor methods")]


def _wanted(patterns: tuple[re.Pattern[str], ...], method: str) -> bool:
    """Ray's own methods begin with __ray."""
    return not method.startswith("__ray") and (not patterns or any(p.search(method) for p in patterns))


def _beside(hook: dict[str, Any]) -> str:
    """The target's partner: the attribute `end` of the same module or class."""
    target: str = hook["target"]
    module, _, path = target.partition(":")
    return module + ":" + ".".join([*path.split(".")[:-1], hook["end"]])


MAKERS: dict[str, Callable[[dict[str, Any]], list[Target]]] = {
    "call": _call,
    "factory": _factory,
    "timer": _timer,
    "nvtx": _nvtx,
    "actor_methods": _actor_methods,
}


def preceded(target: str, before: Callable[[], None]) -> Target:
    """A target that calls `before()` first."""
    return Target(target, partial(wrappers.preceded, before=before), f"before {id(before)}")


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
                    spec.loader = _Loader(spec.loader, fullname, self.by_module[fullname])
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Executes the module with its real loader, which it puts back first: inspect, pickle and importlib.resources look at it."""

    def __init__(self, real: Any, name: str, targets: list[Target]) -> None:
        self.real = real
        self.name = name
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
            target.apply(self.name, module)


def install(found: Iterable[Target]) -> None:
    """Wrap what is imported already, and the rest when it is."""
    by_module: dict[str, list[Target]] = {}
    for target in found:
        for module in dict.fromkeys([target.module, *target.also]):
            by_module.setdefault(module, []).append(target)
    sys.meta_path.insert(0, _Finder(by_module))
    for name, waiting in by_module.items():
        if name in sys.modules:
            for target in waiting:
                target.apply(name, sys.modules[name])


def status(found: Iterable[Target]) -> dict[str, Any]:
    """What became of the targets: missed ones include those whose module was never imported. `failed`: ranges whose hook gave up."""
    done = set(wrapped) | {name for name, _ in missed}
    absent = [(t.name, "module not imported") for t in found if t.name not in done]
    return {
        "wrapped": sorted(set(wrapped)),
        "missed": [list(m) for m in missed + absent],
        "failed": [list(f) for f in sorted(ranges.failures.items())],
    }
