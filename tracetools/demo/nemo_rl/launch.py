"""Becomes the loop, with NeMo-RL importable in it and in its Ray workers: python launch.py CHECKOUT LOG STEPS PLANT_MS.

In: a checkout, the file for all that is printed, the loop's arguments. Out: this process becomes loop.py. Knows nothing of what that does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    checkout, log, *arguments = sys.argv[1:]
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):  # by file descriptor: Ray's C++ parts print too
        os.dup2(target, stream)
    os.close(target)
    # what collect has put in front stays there
    path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    os.environ["PYTHONPATH"] = os.pathsep.join([*path, str(Path(checkout).resolve()), str(FOLDER)])
    os.environ["RAY_ADDRESS"] = "local"  # NeMo-RL would join any cluster that it finds
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    os.execv(sys.executable, [sys.executable, str(FOLDER / "loop.py"), *arguments])


if __name__ == "__main__":
    main()
