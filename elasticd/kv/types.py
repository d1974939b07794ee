"""The values that cross the kv surface: what is read, compared, written and watched.

Owns: plain frozen values, and no behaviour beyond construction. Must not: know gRPC or etcd3; only `client` and its neighbours do.

Revisions are etcd's: one counter for the whole store, so that "changed since I listed" is an integer comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from elasticd.observability.durations import Counted


@dataclass(frozen=True, kw_only=True, slots=True)
class TLSFiles:
    """Paths of the PEM files for mutual TLS. `cert` and `key` come together or not at all."""

    cacert: Path
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KVConfig:
    """How to reach etcd.

    Attributes:
        endpoints: "host:port" each, tried in this order.
        tls: files for TLS; None speaks plain text.
        call_timeout: seconds one attempt at one endpoint may take. A whole call gives up after twice that.
        one_connection: leases and watches go over the connection of the calls. For benches, where hundreds of members share a machine.
    """

    endpoints: tuple[str, ...]
    tls: TLSFiles | None = None
    call_timeout: float = 2.0
    one_connection: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyValue:
    """One key as etcd holds it. `lease` is 0 when none is bound; `version` counts the writes since it was created."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0
    version: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """All keys of a range at one revision of the store, in key order unless asked otherwise.

    With `unchanged` true the asker knows them already, and `items` is empty.
    """

    revision: int
    items: tuple[KeyValue, ...]
    unchanged: bool = False


class Target(Enum):
    """What a comparison looks at."""

    CREATE = "create_revision"  # 0 means the key does not exist
    MOD = "mod_revision"
    LEASE = "lease"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compare:
    """One condition of a transaction: `target` of `key` `op` `value`, op one of "==", "!=", "<", ">".

    With `prefix` true, every existing key under `key` must fulfil it (additions and changes are seen, deletions are not).
    """

    key: str
    target: Target
    op: str
    value: int
    prefix: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Put:
    """Write `value` under `key`, bound to `lease` (0 for none)."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Delete:
    """Remove `key`."""

    key: str


Op = Put | Delete


@dataclass(frozen=True, kw_only=True, slots=True)
class TxnResult:
    """What became of a transaction.

    Attributes:
        succeeded: whether the comparisons held and the operations were done, now or by an earlier attempt of the same call.
        revision: the store's revision in the answer; the mod revision of what was put when it succeeded at the first attempt.
    """

    succeeded: bool
    revision: int


class EventKind(Enum):
    """What happened to a key."""

    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchEvent:
    """One change. For DELETE the value is empty and `item.mod_revision` is the revision of the deletion."""

    kind: EventKind
    item: KeyValue


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchRange:
    """What to watch: one key, or every key under a prefix."""

    key: str
    prefix: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchBatch:
    """Changes up to and including `revision`, in order.

    With `reset` true the history was compacted away: `events` holds every key of the watched ranges as a PUT at `revision`, and whatever
    the receiver knew of these ranges is void.
    """

    revision: int
    events: tuple[WatchEvent, ...]
    reset: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class KVStats:
    """Counters since the client was made, for metrics and benches.

    Attributes:
        requests: attempts that were begun, keepalives excepted.
        by_code: `outcomes.Code` -> attempts that ended so, keepalives included.
        durations: of these.
        last_success: when one ended well last, in seconds since the epoch; 0 if none has.
    """

    requests: int = 0
    failures: int = 0
    endpoint_switches: int = 0
    watch_restarts: int = 0
    keepalives: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    by_operation: dict[str, int] = field(default_factory=dict)
    by_code: dict[str, int] = field(default_factory=dict)
    durations: Counted = field(default_factory=Counted)
    last_success: float = 0.0
