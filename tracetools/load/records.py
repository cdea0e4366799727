"""The fields of an event that some stage reads, as msgspec Structs.

Kinds of an `Event` are wide (`Any`) on purpose: one writer puts strings where another puts numbers, and one odd event must
not make the whole file unreadable. `gc=False`: these hold no cycles. Knows nothing of what the fields mean.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import msgspec

NOTHING = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False):
    """`args` of an event. Kineto's own spelling in `name`. Absent ids are what the columns call absent (0 or -1)."""

    correlation: Any = 0
    external_id: Any = msgspec.field(default=0, name="External id")
    stream: Any = None
    device: Any = None
    bytes: Any = -1
    dims: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=NOTHING, name="Input type")
    name: Any = None  # of "M" events
    python_id: Any = msgspec.field(default=-1, name="Python id")
    python_parent: Any = msgspec.field(default=-1, name="Python parent id")
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    group_size: Any = msgspec.field(default=None, name="Group size")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    sequence: Any = msgspec.field(default=None, name="Seq")


class SliceArgs(Args, gc=False):
    """The same where ids are numbers, as all current writers have them."""

    correlation: int = 0
    external_id: int = msgspec.field(default=0, name="External id")
    python_id: int = msgspec.field(default=-1, name="Python id")


class Body(msgspec.Struct, gc=False):
    """An event without its phase, as Chrome's format and Kineto write it."""

    name: str = ""
    cat: str = ""
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


class Event(Body, gc=False):
    """Any event of any file."""

    ph: str = ""


class Slice(Body, gc=False, tag_field="ph", tag="X"):
    """A complete slice of a file that is as it should be: decoded faster than an Event, and the columns trust its numbers."""

    args: SliceArgs | None = None


class Metadata(Body, gc=False, tag_field="ph", tag="M"):
    """A name of a process or thread."""


def _nothing(phase: str) -> type[msgspec.Struct]:
    name = f"Phase{ord(phase)}"
    return msgspec.defstruct(name, [], tag_field="ph", tag=phase, gc=False, module=__name__)


# What a well-formed file consists of. Nothing is read of arrows, counters, instants and asynchronous events. A file with
# anything else in it (B and E events, ids in quotes, an event without a phase) is no list of these, and is read as Events.
Usual: Any = functools.reduce(operator.or_, (_nothing(phase) for phase in "sftiICbneNDOR"), Slice | Metadata)


class EventTimes(msgspec.Struct, gc=False):
    """The same events once more, with the text of their times."""

    ph: str = ""
    ts: msgspec.Raw = NOTHING
    dur: msgspec.Raw = NOTHING
