"""Traces of `bench.faults` made fit to be shipped: what no detector reads is left out, and nothing names the machine or who uses it.

Owns: which files a trace has, how much of a line stays, names that are taken out, and the archive, which is the same for the same files.
Must not: change what a line says that a detector reads, but for digits: of sums of seconds those beyond 0.1 ms, of values those beyond the fourth.
"""

from __future__ import annotations

import getpass
import gzip
import io
import json
import os
import re
import socket
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

_KEPT: Final = frozenset(
    {"agent.jsonl", "agent.stderr", "daemon.stderr", "host.jsonl", "kmsg.log", "telemetry.jsonl", "stdout.log", "stderr.log", "error.json"}
)
_LEFT: Final = frozenset({"time", "job", "level", "local_rank", "step", "began", "buckets", "slowest", "batches"})
"""Fields of windows that no detector reads; "ended" tells the time."""
_SCRATCH: Final = re.compile(r"/tmp/elasticctl-[A-Za-z0-9_]+")  # noqa: S108  # looked for, not used
_RUN: Final = re.compile(r"/tmp/elasticd-\d+")  # noqa: S108
_ROUND: Final = 4
_DIGITS: Final = 4


def pack(logs: Path, archive: Path, *, places: Mapping[str, str], kernel: str = "", node: str = "") -> int:
    """Write a job's log directory as an archive; its size in bytes.

    Args:
        logs: the job's.
        places: paths of this machine, longest first, and what they are called instead.
        kernel: this trace's own line of the kernel. Others, which the daemons have read too, have nothing to do with it, and are left out.
        node: whose kernel said it: real nodes have one each, here there is one.
    """
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(logs.rglob("*")):
            if path.name not in _KEPT or path.is_symlink() or not path.stat().st_size:
                continue
            text = path.read_bytes().decode("utf-8", "surrogateescape")
            told = kernel if path.parent.name == node else ""
            kept = "".join(_lines(path.name, text.splitlines(keepends=False) if path.suffix == ".jsonl" else text.split("\n"), kernel=told))
            content = _anonymous(kept, places).encode("utf-8", "surrogateescape")
            entry = tarfile.TarInfo(f"{logs.name}/{path.relative_to(logs)}")
            entry.size, entry.mtime, entry.mode = len(content), round(path.stat().st_mtime, 3), 0o644
            tar.addfile(entry, io.BytesIO(content))
    archive.parent.mkdir(parents=True, exist_ok=True)
    with archive.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=9, mtime=0) as packed:
        packed.write(data.getvalue())
    return archive.stat().st_size


def places(*, scratch: Path, root: Path) -> dict[str, str]:
    """What paths of this machine are called in traces."""
    found = {str(scratch): "/scratch", sys.prefix: "/venv", str(root): "/app", sys.base_prefix: "/python", str(Path.home()): "/home/user"}
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


def names_of_this_machine(*, scratch: Path, root: Path) -> list[str]:
    """What may not be in a trace."""
    names = {socket.gethostname(), getpass.getuser(), os.uname().nodename, *places(scratch=scratch, root=root)}
    return sorted(name for name in names if len(name) > 3)


def _lines(name: str, lines: Iterable[str], *, kernel: str) -> Iterator[str]:
    for line in lines:
        if name == "telemetry.jsonl":
            if line:
                yield _shortened(json.loads(line)) + "\n"
        elif line and not (name == "daemon.stderr" and '"kernel_event"' in line and not (kernel and kernel in line)):
            yield line + "\n"


def _shortened(line: dict[str, Any]) -> str:
    if line["event"] == "window":
        line = {name: value for name, value in line.items() if name not in _LEFT and not (name == "dropped" and not value)}
        line["phases"] = {name: [round(pair[0], _ROUND)] for name, pair in line["phases"].items()}
        spreads = {name: spread for name, spread in line["values"].items() if name != "lr"}
        line["values"] = {name: {key: _number(value) for key, value in spread.items() if key in _SPREAD} for name, spread in spreads.items()}
        line |= {"ended": round(line["ended"], 3), "seconds": round(line["seconds"], _ROUND)}
    else:
        line = {name: value for name, value in line.items() if name not in ("job", "level", "rank")}
        line["columns"] = {name: [round(value, _ROUND + 1) for value in values] for name, values in line["columns"].items()}
    return json.dumps(line, separators=(",", ":"))


_SPREAD: Final = ("mean", "high", "nonfinite")


def _number(value: float | None) -> float | int | None:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _anonymous(text: str, called: Mapping[str, str]) -> str:
    for place, name in called.items():
        text = text.replace(place, name)
    return _RUN.sub("/run/user", _SCRATCH.sub("/run/elasticctl", text))
