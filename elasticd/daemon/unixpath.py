"""Unix sockets whose paths are longer than the kernel takes.

Owns: the way around its 107 bytes. Must not: import anything large; the command line comes by here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST = 107  # bytes of sun_path, less the zero at its end


@contextmanager
def reachable(path: Path) -> Iterator[str]:
    """A name by which bind and connect find `path`, valid inside the block: itself, or one through its opened directory.

    Raises:
        OSError: the directory cannot be opened.
    """
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
