"""What a step worked on, read from arguments and results of hooked functions.

In: the profile's rules, and the calls of ranges that they name. Out: numbers for the step's card, and where each came from.
A path begins with a parameter's name or `result`, goes on with keys, attributes or indices, and ends with functions:
    data.token_mask | skip_first | times data.sample_mask | sum
Calls of one step add up. Of several paths or rules for one number the first in the profile that delivers counts.
Standard library only. A tensor is kept, and read when the recording is over: no operator of ours is in the trace, nobody waits for a
device, and the step does not get longer.
Knows nothing of steps: the recorder asks for the numbers when one ends.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

KEYS = ("tokens", "padded_tokens", "sequences", "microbatches", "sum_squared_lengths")
LARGEST = 1 << 24  # elements of tensors that one number keeps until the end
Path = tuple[
    tuple[str, ...], tuple[tuple[str, ...], ...]
]  # (first name and what follows, functions with their arguments)

unless: tuple[str, ...] = ()  # a call with a true argument of such a name (eval_mode) is no training
watched: dict[str, list[Rule]] = {}  # by name of the range
missed: dict[str, str] = {}  # path -> why it could not be read, once each
_taken: dict[str, dict[tuple[int, int], list[Any]]] = {}  # of the step that runs: number -> path -> one value per call
_sources: dict[tuple[str, tuple[int, int]], str] = {}
_lock = threading.Lock()


class Rule:
    """Numbers of a card that calls of one range deliver."""

    __slots__ = ("order", "paths", "range", "within")

    def __init__(self, order: int, of: str, within: Sequence[str], paths: dict[str, list[str]]) -> None:
        self.order = order
        self.range = of
        self.within = frozenset(within)
        self.paths = {key: [(text, parse(text)) for text in texts] for key, texts in paths.items()}


class Later:
    """What is to be computed from a tensor when nobody waits for it. What was changed since is not what was worked on."""

    __slots__ = ("functions", "tensors", "value", "versions")

    def __init__(self, value: Any, functions: Sequence[tuple[Any, ...]]) -> None:
        self.value = value
        self.functions = functions
        self.tensors = [x for x in (value, *(x for f in functions for x in f[1:])) if _is_tensor(x)]
        self.versions = [x._version for x in self.tensors]

    def read(self) -> float | None:
        if [x._version for x in self.tensors] != self.versions:
            return None
        return _number(_applied(self.value, self.functions))


def install(rules: Sequence[dict[str, Any]], not_with: Sequence[str] = ()) -> None:
    """`rules`: as the launcher writes them, [{"ranges", "within", number: [paths]}]. `not_with`: see `unless`."""
    global unless
    unless = tuple(not_with)
    watched.clear()
    for order, rule in enumerate(rules):
        for of in rule["ranges"]:
            made = Rule(order, of, rule["within"], {k: rule[k] for k in KEYS if k in rule})
            watched.setdefault(of, []).append(made)


def excused(arguments: dict[str, Any]) -> bool:
    return any(arguments.get(name) is True for name in unless)


def parse(text: str) -> Path:
    path, *functions = (part.strip() for part in text.split("|"))
    return tuple(path.split(".")), tuple(tuple(f.split()) for f in functions)


def bound(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by the names of the function's parameters."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return dict(call.arguments)


# ---------------------------------------------------------------- reading


def before(name: str, arguments: Callable[[], dict[str, Any]], around: Sequence[str]) -> Any:
    """Read what the arguments tell, before the call changes them -> for `after`. `around`: the open ranges of the thread."""
    rules = [r for r in watched[name] if not r.within or not r.within.isdisjoint(around)]
    if not rules:
        return None
    names = arguments()
    if excused(names):
        return None
    for rule in rules:
        _read(rule, names, of_result=False)
    return rules, names


def after(noted: Any, result: Any) -> None:
    """Read what the result of the call tells."""
    rules, names = noted
    for rule in rules:
        _read(rule, {**names, "result": result}, of_result=True)


def _read(rule: Rule, names: dict[str, Any], *, of_result: bool) -> None:
    for key, paths in rule.paths.items():
        for at, (text, (steps, functions)) in enumerate(paths):
            if (steps[0] == "result") is not of_result:
                continue
            try:
                value = _value(steps, functions, names)
            except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
                missed.setdefault(f"{rule.range}: {text}", f"{type(error).__name__}: {error}")
                continue
            with _lock:
                _taken.setdefault(key, {}).setdefault((rule.order, at), []).append(value)
                _sources[key, (rule.order, at)] = f"{rule.range}: {text}"
            break


def _value(steps: Sequence[str], functions: Sequence[tuple[str, ...]], names: dict[str, Any]) -> Any:
    found = _followed(steps, names)
    if functions and functions[0] == ("count",):
        return 1
    if functions and functions[0] == ("numel",):  # of the shape alone
        return int(found.numel())
    if functions and functions[0] == ("len",):
        return len(found)
    ready = [(name, *(_followed(path.split("."), names) for path in rest)) for name, *rest in functions]
    later = Later(found, ready)
    if sum(x.numel() for x in later.tensors) > LARGEST:
        raise ValueError(f"more than {LARGEST} elements: too many to keep")
    return later if later.tensors else later.read()


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "_version")


def _followed(steps: Sequence[str], names: dict[str, Any]) -> Any:
    found = names[steps[0]]
    for step in steps[1:]:
        if step.isdigit() and isinstance(found, (list, tuple)):
            found = found[int(step)]
        elif hasattr(found, "keys") and step in found:
            found = found[step]
        else:
            found = getattr(found, step)
    return found


def _array(found: Any) -> Any:
    return found.detach().cpu().numpy() if _is_tensor(found) else found


def _applied(value: Any, functions: Sequence[tuple[Any, ...]]) -> Any:
    value = _array(value)
    for name, *rest in functions:
        if name == "times":
            value = _times(value, _array(rest[0]))
        elif name == "skip_first":
            value = value[..., 1:]
        else:
            value = FUNCTIONS[name](value)
    return value


def _times(value: Any, other: Any) -> Any:
    """Product; an array with fewer dimensions multiplies row by row."""
    return value * (
        other.reshape(other.shape + (1,) * (value.ndim - other.ndim)) if hasattr(other, "reshape") else other
    )


def _flat(value: Any) -> list[Any]:
    """The numbers of an array, or of lists in lists."""
    if hasattr(value, "ravel"):
        flat: list[Any] = value.ravel().tolist()
        return flat
    if _is_tensor(value):
        return _flat(_array(value))
    if isinstance(value, (list, tuple)):
        return [x for part in value for x in _flat(part)]
    return [value]


def _sum(value: Any) -> Any:
    return value.sum() if hasattr(value, "sum") else sum(_flat(value))


def _sum_squares(value: Any) -> Any:
    return sum(x * x for x in _flat(value))


def _mean(value: Any) -> Any:
    numbers = _flat(value)
    return sum(numbers) / len(numbers)


def _largest(value: Any) -> Any:
    return max(_flat(value))


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": _sum,
    "sum_squares": _sum_squares,
    "mean": _mean,
    "max": _largest,
}


def _number(value: Any) -> float:
    """A whole number where it is one."""
    number = float(value)
    return int(number) if number.is_integer() else number


# ---------------------------------------------------------------- the card of a step


def take() -> dict[str, tuple[list[Any], str]]:
    """What was read since the last call: number -> (values of its calls, source). For `resolved`, when there is time."""
    if not _taken:
        return {}
    with _lock:
        out = {}
        for key, by_rule in _taken.items():
            first = min(by_rule)
            out[key] = by_rule[first], _sources[key, first]
        _taken.clear()
    return out


def resolved(taken: dict[str, tuple[list[Any], str]]) -> tuple[dict[str, int], dict[str, str]]:
    """-> (card, sources). A number of which one part cannot be read is left out."""
    card, sources = {}, {}
    for key, (values, source) in taken.items():
        numbers = [v.read() if isinstance(v, Later) else v for v in values]
        if any(n is None for n in numbers):
            missed.setdefault(source, "changed on the device before it was read")
            continue
        card[key] = round(sum(n for n in numbers if n is not None))
        sources[key] = source
    return card, sources
