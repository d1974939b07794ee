"""Ending a job that is to stop and has nobody left who could say that it has.

Owns: that one transaction. Must not: end anything that has a member; ending is the members' business (PROTOCOL 19).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog

from elasticd.rendezvous import transitions
from elasticd.rendezvous.membership import End, Memory, Timing, plan
from elasticd.rendezvous.view import Ledger

if TYPE_CHECKING:
    from elasticd.kv import EtcdKV
    from elasticd.rendezvous.keys import JobKeys

log = structlog.get_logger("elasticd.daemon")


def end_if_deserted(kv: EtcdKV, keys: JobKeys) -> bool:
    """End the job as a coordinator would, if an operator wants it stopped and it has no member. Whether it was ended now.

    Its last members were lost, so that the record does not say that they were seen to stop: whoever starts it again waits as PROTOCOL 15 has it.

    Raises:
        KVError: etcd does not answer, or refuses.
    """
    ledger = Ledger(keys)
    ledger.load(kv.list(keys.prefix))
    view = ledger.view()
    if view.members or view.target is None or view.target.record.run:
        return False
    decision = plan(view, 0.0, Memory(), Timing())
    if not isinstance(decision, End):
        return False
    txn = transitions.end(keys, view, decision, at=round(time.time(), 3))
    done = kv.txn(txn.compares, txn.ops).succeeded
    if done:
        log.warning("deserted_job_ended", job=keys.job, generation=view.number, reason=decision.reason)
    return done
