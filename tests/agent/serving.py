"""A process that serves one state: `python -m tests.agent.serving '{"scope": …, "size": …, …}'`.

Owns: making a state by arithmetic, so that both sides know it. Must not: assert anything; the tests do.

It prints its port and digest, then answers each line of its standard input: "served" with who is known to have the state, "told" with what it was
told, "slow" by stopping before the next piece of the state for good.
"""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from elasticd.agent.transfer import StateServer
from elasticd.kv.types import TLSFiles
from trainer.checkpoint import digest_image
from trainer.wire.layout import Layout

SCOPE = "cluster/job"


def make_state(mib: int, salt: int = 1) -> tuple[Layout, mmap.mmap, str]:
    """A layout, an image of `mib` MiB and a bit, and its digest."""
    layout = Layout.build([("model.weight", "F32", (mib * 256, 1024)), ("step", "I64", ())], extras=100)
    image = mmap.mmap(-1, layout.size)
    block = bytes((salt + index * 7) % 251 for index in range(4096))
    for start in range(0, layout.size, 4096):
        image[start : start + 4096] = block
    image[0:4] = salt.to_bytes(4, "little")
    digest, _ = digest_image(layout.header, image)
    return layout, image, digest


class Serving:
    """A server of one state in this process."""

    def __init__(self, mib: int = 1, *, salt: int = 1, tls: TLSFiles | None = None, lie: bool = False, **more: Any) -> None:
        self.layout, self.image, self.digest = make_state(mib, salt)
        self.told: list[tuple[int, int, str, str]] = []
        self.reading = 0
        if lie:
            self.image[self.layout.size // 2] ^= 1  # a bit falls over after the digest was made
        self.server = StateServer("127.0.0.1", scope=SCOPE, read=self._read, tls=tls, holds=lambda *what: self.told.append(what), **more)

    @contextmanager
    def _read(self, digest: str) -> Iterator[tuple[bytes, memoryview]]:
        if digest != self.digest:
            raise KeyError("another state")
        self.reading += 1
        try:
            with memoryview(self.image) as view:
                yield self.layout.header, view
        finally:
            self.reading -= 1


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    arguments = json.loads(sys.argv[1])
    files = arguments.pop("tls", None)
    tls = TLSFiles(**{name: Path(path) for name, path in files.items()}) if files else None
    serving = Serving(tls=tls, **arguments)
    print(json.dumps([serving.server.port, serving.digest]), flush=True)
    for line in sys.stdin:
        print(json.dumps(sorted(serving.server.served(serving.digest)) if line.strip() == "served" else serving.told), flush=True)
    serving.server.close()


if __name__ == "__main__":
    main()
