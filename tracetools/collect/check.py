"""Do the hook targets of a stack profile exist in an environment? What `tracetools profiles check` does.

In: a profile, and the Python of the training environment (its version may be another). Out: `Checked`, one entry per target.
Looking a target up imports its module, and with it training code that may print, start threads or crash: that is done in a
process of its own, with a time limit, by a script of the standard library (inject/tracetools_lookup.py). What a module
does not have is looked for in its source and, under the same name, in the rest of its package.
Knows nothing of recording.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracetools.errors import TracetoolsError, UsageError
from tracetools.stackprofile import StackProfile

SCHEMA = "tracetools.profiles.check/1"
LOOKUP = Path(__file__).parent / "inject" / "tracetools_lookup.py"
RESOLVED = ("found", "found in the source")


@dataclass(frozen=True, slots=True)
class Target:
    """What became of one target. `status`: found, found in the source (its module cannot be imported here), no attribute,
    no module, no package (it is not installed), inherited (hook the class that defines it)."""

    target: str
    status: str
    detail: str
    instead: tuple[str, ...]  # targets that probably replaced it, likeliest first
    optional: bool

    @property
    def ok(self) -> bool:
        return self.status in RESOLVED


@dataclass(frozen=True, slots=True)
class Checked:
    profile: str
    python: str
    versions: dict[str, str]
    targets: tuple[Target, ...]

    @property
    def faults(self) -> tuple[Target, ...]:
        """Targets that ought to be there: their package is installed, and the profile does not call them optional."""
        return tuple(t for t in self.targets if not t.ok and not t.optional and t.status != "no package")


def targets_of(profile: StackProfile) -> dict[str, bool]:
    """Every target of a profile, and whether it is optional."""
    found: dict[str, bool] = {}
    for hook in profile.hooks:
        owner = hook.target.rpartition("." if "." in hook.target.partition(":")[2] else ":")
        beside = [owner[0] + owner[1] + hook.end] if hook.end else []
        for target in [hook.target, *beside]:
            found[target] = found.get(target, True) and hook.optional
    return found | dict.fromkeys(profile.step_functions, False)


def check(profile: StackProfile, python: str = sys.executable, timeout_s: float = 120.0) -> Checked:
    """Look every target up with `python`. Modules are tried one process per top-level package, so that one crash spoils only its own.

    Raises UsageError where `python` cannot be run, TracetoolsError where it does not answer.
    """
    optional = targets_of(profile)
    packages: dict[str, list[str]] = {}
    for target in optional:
        packages.setdefault(target.partition(".")[0].partition(":")[0], []).append(target)
    answers: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    for targets in packages.values():
        answer = _ask(python, targets, timeout_s)
        answers += answer["targets"]
        versions |= answer["versions"]
    by_name = {a["target"]: a for a in answers}
    return Checked(
        profile=profile.name,
        python=python,
        versions=versions,
        targets=tuple(
            Target(t, by_name[t]["status"], by_name[t]["detail"], tuple(by_name[t]["instead"]), o)
            for t, o in optional.items()
        ),
    )


def _ask(python: str, targets: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """By the import system; where that ends in a crash or takes too long, by the source alone."""
    why = "no reason given"
    for mode in ("import", "source"):
        try:
            done = subprocess.run(
                [python, str(LOOKUP), mode],
                input=json.dumps(list(targets)),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
            )
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise UsageError(
                f"{python}: cannot be run: {error.strerror}. Give the python of the training environment."
            ) from error
        except subprocess.TimeoutExpired:
            why = f"no answer within {timeout_s:.0f} s"
            continue
        line = next((x for x in reversed(done.stdout.splitlines()) if x.startswith('{"targets"')), None)
        if line is not None:
            answer: dict[str, Any] = json.loads(line)
            return answer
        why = " ".join(done.stderr.strip().splitlines()[-1:]) or f"it ended with status {done.returncode}"
    raise TracetoolsError(f"{python}: asked for hook targets, gave no answer: {why}.")
