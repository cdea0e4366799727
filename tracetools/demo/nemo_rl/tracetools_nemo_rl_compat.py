"""What NeMo-RL wants and a CPU build of torch, or a Python before 3.13, does not have. To be imported before nemo_rl.

In: nothing. Out: names put where they are missing. Changes nothing that is there.
"""

from __future__ import annotations

import sys
import typing
from typing import Any

import torch

if sys.version_info < (3, 13):
    import typing_extensions

    for _name in ("TypedDict", "NotRequired", "Required"):
        setattr(typing, _name, getattr(typing_extensions, _name))


def _no_range(*_: Any) -> int:
    return 0


if not torch.cuda.is_available():
    torch.cuda.nvtx.range_push = _no_range
    torch.cuda.nvtx.range_pop = _no_range
