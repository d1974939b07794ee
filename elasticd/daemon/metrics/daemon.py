"""Metrics of the daemon itself, of its way to etcd, and of its certificates.

Owns: their names, and where each number is from. Must not: keep numbers of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from elasticd import __version__
from elasticd.daemon.board import TURN_BOUNDS
from elasticd.daemon.metrics.families import Family, Kind, Label, counter, gauge, histogram
from elasticd.kv.outcomes import Code
from elasticd.kv.stats import BOUNDS as CALL_BOUNDS
from elasticd.observability.durations import Counted

if TYPE_CHECKING:
    from pathlib import Path

    from elasticd.daemon.board import Board
    from elasticd.daemon.config import DaemonConfig
    from elasticd.daemon.metrics.families import Sheet
    from elasticd.kv.types import KVStats

CERTIFICATES: Final = ("etcd_ca", "etcd", "operator", "peer", "peer_ca")

BUILD: Final = Family(name="elasticd_build_info", kind=Kind.INFO, about="Version of the daemon.", labels=(Label(name="version", about="of elasticd"),))
LAST_TURN: Final = gauge("elasticd_loop_last_turn_timestamp_seconds", "When the decision loop turned last.")
TURNS: Final = histogram("elasticd_loop_turn_duration_seconds", "How long turns of the decision loop took.", TURN_BOUNDS)
LOOP_WAIT: Final = gauge("elasticd_loop_wait_seconds", "The longest time between two turns of the decision loop, as configured.")
REGISTERED: Final = gauge("elasticd_registered", "1 while the node's key is in etcd.")
REACHABLE: Final = gauge("elasticd_etcd_reachable", "1 if etcd answered the decision loop last time.")
FROZEN: Final = gauge("elasticd_frozen", "1 while etcd is out of reach: what runs goes on, and nothing is started or changed.")
SLOTS: Final = gauge("elasticd_slots", "Workers this node can run.")
SLOTS_USED: Final = gauge("elasticd_slots_used", "Slots held by agents that run.")
PROBLEMS: Final = gauge("elasticd_problems", "Problems named in `elasticctl nodes`.")
CORDONED: Final = gauge("elasticd_cordoned", "1 while this node is cordoned: nothing new is started on it.")
DRAINED: Final = gauge("elasticd_drained", "1 while this node is drained: its agents leave their jobs, and none is started.")
LAST_SUCCESS: Final = gauge("elasticd_etcd_last_success_timestamp_seconds", "When etcd answered a request well last.")
TTL: Final = gauge("elasticd_etcd_lease_ttl_seconds", "Silence after which etcd gives this node up: the lease of its key.")
REQUESTS: Final = counter(
    "elasticd_etcd_requests_total",
    "Requests to etcd, each attempt at each endpoint, by how they ended.",
    Label(name="code", values=tuple(code.value for code in Code)),
)
REQUEST_TIMES: Final = histogram("elasticd_etcd_request_duration_seconds", "How long requests to etcd took, also those that failed.", CALL_BOUNDS)
SWITCHES: Final = counter("elasticd_etcd_endpoint_switches_total", "Times that another endpoint of etcd was taken, since one did not answer.")
WATCH_RESTARTS: Final = counter("elasticd_etcd_watch_restarts_total", "Times that a watch of etcd broke and was begun again.")
EXPIRY: Final = gauge(
    "elasticd_certificate_expiry_timestamp_seconds",
    "When the first certificate in a file that the configuration names ends.",
    Label(name="certificate", values=CERTIFICATES),
)
FAMILIES: Final = (
    *(BUILD, LAST_TURN, TURNS, LOOP_WAIT, REGISTERED, FROZEN, SLOTS, SLOTS_USED, PROBLEMS, CORDONED, DRAINED),
    *(REACHABLE, LAST_SUCCESS, TTL, REQUESTS, REQUEST_TIMES, SWITCHES, WATCH_RESTARTS, EXPIRY),
)


def fill_loop(sheet: Sheet, board: Board, config: DaemonConfig) -> None:
    """What the loop said of itself last."""
    turn = board.turn
    sheet.put(BUILD, 1, __version__)
    # Monotonic time as a date: both clocks are read now, so that a clock that was set meanwhile does not matter.
    sheet.put(LAST_TURN, round(time.time() - (time.monotonic() - turn.at), 3) if turn.at else None)
    sheet.spread(TURNS, board.turns.counted)
    sheet.put(LOOP_WAIT, config.timing.loop_wait)
    sheet.put(REGISTERED, turn.registered)
    sheet.put(FROZEN, bool(turn.etcd_problem))
    sheet.put(SLOTS, turn.slots)
    sheet.put(SLOTS_USED, sum(job.slots for job in turn.jobs))
    sheet.put(PROBLEMS, len(turn.problems))
    if turn.policy is not None:
        sheet.put(CORDONED, turn.policy.cordoned)
        sheet.put(DRAINED, turn.policy.draining)
    sheet.put(REACHABLE, not turn.etcd_problem)


def fill_etcd(sheet: Sheet, stats: Sequence[KVStats], config: DaemonConfig) -> None:
    """What went over the wire, over all clients."""
    sheet.put(TTL, config.timing.ttl)
    sheet.put(LAST_SUCCESS, max((one.last_success for one in stats), default=0.0) or None)
    for one in stats:
        for code, count in one.by_code.items():
            sheet.put(REQUESTS, count, code)
        sheet.put(SWITCHES, one.endpoint_switches)
        sheet.put(WATCH_RESTARTS, one.watch_restarts)
    if stats:
        sheet.spread(REQUEST_TIMES, together([one.durations for one in stats]))


def fill_certificates(sheet: Sheet, ends: Mapping[str, float]) -> None:
    """When they end."""
    for name, end in ends.items():
        sheet.put(EXPIRY, end, name)


def together(spreads: Sequence[Counted]) -> Counted:
    """Several histograms with the same buckets as one."""
    counts = tuple(map(sum, zip(*(one.counts for one in spreads), strict=True)))
    return Counted(bounds=spreads[0].bounds, counts=counts, total=sum(one.total for one in spreads))


def certificate_files(config: DaemonConfig) -> dict[str, Path]:
    """The certificates that the configuration names, by what they are called here."""
    etcd, peer = config.etcd, config.peer
    files = dict(zip(CERTIFICATES, (etcd.cacert, etcd.cert, etcd.operator_cert, peer.cert, peer.clients_ca), strict=True))
    return {name: path for name, path in files.items() if path is not None}
