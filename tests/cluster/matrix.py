"""Who may write which key, written out by hand: what `deploy/etcd/roles.py` has to bring about, whatever it says itself.

Owns: the expected matrix and trying it out. Must not: import or parse roles.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticd.errors import KVPermissionError
from elasticd.kv import Delete, EtcdKV, Put
from elasticd.rendezvous.keys import ClusterKeys

if TYPE_CHECKING:
    from collections.abc import Callable

CLUSTER = "test"
NODE, OTHER_NODE, OPERATOR = "n1", "n2", "alice"
JOB, OTHER_JOB = "mnist", "bert"
NEW_JOB = "unheard-of"
_KEYS = ClusterKeys(CLUSTER)
_JOB = _KEYS.job(JOB)


@dataclass(frozen=True)
class Row:
    """A key, and whether a node (NODE) and an operator may write it."""

    key: str
    node: bool
    operator: bool


MATRIX = (
    Row(_KEYS.node(NODE), node=True, operator=False),
    Row(_KEYS.node(OTHER_NODE), node=False, operator=False),
    Row(_KEYS.node(NODE + "0"), node=False, operator=False),  # a name that only begins alike
    Row(_KEYS.policy(NODE), node=True, operator=True),
    Row(_KEYS.policy(OTHER_NODE), node=False, operator=True),
    Row(_KEYS.policy(NODE + "0"), node=False, operator=True),
    Row(_KEYS.audit + "000", node=False, operator=True),
    Row(_JOB.target, node=False, operator=True),
    Row(_JOB.request("restart"), node=False, operator=True),
    Row(_JOB.request("checkpoint"), node=False, operator=True),
    Row(_JOB.budget, node=True, operator=True),
    Row(_JOB.proposal, node=True, operator=False),
    Row(_JOB.generation, node=True, operator=False),
    Row(_JOB.checkpoint, node=True, operator=False),
    Row(_JOB.member(NODE), node=True, operator=False),
    Row(_JOB.member(OTHER_NODE), node=True, operator=False),  # a dead peer's key is taken away by any member
    Row(_JOB.event(7, "formed"), node=True, operator=False),
    Row(_JOB.prefix + "something", node=False, operator=False),
    Row(_KEYS.job(NEW_JOB).target, node=False, operator=False),
    Row(_KEYS.job(NEW_JOB).member(NODE), node=False, operator=False),
    Row(_KEYS.job(JOB + "2").proposal, node=False, operator=False),
    Row(_KEYS.config_of_cluster, node=False, operator=True),
    Row(_KEYS.config_of_job(JOB), node=False, operator=True),
    Row(_KEYS.config_of_job(NEW_JOB), node=False, operator=True),
    Row(_KEYS.prefix + "something/x", node=False, operator=False),
    Row(ClusterKeys("other").node(NODE), node=False, operator=False),
    Row(ClusterKeys("other").job(JOB).target, node=False, operator=False),
    Row("/elsewhere", node=False, operator=False),
)


def may_write(kv: EtcdKV, key: str) -> bool:
    """Whether etcd lets this client put and delete a key; refusing only one of the two is a fault."""
    return _allowed(lambda: kv.txn([], [Put(key=key, value=os.urandom(4).hex().encode())])) and _allowed(lambda: kv.txn([], [Delete(key=key)]))


def may_read(kv: EtcdKV, key: str) -> bool:
    """Whether etcd lets this client read a key."""
    return _allowed(lambda: kv.get(key))


def writes(kv: EtcdKV) -> dict[str, bool]:
    """For each key of the matrix, whether this client may write it."""
    return {row.key: may_write(kv, row.key) for row in MATRIX}


def reads(kv: EtcdKV) -> dict[str, bool]:
    """For each key of the matrix, whether this client may read it."""
    return {row.key: may_read(kv, row.key) for row in MATRIX}


READABLE = {row.key: row.key.startswith(_KEYS.prefix) for row in MATRIX}
"""The whole cluster, and nothing beyond it, for nodes and operators alike."""


def _allowed(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except KVPermissionError:
        return False
    return True
