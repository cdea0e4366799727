"""The text of one stack profile: which keys there are, what they hold, and what to say of one that is wrong.

In: TOML text and the name of its file. Out: a `ProfileFile`, whose values are checked when they are asked for; keys that nobody knows
are refused at once. Every error names file, line and key. Knows nothing of what the values are for.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracetools.errors import UsageError

CARD_NUMBERS = ("tokens", "padded_tokens", "sequences", "microbatches", "sum_squared_lengths")
# what each kind of hook may say besides its target
HOOK_KINDS: Mapping[str, tuple[str, ...]] = {
    "call": ("region", "range", "also", "optional"),
    "factory": ("also", "optional"),
    "timer": ("end", "label", "optional"),
    "nvtx": ("end", "optional"),
    "actor_methods": ("methods", "optional"),
}
PATH_FUNCTIONS = ("sum", "sum_squares", "mean", "max", "len", "numel", "count", "skip_first", "times")
_RULE = ("name", "match")
KEYS: Mapping[str, tuple[str, ...]] = {
    "": ("name", "extends"),
    "step": ("markers", "functions", "ranges", "unless"),
    "annotations": ("ignore",),
    "driver": ("waits",),
    "host": ("collectives", "sync_calls"),
    "device": ("communication", "graph_launches", "launch_calls"),
    "hook": ("target", "kind", *dict.fromkeys(k for keys in HOOK_KINDS.values() for k in keys)),
    "card": ("ranges", "within", *CARD_NUMBERS),
    "role": _RULE,
    "region": _RULE,
    "kernel_class": _RULE,
    "operator_class": _RULE,
}
LISTS = ("hook", "card", "role", "region", "kernel_class", "operator_class")  # sections written [[section]]
_HEADER = re.compile(r"^\s*\[(\[?)\s*([\w.-]+)\s*\]")
_KEY = re.compile(r"^\s*([\w-]+)\s*=")
Place = tuple[str, int | None, str]  # section, number of the entry, key; "" stands for the section itself


@dataclass(frozen=True)
class ProfileFile:
    """One file. Values are asked for by section, number of the entry (None: the section is no list) and key."""

    source: str
    source_text: str
    table: Mapping[str, Any]
    lines: Mapping[Place, int]

    def error(self, key: str, what: str, section: str = "", i: int | None = None) -> UsageError:
        line = self.lines.get((section, i, key)) or self.lines.get((section, i, ""))
        where = f"{self.source}:{line}" if line else self.source
        return UsageError(f"{where}: key `{section + '.' if section and key else section}{key}`: {what}.")

    def entries(self, section: str) -> range:
        return range(len(self.table.get(section, ())))

    def _row(self, section: str, i: int | None) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.table if not section else self.table.get(section, {})
        return found if i is None else found[i]  # type: ignore[index]  # a list of tables then

    def text(self, key: str) -> str | None:
        return self.one("", None, key)

    def one(self, section: str, i: int | None, key: str) -> str | None:
        value = self._row(section, i).get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.error(key, f"{value!r} is not a text", section, i)
        return value

    def flag(self, section: str, i: int | None, key: str) -> bool:
        value = self._row(section, i).get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r} is neither true nor false", section, i)
        return value

    def required(self, section: str, i: int | None, key: str) -> str:
        value = self.one(section, i, key)
        if value is None:
            raise self.error(key, f"is missing in {f'[{section}]' if section else 'the file'}", section, i)
        return value

    def texts(self, section: str, i: int | None, key: str, *, needed: bool = False) -> Sequence[str]:
        value = self._row(section, i).get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.error(key, "must be a list of texts", section, i)
        if needed and not value:
            raise self.error(key, f"is missing in [{section}], or empty", section, i)
        return value

    def patterns(self, section: str, i: int | None, key: str) -> Iterator[re.Pattern[str]]:
        for text in self.texts(section, i, key):
            try:
                yield re.compile(text, re.IGNORECASE)
            except re.error as error:
                raise self.error(key, f"{text!r} is not a regular expression: {error}", section, i) from error

    def target(self, section: str, i: int | None, key: str, text: str) -> str:
        module, colon, path = text.partition(":")
        if not colon or not all(p.isidentifier() for p in [*module.split("."), *path.split(".")]):
            raise self.error(key, f"{text!r}: write it as module:attribute, e.g. 'ray:get'", section, i)
        return text

    def kind_of_hook(self, i: int) -> str:
        """Also sees to it that the entry has no key that its kind has no use for."""
        kind = self.one("hook", i, "kind") or "call"
        if kind not in HOOK_KINDS:
            raise self.error(
                "kind", f"{kind!r} is none of {', '.join(HOOK_KINDS)}{_nearest(kind, HOOK_KINDS)}", "hook", i
            )
        for key in self._row("hook", i):
            if key not in ("target", "kind", *HOOK_KINDS[kind]):
                raise self.error(key, f"a hook of kind {kind!r} has no such key", "hook", i)
        return kind

    def paths_of_card(self, i: int) -> Mapping[str, tuple[str, ...]]:
        found = {key: tuple(self.texts("card", i, key)) for key in CARD_NUMBERS if key in self._row("card", i)}
        if not found:
            raise self.error("", f"names no number; there are {', '.join(CARD_NUMBERS)}", "card", i)
        for key, paths in found.items():
            for path in paths:
                if fault := _path_fault(path):
                    raise self.error(key, f"{path!r}: {fault}", "card", i)
        return found


def parse_profile(text: str, source: str) -> ProfileFile:
    """Raises UsageError for what is no TOML, and for sections and keys that do not exist."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source}: not valid TOML: {error}.") from error
    found = ProfileFile(source, text, table, _places(text))
    for name, value in table.items():
        _check(found, name, value)
    return found


