"""Stack profile: how one training stack is hooked, named, classified and stepped.

In: the name of a profile that ships with tracetools, or a path to a TOML file. Out: a frozen `StackProfile`.
A profile that `extends` another one is read after it: its rules come first, so they win.
Knows nothing of events, or of the recorder that uses the hooks. The keys of the file, and what is wrong with one: profilefile.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from tracetools.errors import UsageError
from tracetools.profilefile import ProfileFile, parse_profile

DEFAULT_PROFILE = "torch"
SUFFIX = ".toml"


@dataclass(frozen=True, slots=True)
class Hook:
    """What is wrapped at `target` ("module:attr.path"), and how. Keys that a kind has no use for are empty."""

    target: str
    kind: str = "call"
    region: str = ""
    range: str = ""  # name in the trace
    also: tuple[str, ...] = ()
    end: str = ""
    label: str | None = None
    methods: tuple[str, ...] = ()
    optional: bool = False  # known to be missing in some of the releases that the profile is for


@dataclass(frozen=True, slots=True)
class CardRule:
    """Where numbers of a card are found in the calls of ranges: number -> paths, the first that delivers counts."""

    ranges: tuple[str, ...]
    within: tuple[str, ...]
    paths: Mapping[str, tuple[str, ...]]


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
    step_ranges: tuple[str, ...]  # a hooked range with such a name is a step ...
    step_unless: tuple[str, ...]  # ... unless its call has a true argument of such a name
    hooks: tuple[Hook, ...]
    cards: tuple[CardRule, ...]
    roles: tuple[Rule, ...]  # of Ray actors, by the name of their class
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

    def for_recorder(self) -> dict[str, Any]:
        """What the recorder inside a training process needs of the profile, ready for JSON."""
        return {
            "hooks": [asdict(h) for h in self.hooks],
            "step_functions": list(self.step_functions),
            "step_ranges": list(self.step_ranges),
            "step_unless": list(self.step_unless),
            "cards": [{"ranges": c.ranges, "within": c.within, **c.paths} for c in self.cards],
            "roles": [[r.name, [p.pattern for p in r.patterns]] for r in self.roles],
        }


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
    """By name (`nemo-rl` and `nemo_rl` are the same) or by path. Raises UsageError naming file, line and key."""
    text, source = _read(name)
    found = [parse_profile(text, source)]
    while (parent := found[-1].text("extends")) is not None:
        if len(found) > 8:
            raise found[0].error("extends", "the profiles extend each other in a circle")
        found.append(parse_profile(*_read(parent)))
    return _build(found, hashlib.sha256("\0".join(f.source_text for f in found).encode()).hexdigest())


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


def _build(found: list[ProfileFile], sha256: str) -> StackProfile:
    """`found`: the profile itself, then what it extends."""

    def patterns(section: str, key: str) -> tuple[re.Pattern[str], ...]:
        return tuple(p for f in found for p in f.patterns(section, None, key))

    def texts(section: str, key: str) -> tuple[str, ...]:
        return tuple(t for f in found for t in f.texts(section, None, key))

    def rules(section: str) -> tuple[Rule, ...]:
        return tuple(
            Rule(f.required(section, i, "name"), tuple(f.patterns(section, i, "match")))
            for f in found
            for i in f.entries(section)
        )

    hooks = tuple(_hook(f, i) for f in found for i in f.entries("hook"))
    named = {
        h.range: h.region for h in hooks if h.range and h.range != h.region
    }  # ranges that say more than the region
    return StackProfile(
        name=found[0].required("", None, "name"),
        sha256=sha256,
        step_markers=patterns("step", "markers"),
        step_functions=tuple(
            f.target("step", None, "functions", t) for f in found for t in f.texts("step", None, "functions")
        ),
        step_ranges=texts("step", "ranges"),
        step_unless=texts("step", "unless"),
        hooks=hooks,
        cards=tuple(_card(f, i) for f in found for i in f.entries("card")),
        roles=rules("role"),
        regions=(*(Rule(region, (re.compile(f"^{re.escape(n)}$"),)) for n, region in named.items()), *rules("region")),
        not_regions=patterns("annotations", "ignore"),
        waits=frozenset(texts("driver", "waits")),
        communication=patterns("device", "communication"),
        collectives=patterns("host", "collectives"),
        kernel_classes=rules("kernel_class"),
        operator_classes=rules("operator_class"),
        sync_calls=patterns("host", "sync_calls"),
        graph_launches=patterns("device", "graph_launches"),
        launch_calls=patterns("device", "launch_calls"),
    )


def _hook(file: ProfileFile, i: int) -> Hook:
    kind = file.kind_of_hook(i)
    region = file.required("hook", i, "region") if kind == "call" else ""
    end = {"timer": "stop", "nvtx": "range_pop"}.get(kind, "")
    return Hook(
        target=file.target("hook", i, "target", file.required("hook", i, "target")),
        kind=kind,
        region=region,
        range=file.one("hook", i, "range") or region,
        also=tuple(file.target("hook", i, "also", t) for t in file.texts("hook", i, "also")),
        end=file.one("hook", i, "end") or end,
        label=file.one("hook", i, "label"),
        methods=tuple(p.pattern for p in file.patterns("hook", i, "methods")),
        optional=file.flag("hook", i, "optional"),
    )


def _card(file: ProfileFile, i: int) -> CardRule:
    return CardRule(
        ranges=tuple(file.texts("card", i, "ranges", needed=True)),
        within=tuple(file.texts("card", i, "within")),
        paths=file.paths_of_card(i),
    )
