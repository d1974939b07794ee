"""Naming a process so that it is not taken for another that got its pid later.

Owns: the start time that goes with a pid. Must not: signal anything.
"""

from __future__ import annotations

from pathlib import Path


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none, or only its zombie."""
    try:
        fields = (Path("/proc") / str(pid) / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
