"""`region` and `step`: marks that training code sets by hand.

In: names and numbers from the training code. Out: spans in the trace of a process that `tracetools collect` records; nothing
anywhere else. Standard library only, and next to no cost while nothing records: the recorder is found in sys.modules,
where only `tracetools collect` puts it.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

_RECORDER = "tracetools_recorder"


class _Nothing:
    """Stands for a region while nothing records. One object for all calls."""

    __slots__ = ()

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None


_NOTHING = _Nothing()


def region(name: str) -> Any:
    """`with tracetools.region("data_processing"):` names what this thread does, as a region of the trace."""
    recorder = sys.modules.get(_RECORDER)
    if recorder is None or not recorder.recording:
        return _NOTHING
    return recorder.region(name)


class step:
    """`with tracetools.step(tokens=4096):` is one optimizer step, from its start to the start of the next one.

    The numbers are what this process worked on in the step (its card); what is known only later is set by `card`.
    Only the outermost step of a process counts.
    """

    __slots__ = ("_marker", "_numbers")

    def __init__(
        self,
        *,
        tokens: int | None = None,
        padded_tokens: int | None = None,
        sequences: int | None = None,
        microbatches: int | None = None,
        sum_squared_lengths: int | None = None,
    ) -> None:
        self._numbers = {
            "tokens": tokens,
            "padded_tokens": padded_tokens,
            "sequences": sequences,
            "microbatches": microbatches,
            "sum_squared_lengths": sum_squared_lengths,
        }
        self._marker: Any = None

    def card(self, **numbers: int | None) -> None:
        """Set or change numbers of the card. Raises TypeError for a name that a card does not have."""
        unknown = numbers.keys() - self._numbers.keys()
        if unknown:
            raise TypeError(f"a step's card has no {', '.join(sorted(unknown))}; it has {', '.join(self._numbers)}")
        self._numbers.update(numbers)

    def __enter__(self) -> step:
        recorder = sys.modules.get(_RECORDER)
        if recorder is not None:
            self._marker = recorder.enter_step()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._marker is not None:
            recorder = sys.modules[_RECORDER]
            marker, self._marker = self._marker, None
            recorder.exit_step(marker, self._numbers)
