"""How a time is written for programs.

Owns: RFC 3339 in UTC. Must not: read a clock.
"""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(at: float | None) -> str | None:
    """Seconds since the epoch as RFC 3339 in UTC, to the millisecond. None stays None, and 0 is a clock that nobody read."""
    if not at:
        return None
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return None  # a float in etcd may be anything
