"""The etcd of a run on one machine, kept alive while the run lasts.

Owns: starting it, starting it again on the same port and data if it ends, and stopping it. Must not: know the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from elasticd.cli.options import Store
from elasticd.errors import ElasticdError
from elasticd.kv import EmbeddedEtcd, find_etcd

if TYPE_CHECKING:
    from pathlib import Path

_REVIVALS: Final = 5
"""An etcd that ends more often than this has a reason that starting it again does not mend: a full disk, no memory."""


class LocalEtcd:
    """Serves when the constructor returns.

    Args:
        data_dir: where it keeps its data.

    Raises:
        UsageError: there is no etcd program.
        KVUnavailableError: it did not serve in time.
    """

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._binary = find_etcd()
        self._etcd = EmbeddedEtcd(data_dir, binary=self._binary)
        self._endpoint = self._etcd.endpoint
        self._left = _REVIVALS

    @property
    def store(self) -> Store:
        """How to reach it."""
        return Store(endpoints=(self._endpoint,))

    def revive(self) -> str:
        """Start it again if it has ended. Blocks until it serves, 20 s at most.

        Returns:
            What happened, in a sentence; "" if it runs, or has been given up.
        """
        if self._etcd.running or not self._left:
            return ""
        self._left -= 1
        try:
            self._etcd = EmbeddedEtcd(self._data_dir, binary=self._binary, port=int(self._endpoint.rpartition(":")[2]))
        except ElasticdError as error:
            return f"the local etcd has ended and did not start again: {error}"
        return "the local etcd had ended and was started again"

    def stop(self) -> None:
        """End it."""
        self._etcd.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()
