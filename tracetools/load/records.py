"""The fields of an event that some stage reads, as msgspec Structs.

Kinds are wide (`Any`) on purpose: one writer puts strings where another puts numbers, and one odd event must not make
the whole file unreadable. `gc=False`: these hold no cycles. Knows nothing of what the fields mean.
"""

from __future__ import annotations

from typing import Any

import msgspec

NOTHING = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False):
    """`args` of an event. Kineto's own spelling in `name`."""

    correlation: Any = None
    external_id: Any = msgspec.field(default=None, name="External id")
    stream: Any = None
    device: Any = None
    bytes: Any = None
    dims: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=NOTHING, name="Input type")
    name: Any = None  # of "M" events
    python_id: Any = msgspec.field(default=None, name="Python id")
    python_parent: Any = msgspec.field(default=None, name="Python parent id")
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    group_size: Any = msgspec.field(default=None, name="Group size")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    sequence: Any = msgspec.field(default=None, name="Seq")


class Event(msgspec.Struct, gc=False):
    """An event as Chrome's format and Kineto write it."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


class EventTimes(msgspec.Struct, gc=False):
    """The same events once more, with the text of their times."""

    ph: str = ""
    ts: msgspec.Raw = NOTHING
    dur: msgspec.Raw = NOTHING
