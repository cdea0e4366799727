"""The errors a user can meet.

In: nothing. Out: one exception class with the exit status it means, and the named messages that are long.
Knows nothing of traces; caught in exactly one place, the edge of the command line.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_BAD_DATA = 1  # bad data, or a run that failed
EXIT_USAGE = 2
EXIT_SLOWER = 3
EXIT_INCONCLUSIVE = 4


class TracetoolsError(Exception):
    """Says what is wrong, where (file, byte, key) and what to do next."""

    exit_code = EXIT_BAD_DATA


class UsageError(TracetoolsError):
    """The request makes no sense, whatever the data."""

    exit_code = EXIT_USAGE
