"""Python imports this at start-up of every process under `tracetools collect`.

In: one environment variable. Out: the recorder, installed; and the sitecustomize that this one hides, run as always.
Must never raise, and does nothing where the variable is not set.
"""

from __future__ import annotations

import os
import sys


def _run_hidden_sitecustomize() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [p for p in sys.path if os.path.abspath(p or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module  # what its own code and others expect to find under the name
        spec.loader.exec_module(module)


if os.environ.get("TRACETOOLS_RECORD"):
    try:
        import tracetools_recorder

        tracetools_recorder.install(os.environ["TRACETOOLS_RECORD"])
    except Exception as error:  # noqa: BLE001  the training job must start whatever is wrong with us
        sys.stderr.write(f"tracetools: not recording in process {os.getpid()}: {error!r}\n")

_run_hidden_sitecustomize()
