"""Files that are whole or not there.

In: a path and bytes (or chunks of bytes). Out: a file under its final name, only when every byte is written.
Knows nothing of formats.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tracetools.errors import TracetoolsError


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Raises TracetoolsError naming the path; what stood there before is kept in that case."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            for chunk in [data] if isinstance(data, bytes) else data:
                out.write(chunk)
        temporary.replace(path)
    except OSError as error:
        raise TracetoolsError(f"{path}: cannot be written: {error.strerror or error}.") from error
    finally:
        temporary.unlink(missing_ok=True)
