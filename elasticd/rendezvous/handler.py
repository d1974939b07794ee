"""Torch's RendezvousHandler around a `Member`, for stock torchrun; and the TCPStore that a generation's workers meet at.

Owns: translating between torch's rendezvous API and `member`. Must not: hold rendezvous state of its own beyond which generation runs.

What stock torchrun needs that our own agent does not: every agent gets a store client, because ranks are dealt out over it; and the workers get
a port of their own instead of the agents' store (`use_agent_store` is False), because stock agents count restarts each for itself and prefix the
shared store by that count, so that workers of two nodes would wait for each other for ever (pytorch#108158).
"""

from __future__ import annotations

import atexit
import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import structlog
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # torch re-exports them without saying so
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elasticd.errors import ElasticdError, KVError, RefusedError, WaitTimeoutError
from elasticd.rendezvous.membership import Leave, Stop
from elasticd.rendezvous.records import Outcome, Result

if TYPE_CHECKING:
    from elasticd.rendezvous.desk import Assignment
    from elasticd.rendezvous.member import Member

log = structlog.get_logger("elasticd.rendezvous.handler")

BACKEND: Final = "etcd-v3"
STORE_TIMEOUT: Final = timedelta(seconds=60)
"""How long a stock agent waits for a peer's part in the dealing of ranks."""


def serve_store(assignment: Assignment) -> TCPStore:
    """The generation's TCPStore, served on the socket that this member held for it. Only for node rank 0."""
    assert assignment.store_socket is not None
    where = assignment.generation.store
    return TCPStore(
        where.address,
        where.port,
        is_master=True,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=assignment.store_socket.detach(),
    )


def reserve_port(address: str) -> socket.socket:
    """A port that nobody else is given: bound, not listening, and shareable with the worker that will listen on it (SO_REUSEADDR)."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, 0))
    return sock


class EtcdRendezvousHandler(RendezvousHandler):
    """See the module.

    Args:
        member: not started yet; it is started by the first `next_rendezvous`.
        run_id: torch's word for the job.
        join_timeout: seconds to wait for a generation.
    """

    def __init__(self, member: Member, run_id: str, join_timeout: float = 600.0) -> None:
        self._member = member
        self._run_id = run_id
        self._join_timeout = join_timeout
        self._started = False
        self._closed = False
        self._running: int | None = None
        self._reserved: socket.socket | None = None

    def get_backend(self) -> str:
        """The name it is registered under."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """See the module."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Say that the workers of the last generation are stopped, and wait for the next that holds this node.

        Raises:
            RendezvousClosedError: the job has ended.
            RendezvousTimeoutError: no generation formed in time.
            RendezvousConnectionError: etcd cannot be reached or refuses us.
            RendezvousError: anything else that is wrong with address, name or files.
        """
        try:
            self._start()
            self._report()
            assignment = self._member.next_assignment(self._join_timeout)
            assert assignment is not None
        except RefusedError as error:
            raise RendezvousClosedError(str(error)) from None
        except WaitTimeoutError as error:
            raise RendezvousTimeoutError(str(error)) from None
        except KVError as error:
            raise RendezvousConnectionError(str(error)) from None
        except ElasticdError as error:
            raise RendezvousError(str(error)) from None
        self._running = assignment.generation.number
        return self._meet(assignment)

    def _start(self) -> None:
        if self._started:
            return
        self._member.connect()
        self._member.start()
        self._started = True
        atexit.register(self.shutdown)

    def _report(self) -> None:
        if self._running is None:
            return
        outcome = None
        if not isinstance(self._member.directive, Stop):
            outcome = Outcome(generation=self._running, result=Result.FAILED, detail="a worker failed; torchrun's log on that node says more")
        self._member.report_stopped(self._running, outcome)
        self._running = None

    def _meet(self, assignment: Assignment) -> RendezvousInfo:
        generation = assignment.generation
        where = generation.store
        first = assignment.node_rank == 0
        server = serve_store(assignment) if first else TCPStore(where.address, where.port, is_master=False, timeout=STORE_TIMEOUT)
        store: Store = PrefixStore(f"elasticd/{generation.number}", server)
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        if first:
            self._reserved = reserve_port(where.address)
            store.set("worker_port", str(self._reserved.getsockname()[1]))
        port = int(store.get("worker_port"))
        return RendezvousInfo(store, assignment.node_rank, len(generation.members), RendezvousStoreInfo(where.address, port))

    def is_closed(self) -> bool:
        """Whether the job has ended."""
        return self._member.ended is not None

    def set_closed(self) -> None:
        """Do nothing: torch asks for it on any failure, and only success or an operator ends a job."""
        log.info("close_ignored", run_id=self._run_id)

    def num_nodes_waiting(self) -> int:
        """1 when the workers are to be stopped and started in a new generation, else 0. Never raises: an etcd outage is no reason to stop."""
        return int(self._running is not None and isinstance(self._member.directive, Stop | Leave))

    def get_run_id(self) -> str:
        """Torch's word for the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Leave the job; it goes on without this node. Torch calls it on success as on failure, so it never closes the job."""
        if self._closed:
            return True
        self._closed = True
        with suppress(Exception):  # at exit nothing may be raised any more
            self._member.close()
        if self._reserved is not None:
            self._reserved.close()
        return True


def ignore_rank_exchange() -> None:
    """Let stock agents compute ranks without asking each other, which hangs for minutes when one of them dies meanwhile.

    Right as long as all nodes have as many workers; set TORCH_ELASTIC_WORKER_IDENTICAL=0 where they differ.
    """
    os.environ.setdefault("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
