"""Between the membership's thread and the agent's main thread: orders one way, reports the other.

Owns: what either side may know of the other, under one lock. Must not: decide anything, or talk to etcd.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from elasticd.errors import ElasticdError, RefusedError, WaitTimeoutError
from elasticd.rendezvous.membership import Directive, Leave, Local, Stay, Stop
from elasticd.rendezvous.records import INVENTORY_MAX, LOST_MAX, CauseKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from elasticd.rendezvous.records import GenerationRecord, MemberId, Outcome, SnapshotRef
    from elasticd.rendezvous.view import View

OWED_EVERY: Final = 0.2
"""Seconds between two questions whether states are still owed."""


def boottime() -> float:
    """Seconds on the clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A generation that this member is to train in.

    Attributes:
        node_rank: this member's place among the nodes.
        base_rank: global rank of its first worker.
        store_socket: the listening socket for the TCPStore, if this member serves it (node_rank 0); the taker owns it.
        fresh_until: CLOCK_BOOTTIME seconds after which the look at etcd that allowed it is too old to start by (PROTOCOL 14).
    """

    generation: GenerationRecord
    node_rank: int
    base_rank: int
    store_socket: socket.socket | None
    fresh_until: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnState:
    """What the main thread reported, as the own key is to say it. What the node holds and what it is outlive an incarnation."""

    stopped: int = 0
    outcome: Outcome | None = None
    unreachable: tuple[str, ...] = ()
    leaving: bool = False
    inventory: tuple[SnapshotRef, ...] = ()
    lost: tuple[str, ...] = ()
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    state_port: int | None = None


class Desk:
    """See the module. `wake_loop` is called whenever the main thread left something for the loop."""

    def __init__(self, job: str, wake_loop: Callable[[], None]) -> None:
        self._job = job
        self._wake_loop = wake_loop
        self._changed = threading.Condition()
        self._view: View | None = None
        self._me: MemberId | None = None
        self._why = ""
        self._running: int | None = None
        self._own = OwnState()
        self._dirty = False
        self._directive: Directive = Stay(why="starting")
        self._stopping = False
        self._unobeyed_since: float | None = None
        self._assignment: Assignment | None = None
        self._returned: socket.socket | None = None
        self._over: GenerationRecord | None = None
        self._fatal: ElasticdError | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # --- the main thread's side ------------------------------------------------------------------------------------------

    def next_assignment(self, timeout: float | None, give_up: Callable[[], bool] | None) -> Assignment | None:
        """See `Member.next_assignment`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self._raise_if_done()
                if give_up is not None and give_up():
                    return None
                assignment, self._assignment = self._assignment, None
                if assignment is not None:
                    if boottime() < assignment.fresh_until:
                        return assignment
                    self._take_back(assignment)
                left = 3600.0 if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise WaitTimeoutError(
                        f"job {self._job!r}: no generation formed within {timeout:g} s ({self._why or 'waiting for the coordinator'})",
                        remedy="see that enough nodes have started, with the same job name and etcd",
                    )
                self._changed.wait(left if give_up is None else min(left, 0.2))

    def _raise_if_done(self) -> None:
        if self._fatal:
            raise self._fatal
        if self._over:
            raise RefusedError(f"job {self._job!r} has ended ({self._over.state.value}: {self._over.reason})")

    def _take_back(self, assignment: Assignment) -> None:
        """An assignment that came too late, as after a pause, or was never taken: as if it had never been handed out."""
        self._running = None
        self._returned = assignment.store_socket
        self._wake_loop()

    @property
    def directive(self) -> Directive:
        """What the agent is to do about its workers now."""
        with self._changed:
            return self._directive

    @property
    def ended(self) -> GenerationRecord | None:
        """How the job ended, once it has."""
        with self._changed:
            return self._over

    @property
    def wake_fd(self) -> int:
        """Readable when `directive` changed."""
        return self._wake_read

    def drain_wake(self) -> None:
        """Forget earlier wake-ups."""
        with suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass

    def stopping(self) -> None:
        """The workers are being stopped, so that an order to do so is obeyed already."""
        with self._changed:
            self._stopping, self._unobeyed_since = True, None

    def describe(self, inventory: Iterable[SnapshotRef], lost: Iterable[str], fingerprint: Mapping[str, str], state_port: int | None) -> None:
        """What the node holds and what it is, before the own key is first written."""
        with self._changed:
            held, gone = _holdings(inventory, lost)
            self._own = replace(self._own, inventory=held, lost=gone, fingerprint=dict(fingerprint), state_port=state_port)

    def holdings(self, inventory: Iterable[SnapshotRef], lost: Iterable[str]) -> None:
        """What the node holds now. While workers run, what is written next tells it: they change it with each step (PROTOCOL 3)."""
        with self._changed:
            held, gone = _holdings(inventory, lost)
            if (held, gone) == (self._own.inventory, self._own.lost):
                return
            self._own = replace(self._own, inventory=held, lost=gone)
            if self._running is not None:
                return
            self._dirty = True
        self._wake_loop()

    def report_stopped(
        self,
        generation: int,
        outcome: Outcome | None,
        unreachable: Sequence[str],
        inventory: Iterable[SnapshotRef] | None = None,
        lost: Iterable[str] = (),
    ) -> None:
        """The workers of `generation` are stopped for good."""
        with self._changed:
            self._running = None
            self._stopping, self._unobeyed_since = False, None
            held, gone = _holdings(self._own.inventory if inventory is None else inventory, lost)
            self._change_own(
                stopped=max(self._own.stopped, generation),
                outcome=outcome or self._own.outcome,
                unreachable=tuple(unreachable),
                inventory=held,
                lost=self._own.lost if inventory is None and not gone else gone,
            )
        self._wake_loop()

    def ask_to_leave(self) -> None:
        """Have the own key say so."""
        with self._changed:
            self._change_own(leaving=True)
        self._wake_loop()

    def wait_left(self, timeout: float, owed: Callable[[GenerationRecord], bool] | None = None) -> bool:
        """See `Member.wait_left`."""
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                if not self._changed.wait_for(self._may_go, max(0.0, deadline - time.monotonic())):
                    return False
                generation = self._fetching_from_me()
            # Not under the lock: the answer is the agent's, which has locks of its own.
            if generation is None or owed is None or not owed(generation):
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with self._changed:
                self._changed.wait(min(OWED_EVERY, left))

    def _fetching_from_me(self) -> GenerationRecord | None:
        """The generation without this leaver, if some of its members begin with a state that they have yet to fetch, and it is a holder."""
        generation = self._view.active if self._view else None
        if generation is None or generation.resume is None or self._me is None or self._over or self._fatal:
            return None
        holders = generation.resume.holders
        lacking = any(identity.node not in holders for identity in generation.ids)
        return generation if lacking and self._me.node in holders and self._me not in generation.ids else None

    def _may_go(self) -> bool:
        """Whether nobody needs this leaver any more (PROTOCOL 18)."""
        view = self._view
        if self._over or self._fatal or view is None:
            return True
        own = view.present.get(self._me) if self._me else None
        if (own and not own.record.leaving) or (view.pending and self._me in view.pending.record.members):
            return False  # a generation may still be formed with us in it: its activation would not see our key go
        if view.active is None or self._me not in view.active.ids:
            return True
        if not view.pending or not view.target or len(view.pending.record.members) >= view.target.record.min_nodes:
            return False
        # Too few are left to form one. After a loss nobody can say that all have stopped, so nothing is waited for but the own word.
        return view.active.drained or (view.pending.record.cause.kind is CauseKind.LOSS and not self._dirty)

    # --- the loop's side -------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int | None:
        """The generation whose workers run here, or are about to."""
        with self._changed:
            return self._running

    @property
    def why(self) -> str:
        """What the job waits for, in one line."""
        return self._why

    def say(self, why: str) -> None:
        """What the job waits for, for people."""
        self._why = why

    def local(self, me: MemberId, floor: int) -> Local:
        """What `membership.react` needs of it."""
        with self._changed:
            return Local(id=me, running=self._running, floor=floor, stopped=self._own.stopped)

    def note(self, view: View, me: MemberId) -> None:
        """The newest view, for whoever waits to leave."""
        with self._changed:
            self._view, self._me = view, me
            self._changed.notify_all()

    def direct(self, directive: Directive) -> bool:
        """Give an order; whether it is a new one."""
        with self._changed:
            if directive == self._directive:
                return False
            self._directive = directive
            if isinstance(directive, Stop | Leave) and self._assignment is not None:
                withdrawn, self._assignment = self._assignment, None  # nobody took it yet, so nothing older than the order starts (PROTOCOL 11)
                self._take_back(withdrawn)
            waits = isinstance(directive, Stop | Leave) and self._running is not None and not self._stopping
            # Another order does not begin the time anew: it would be one of the loop's, which turns.
            self._unobeyed_since = (self._unobeyed_since or time.monotonic()) if waits else None
            self._changed.notify_all()
        with suppress(OSError):  # full of unread wake-ups: it is awake; or closed
            os.write(self._wake_write, b"w")
        return True

    @property
    def unobeyed(self) -> float:
        """Seconds for which the main thread has left an order to stop its workers unheard; 0 if there is none."""
        with self._changed:
            return 0.0 if self._unobeyed_since is None else time.monotonic() - self._unobeyed_since

    def close(self) -> None:
        """No more wake-ups."""
        with self._changed:
            for fd in (self._wake_read, self._wake_write):
                if fd >= 0:
                    os.close(fd)
            self._wake_read = self._wake_write = -1

    def offer(self, assignment: Assignment) -> bool:
        """Hand out a generation. False if one runs already, or this member is leaving."""
        with self._changed:
            if self._running is not None or self._own.leaving:
                return False
            self._running = assignment.generation.number
            self._stopping, self._unobeyed_since = False, None
            self._assignment = assignment
            self._changed.notify_all()
        return True

    def returned_socket(self) -> socket.socket | None:
        """The store socket of an assignment that was taken back, once."""
        with self._changed:
            sock, self._returned = self._returned, None
            return sock

    def own(self) -> OwnState:
        """What the own key is to say."""
        with self._changed:
            return self._own

    def take_dirty(self) -> bool:
        """Whether `own` changed since it was last asked."""
        with self._changed:
            dirty, self._dirty = self._dirty, False
            return dirty

    def mark_dirty(self) -> None:
        """The own key was not written after all."""
        with self._changed:
            self._dirty = True

    def stopped_up_to(self, number: int) -> None:
        """Nothing up to `number` runs here or ever will (PROTOCOL 11)."""
        with self._changed:
            self._change_own(stopped=max(self._own.stopped, number))

    def begin_anew(self, number: int) -> None:
        """A new incarnation, which has started nothing up to `number` and has no outcome to tell. What its node holds is still there."""
        with self._changed:
            self._own = replace(self._own, stopped=max(self._own.stopped, number), outcome=None, unreachable=())
            self._dirty = False

    def _change_own(self, **changes: Any) -> None:
        self._own = replace(self._own, **changes)
        self._dirty = True

    def over(self, generation: GenerationRecord) -> None:
        """The job has ended."""
        with self._changed:
            self._over = generation
            self._changed.notify_all()

    def fail(self, error: ElasticdError) -> None:
        """The membership is lost for good."""
        with self._changed:
            self._fatal = error
            self._changed.notify_all()


def _holdings(inventory: Iterable[SnapshotRef], lost: Iterable[str]) -> tuple[tuple[SnapshotRef, ...], tuple[str, ...]]:
    """As a record takes them: the newest first, each once, and no more than fit."""
    held = sorted(set(inventory), key=lambda ref: (ref.order, ref.digest), reverse=True)
    return tuple(held[:INVENTORY_MAX]), tuple(dict.fromkeys(lost))[:LOST_MAX]
