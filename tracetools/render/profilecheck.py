"""What `tracetools profiles check` found, as text and as JSON.

In: a finished `Checked`. Out: lines for a terminal; bytes of JSON (schema tracetools.profiles.check/1). Looks nothing up itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from tracetools.collect.check import SCHEMA, Checked, Target


def check_lines(checked: Checked) -> Iterator[str]:
    """Targets that are there are counted, all others named, those that matter first."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(checked.versions.items()))
    yield f"profile {checked.profile} in {checked.python}: {versions}"
    there = [t for t in checked.targets if t.ok]
    unseen = [t for t in there if t.detail]
    yield f"{len(there)} of {len(checked.targets)} targets found" + (
        f", {len(unseen)} of them only in the source" if unseen else ""
    )
    for why in dict.fromkeys(_reason(t.detail) for t in unseen):
        yield f"  from the source: {why}"
    yield from _gone("gone", list(checked.faults))
    yield from _gone("not in this release, which the profile knows", [t for t in _missing(checked) if t.optional])
    packages: dict[str, int] = {}
    for t in checked.targets:
        if t.status == "no package":
            packages[t.detail] = packages.get(t.detail, 0) + 1
    for detail, count in packages.items():
        yield f"not looked at: {count} target{'s' * (count > 1)}, {detail}"


def _missing(checked: Checked) -> list[Target]:
    return [t for t in checked.targets if not t.ok and t.status != "no package"]


def _reason(detail: str) -> str:
    """The part behind the module's name: the same for many targets."""
    return detail.partition(": ")[2] or detail


def _gone(title: str, targets: list[Target]) -> Iterator[str]:
    if targets:
        yield f"{title}:"
    for t in targets:
        yield f"  {t.target}"
        yield f"      {t.detail}"
        if t.instead:
            yield f"      now probably {' or '.join(t.instead)}"


def check_json(checked: Checked) -> bytes:
    record = {
        "schema": SCHEMA,
        "profile": checked.profile,
        "python": checked.python,
        "versions": checked.versions,
        "faults": len(checked.faults),
        "targets": [
            {
                "target": t.target,
                "status": t.status,
                "detail": t.detail,
                "instead": list(t.instead),
                "optional": t.optional,
            }
            for t in checked.targets
        ],
    }
    return (json.dumps(record, indent=1) + "\n").encode()
