"""This member's own key: taken, kept, written, taken up again, given away.

Owns: the lease, the identity bound to it, and the listening socket that the key names. Must not: decide when to write, or read other members.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Final

import structlog

from elasticd.errors import LeaseLostError, RefusedError
from elasticd.rendezvous import transitions
from elasticd.rendezvous.nodelock import boot_id
from elasticd.rendezvous.peers import bind
from elasticd.rendezvous.records import MemberId, MemberRecord, Result

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from elasticd.kv import EtcdKV, Lease
    from elasticd.rendezvous.config import MemberConfig
    from elasticd.rendezvous.desk import Desk
    from elasticd.rendezvous.sight import Sight

log = structlog.get_logger("elasticd.rendezvous")

FOREIGN_WAIT: Final = 10.0
"""Seconds beyond one TTL that a key of another machine or boot is waited for."""


class OwnKey:
    """See the module.

    Args:
        probe_port: where this agent answers echoes.
        send: does one transaction and says whether its comparisons held.
        may_renew: asked before every renewal of the lease (PROTOCOL 6).
        wake: called when the lease is lost, or etcd comes or goes.
    """

    def __init__(
        self,
        config: MemberConfig,
        kv: EtcdKV,
        desk: Desk,
        sight: Sight,
        *,
        probe_port: int,
        send: Callable[[transitions.Txn], bool],
        may_renew: Callable[[], bool],
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._keys = config.keys
        self._kv = kv
        self._desk = desk
        self._sight = sight
        self._probe_port = probe_port
        self._send = send
        self._may_renew = may_renew
        self._wake = wake
        self._socket: socket.socket | None = None
        self._lease_gone = False
        self._begun = False
        self.lease: Lease | None = None
        self.me = MemberId(node=config.node, incarnation=secrets.token_hex(8))

    @property
    def held(self) -> bool:
        """Whether the key, as last seen, is there, ours, and under a lease that lives."""
        own = self._sight.own
        return self.mine and self.lease is not None and own is not None and own.lease == self.lease.id

    @property
    def mine(self) -> bool:
        """Whether the key is there and ours, and our lease lives, if perhaps not bound to it: somebody wrote the record back by hand."""
        own = self._sight.own
        return bool(self._lease_lives and own and own.record.id == self.me)

    @property
    def _lease_lives(self) -> bool:
        return self.lease is not None and not self.lease.lost and not self._lease_gone

    def lease_is_gone(self) -> None:
        """A write under the lease was refused: it is gone before the next keepalive could tell."""
        self._lease_gone = True

    def take_first(self) -> None:
        """Create the key; a dead predecessor's on this boot is taken away (the node lock proves it dead), any other is waited for.

        Raises:
            RefusedError: another machine or boot serves this node.
        """
        deadline = time.monotonic() + self._config.timing.ttl + FOREIGN_WAIT
        warned = False
        while not self._take_once():
            held, keyed = self._sight.fetch(self._config.node)
            if held is None:
                continue
            if keyed is None or keyed.record.boot_id == boot_id():
                log.info("predecessor_removed", incarnation=keyed.record.id.incarnation if keyed else "garbage")
                self._send(transitions.remove_member(self._keys, self._config.node, held.mod_revision))
                continue
            if time.monotonic() > deadline:
                raise RefusedError(
                    f"node {self._config.node!r} of job {self._keys.job!r} is served from another machine or boot",
                    remedy="give this node another name, or stop the other agent",
                )
            if not warned:
                log.warning("node_name_taken", waiting_for="the end of its lease")
                warned = True
            time.sleep(0.2)

    def _take_once(self) -> bool:
        try:
            return self.take()
        except LeaseLostError:  # a machine too busy to write within the TTL
            self.lease_is_gone()
            return False

    def take(self) -> bool:
        """Try once to create the key, under a new incarnation. False if it exists."""
        self._fresh_lease()
        self.me = MemberId(node=self._config.node, incarnation=secrets.token_hex(8))
        if self._begun:
            self._sight.forget()  # what was seen as somebody else
        self._begun = True
        self._desk.begin_anew(self._sight.view.number)
        assert self.lease is not None  # just made
        if not self._send(transitions.register(self._keys, self._record(), self.lease.id)):
            return False
        self._sight.find_place()
        log.info("registered", member=str(self.me), coordinator=self._sight.coordinator)
        return True

    def take_up_again(self) -> bool:
        """Re-create the key if the generation that runs or has finished here is still the active one and nothing is pending (PROTOCOL 4)."""
        view, outcome = self._sight.view, self._desk.own().outcome
        if view.generation is None or view.active is None or view.pending or self.me not in view.active.ids:
            return False
        finished = outcome is not None and outcome.generation == view.number and outcome.result is Result.FINISHED
        if self._desk.running != view.number and not finished:
            return False
        self._fresh_lease()
        assert self.lease is not None  # just made
        if not self._send(transitions.reattach(self._keys, self._record(), self.lease.id, view.generation, view.proposal)):
            return False
        log.warning("reattached", member=str(self.me), generation=view.number)
        self._sight.find_place()
        return True

    def remove_foreign(self, mod_revision: int) -> None:
        """Take away what stands in the own key's place."""
        self._send(transitions.remove_member(self._keys, self._config.node, mod_revision))

    def write(self) -> None:
        """Write the key anew if what it is to say changed, or if somebody wrote garbage over it."""
        own, view = self._sight.own, self._sight.view
        damaged = view.damaged.get(self._keys.member(self._config.node))
        dirty = self._desk.take_dirty()
        if (not dirty and damaged is None) or own is None or self.lease is None:
            return
        written = False
        try:
            written = self._send(transitions.report(self._keys, self._record(), damaged or own.mod_revision, self.lease.id))
        finally:
            if not written:
                self._desk.mark_dirty()
        if not written:
            self._sight.load()  # something else was written first
            self._wake()

    def lend_socket(self) -> socket.socket:
        """The listening socket that the key names, for the TCPStore; the next write names a fresh one."""
        assert self._socket is not None  # bound before the key was written
        sock, self._socket = self._socket, None
        return sock

    def return_socket(self, sock: socket.socket) -> None:
        """Take a lent socket back unused."""
        if self._socket is None:
            self._socket = sock
        else:
            sock.close()

    def close(self) -> None:
        """Give the key away with its lease, if etcd can still be told."""
        if self.lease:
            self.lease.revoke()
        if self._socket:
            self._socket.close()

    def _fresh_lease(self) -> None:
        if self._lease_lives:
            return
        if self.lease is not None:
            self.lease.stop()
        self.lease = self._kv.lease(self._config.timing.ttl)
        self._lease_gone = False
        self.lease.start(self._may_renew, self._wake)

    def _record(self) -> MemberRecord:
        if self._socket is None:
            self._socket = bind(self._config.address)
        own = self._desk.own()
        return MemberRecord(
            scope=self._keys.scope,
            id=self.me,
            address=self._config.address,
            slots=self._config.slots,
            boot_id=boot_id(),
            store_port=int(self._socket.getsockname()[1]),
            probe_port=self._probe_port,
            stopped=own.stopped,
            outcome=own.outcome,
            unreachable=own.unreachable,
            leaving=own.leaving,
            inventory=own.inventory,
            state_port=own.state_port,
            fingerprint=dict(own.fingerprint),
            lost=own.lost,
        )
