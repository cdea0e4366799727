"""Stack profile: how one training stack is hooked, named, classified and stepped.

In: the name of a profile that ships with tracetools, or a path to a TOML file. Out: a frozen `StackProfile`.
A profile that `extends` another one is read after it: its rules come first, so they win.
Knows nothing of events or of the recorder that uses the hooks.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from tracetools.errors import UsageError

DEFAULT_PROFILE = "torch"
SUFFIX = ".toml"


@dataclass(frozen=True, slots=True)
class Hook:
    """Wrap `target` ("module:attr.path") in a range named `region` while recording."""

    target: str
    region: str


@dataclass(frozen=True, slots=True)
class Rule:
    """Names that match any of the patterns (re.search) belong to `name`."""

    name: str
    patterns: tuple[re.Pattern[str], ...]

    def matches(self, text: str) -> bool:
        return any(p.search(text) for p in self.patterns)


@dataclass(frozen=True)
class StackProfile:
    """One training stack. Rules are in order: the first that matches wins."""

    name: str
    sha256: str
    step_markers: tuple[re.Pattern[str], ...]
    step_functions: tuple[str, ...]
    hooks: tuple[Hook, ...]
    regions: tuple[Rule, ...]
    not_regions: tuple[re.Pattern[str], ...]
    waits: frozenset[str]  # regions in which a driver waits for its workers
    communication: tuple[re.Pattern[str], ...]
    collectives: tuple[re.Pattern[str], ...]  # operators and annotations that are collectives, for CPU-only timelines
    kernel_classes: tuple[Rule, ...]
    operator_classes: tuple[Rule, ...]
    sync_calls: tuple[re.Pattern[str], ...]
    graph_launches: tuple[re.Pattern[str], ...]
    launch_calls: tuple[re.Pattern[str], ...]

    @cached_property
    def _memo(self) -> dict[tuple[str, str], str | None]:
        return {}

    def region_of(self, name: str) -> str | None:
        """The region that an annotation or operator of this name is, by the rules alone."""
        return self._first("region", name, self.regions)

    def kernel_class_of(self, name: str) -> str:
        """The class of a kernel; `other` where no rule matches."""
        return self._first("kernel", name, self.kernel_classes) or "other"

    def operator_class_of(self, name: str) -> str:
        """The class of a host operator in a CPU-only run; `other` where no rule matches."""
        return self._first("operator", name, self.operator_classes) or "other"

    def _first(self, kind: str, name: str, rules: Iterable[Rule]) -> str | None:
        key = kind, name
        if key not in self._memo:
            self._memo[key] = next((r.name for r in rules if r.matches(name)), None)
        return self._memo[key]


def any_match(patterns: Iterable[re.Pattern[str]], text: str) -> bool:
    return any(p.search(text) for p in patterns)


def shipped() -> Traversable:
    """The folder of profiles: in the wheel, or beside the package in a checkout."""
    try:
        return files("tracetools.profiles")
    except ModuleNotFoundError:
        return Path(__file__).resolve().parents[1] / "profiles"


def profile_names() -> list[str]:
    return sorted(f.name.removesuffix(SUFFIX) for f in shipped().iterdir() if f.name.endswith(SUFFIX))


def load_profile(name: str | Path = DEFAULT_PROFILE) -> StackProfile:
    """By name (`nemo-rl` and `nemo_rl` are the same) or by path. Raises UsageError naming file and key."""
    text, source = _read(name)
    tables = [_parse(text, source)]
    texts = [text]
    while (parent := tables[-1].get("extends")) is not None:
        if len(tables) > 8:
            raise UsageError(f"{source}: key `extends`: the profiles extend each other in a circle.")
        text, parent_source = _read(str(parent))
        texts.append(text)
        tables.append(_parse(text, parent_source))
    return _build(tables, hashlib.sha256("\0".join(texts).encode()).hexdigest(), source)


def _read(name: str | Path) -> tuple[str, str]:
    as_path = Path(name)
    if as_path.suffix == SUFFIX or as_path.parent != Path():
        try:
            return as_path.read_text(encoding="utf-8"), str(as_path)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{as_path}: the stack profile cannot be read: {error}.") from error
    file = shipped() / (str(name).replace("-", "_") + SUFFIX)
    if not file.is_file():
        raise UsageError(
            f"no stack profile named {name!r}. There are: {', '.join(profile_names())}; or give the path of a .toml file."
        )
    return file.read_text(encoding="utf-8"), f"profiles/{file.name}"


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source}: not valid TOML: {error}.") from error


def _build(tables: list[dict[str, Any]], sha256: str, source: str) -> StackProfile:
    """`tables`: the profile itself, then what it extends."""

    def patterns(section: str, key: str) -> tuple[re.Pattern[str], ...]:
        found = [_strings(t.get(section, {}), key, source, section) for t in tables]
        return tuple(_pattern(p, source, f"{section}.{key}") for ps in found for p in ps)

    def rules(section: str) -> tuple[Rule, ...]:
        rows = [row for t in tables for row in _rows(t, section, source)]
        return tuple(
            Rule(
                _string(r, "name", source, section),
                tuple(_pattern(p, source, f"{section}.match") for p in _strings(r, "match", source, section)),
            )
            for r in rows
        )

    hooks = [
        Hook(_string(r, "target", source, "hook"), _string(r, "region", source, "hook"))
        for t in tables
        for r in _rows(t, "hook", source)
    ]
    functions = [f for t in tables for f in _strings(t.get("step", {}), "functions", source, "step")]
    for target in [h.target for h in hooks] + functions:
        if target.count(":") != 1:
            raise UsageError(f"{source}: hook target {target!r}: write it as module:attribute, e.g. 'ray:get'.")
    return StackProfile(
        name=_string(tables[0], "name", source, "the file"),
        sha256=sha256,
        step_markers=patterns("step", "markers"),
        step_functions=tuple(functions),
        hooks=tuple(hooks),
        regions=rules("region"),
        not_regions=patterns("annotations", "ignore"),
        waits=frozenset(w for t in tables for w in _strings(t.get("driver", {}), "waits", source, "driver")),
        communication=patterns("device", "communication"),
        collectives=patterns("host", "collectives"),
        kernel_classes=rules("kernel_class"),
        operator_classes=rules("operator_class"),
        sync_calls=patterns("host", "sync_calls"),
        graph_launches=patterns("device", "graph_launches"),
        launch_calls=patterns("device", "launch_calls"),
    )


def _rows(table: Mapping[str, Any], section: str, source: str) -> list[Mapping[str, Any]]:
    rows = table.get(section, [])
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise UsageError(f"{source}: key `{section}`: write each entry under its own [[{section}]].")
    return rows


def _string(row: Mapping[str, Any], key: str, source: str, section: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise UsageError(f"{source}: `{key}` of [{section}] is missing or not a text.")
    return value


def _strings(row: Mapping[str, Any], key: str, source: str, section: str) -> list[str]:
    value = row.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise UsageError(f"{source}: `{key}` of [{section}] must be a list of texts.")
    return value


def _pattern(text: str, source: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise UsageError(f"{source}: key `{key}`: {text!r} is not a regular expression: {error}.") from error
