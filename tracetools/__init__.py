"""tracetools: where a training step's time goes, and why the same model is slower in another stack.

The public names, loaded when first used: importing the package costs nothing and pulls in nothing, because training code
imports it for `region` and `step`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tracetools.analysis import analyze, compare, write_report
    from tracetools.errors import TracetoolsError
    from tracetools.instrument import region, step
    from tracetools.load import load_run
    from tracetools.stackprofile import StackProfile

__all__ = [
    "StackProfile",
    "TracetoolsError",
    "__version__",
    "analyze",
    "compare",
    "load_run",
    "region",
    "step",
    "write_report",
]

_HOME = {
    "StackProfile": "tracetools.stackprofile",
    "TracetoolsError": "tracetools.errors",
    "analyze": "tracetools.analysis",
    "compare": "tracetools.analysis",
    "load_run": "tracetools.load",
    "region": "tracetools.instrument",
    "step": "tracetools.instrument",
    "write_report": "tracetools.analysis",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tracetools' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # found once, then a plain attribute
    return value


def __dir__() -> list[str]:
    return __all__
