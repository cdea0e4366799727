"""Fixtures. The corpus (real traces, tricky cases with right answers) is optional: tests that use it skip without it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # builders and helpers, whatever directory pytest was started in

REPOSITORY = Path(__file__).resolve().parents[1]


def corpus_root() -> Path | None:
    named = os.environ.get("TRACETOOLS_CORPUS")
    root = Path(named) if named else REPOSITORY.parent / "shared"
    return root if (root / "traces").is_dir() and (root / "cases").is_dir() else None


@pytest.fixture(scope="session")
def corpus() -> Path:
    root = corpus_root()
    if root is None:
        pytest.skip("no corpus: set TRACETOOLS_CORPUS to a folder with traces/ and cases/")
    return root
