"""Wrap functions of the training stack when their modules are imported.

In: targets ("module:attribute.path") and, for each, what to wrap it with. Out: the wrapped functions, and a record of which targets were
wrapped and which were missed, with the reason. Standard library only. A wrapped function keeps its name, signature,
result and exceptions. Knows nothing of profilers: `around(label)` is given.
"""

import functools
import importlib.abc
import inspect
import sys

MARK = "__tracetools_hook__"

wrapped = []  # targets
missed = []  # (target, why)


class Target:
    """One function to wrap: `make(function)` returns the wrapper."""

    def __init__(self, target, make):
        self.name = target
        self.module, _, path = target.partition(":")
        self.path = path.split(".")
        self.make = make

    def apply(self, module):
        try:
            self._apply(module)
        except (AttributeError, TypeError) as error:
            missed.append((self.name, f"{type(error).__name__}: {error}"))
        else:
            wrapped.append(self.name)

    def _apply(self, module):
        owner = module
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
        home = sys.modules.get(getattr(function, "__module__", None) or "")
        if (
            home is not None
            and home is not module
            and getattr(home, getattr(function, "__qualname__", ""), None) is function
        ):
            setattr(home, function.__qualname__, wrapper)


def ranged(around):
    """A maker of wrappers that run the function inside `around()`, which returns a context manager or None."""

    def make(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            context = around()
            if context is None:
                return function(*args, **kwargs)
            with context:
                return function(*args, **kwargs)

        return call

    return make


def preceded(before):
    """A maker of wrappers that call `before()` first."""

    def make(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            before()
            return function(*args, **kwargs)

        return call

    return make


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules that have targets, by asking everybody else, and sees to it that they are hooked once executed."""

    def __init__(self, by_module):
        self.by_module = by_module

    def find_spec(self, fullname, path=None, target=None):
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

    def __init__(self, real, targets):
        self.real = real
        self.targets = targets

    def create_module(self, spec):
        return self.real.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = self.real
        if module.__spec__ is not None:
            module.__spec__.loader = self.real
        self.real.exec_module(module)
        for target in self.targets:
            target.apply(module)


def install(targets):
    """Wrap what is imported already, and the rest when it is."""
    by_module = {}
    for target in targets:
        by_module.setdefault(target.module, []).append(target)
    sys.meta_path.insert(0, _Finder(by_module))
    for name, waiting in by_module.items():
        if name in sys.modules:
            for target in waiting:
                target.apply(sys.modules[name])


def status(targets):
    """What became of the targets: missed ones include those whose module was never imported."""
    done = set(wrapped) | {name for name, _ in missed}
    absent = [(t.name, "module not imported") for t in targets if t.name not in done]
    return {"wrapped": sorted(set(wrapped)), "missed": [list(m) for m in missed + absent]}