def _check(file: ProfileFile, name: str, value: object) -> None:
    if name in KEYS[""]:
        return
    if name not in KEYS:
        kind = "section" if isinstance(value, (dict, list)) else "key"
        line_key = ("", name) if isinstance(value, dict) else (name, "")
        known = [*KEYS[""], *(k for k in KEYS if k)]
        raise file.error(line_key[0], f"there is no {kind} {name!r}{_nearest(name, known)}", line_key[1], None)
    if name in LISTS:
        if not isinstance(value, list) or not all(isinstance(r, dict) for r in value):
            raise file.error(name, f"write each entry under its own [[{name}]]")
        rows: list[tuple[int | None, dict[str, Any]]] = list(enumerate(value))
    elif not isinstance(value, dict):
        raise file.error(name, f"write its keys under [{name}]")
    else:
        rows = [(None, value)]
    for i, row in rows:
        for key in row:
            if key not in KEYS[name]:
                raise file.error(key, f"[{name}] has no such key{_nearest(key, KEYS[name])}", name, i)


def _nearest(word: str, known: Sequence[str] | Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


def _places(text: str) -> dict[Place, int]:
    """Line of every key and of every section's header, from 1."""
    lines: dict[Place, int] = {}
    counts: dict[str, int] = {}
    section, entry = "", None
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = header[2]
            entry = counts.get(section, 0) if header[1] else None
            counts[section] = counts.get(section, 0) + 1
            lines.setdefault((section, entry, ""), number)
        elif key := _KEY.match(line):
            lines.setdefault((section, entry, key[1]), number)
    return lines


def _path_fault(path: str) -> str | None:
    """What is wrong with a path of a card rule; None for a good one."""
    first, *functions = (part.strip() for part in path.split("|"))
    if not all(re.fullmatch(r"\w+", word) for word in first.split(".")):
        return "begin with a parameter's name or `result`, then keys or attributes, with a dot between them"
    for function in functions:
        name, *rest = function.split() or [""]
        if name not in PATH_FUNCTIONS:
            return f"there is no function {name!r}{_nearest(name, PATH_FUNCTIONS)}"
        if bool(rest) != (name == "times"):
            return f"`{name}` takes {'the path of what to multiply by' if name == 'times' else 'nothing behind it'}"
    return None
