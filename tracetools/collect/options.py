"""What to record, of which processes: the choices of `collect`, checked.

In: texts of the command line. Out: frozen values. Raises UsageError with what to write instead. Knows nothing of how they are carried out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tracetools.errors import UsageError

ROLES = ("driver", "policy", "generation", "rank", "other")
ACTIVITIES = ("cpu", "cuda")
MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class ProfilerOptions:
    """Options of torch.profiler. The defaults are the cheapest."""

    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    activities: tuple[str, ...] = ACTIVITIES  # cuda counts where there is a GPU


@dataclass(frozen=True, slots=True)
class Choice:
    """Which processes record. None: all. A driver has no rank, so `ranks` does not leave it out."""

    ranks: tuple[int, ...] | None = None
    roles: tuple[str, ...] | None = None


CHEAPEST = ProfilerOptions()
EVERYBODY = Choice()


@dataclass(frozen=True, slots=True)
class Window:
    """Steps first..stop-1, recorded into the folder `folder` of the run; "" is the run folder itself. `number` tells recordings apart."""

    first: int
    stop: int
    options: ProfilerOptions
    choice: Choice
    number: int = 0
    folder: str = ""

    def for_recorder(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "number": self.number,
            "first": self.first,
            "stop": self.stop,
            "folder": self.folder,
            "ranks": None if self.choice.ranks is None else list(self.choice.ranks),
            "roles": None if self.choice.roles is None else list(self.choice.roles),
            "profiler": {**asdict(self.options), "activities": list(self.options.activities)},
        }


def parse_ranks(text: str) -> tuple[int, ...]:
    """`0,1,4-7` -> (0, 1, 4, 5, 6, 7)."""
    found: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or (dash and int(low) > int(high)):
            raise UsageError(f"--ranks {text}: {part.strip()!r} is no rank. Write ranks and ranges of them: 0,1,4-7.")
        if int(high or low) >= MOST_RANKS:
            raise UsageError(f"--ranks {text}: {high or low} is larger than any rank.")
        found |= set(range(int(low), int(high or low) + 1))
    return tuple(sorted(found))


def parse_roles(text: str) -> tuple[str, ...]:
    """`driver,policy` -> ("driver", "policy")."""
    return _names("--roles", text, ROLES)


def parse_activities(text: str) -> tuple[str, ...]:
    """`cpu,cuda` -> ("cpu", "cuda")."""
    return _names("--activities", text, ACTIVITIES)


def _names(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {text}: there is no {name!r}. There is: {', '.join(known)}.")
    return tuple(dict.fromkeys(names))
