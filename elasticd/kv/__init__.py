"""etcd behind a narrow surface: the only package that knows etcd3 and gRPC.

Owns: the names that the rest of elasticd may use. Must not: import etcd3 or grpc; that happens when an `EtcdKV` is constructed, because etcd3 pins
the process to protobuf's slow implementation.
"""

from elasticd.kv.client import EtcdKV
from elasticd.kv.embedded import EmbeddedEtcd, EtcdBinary, find_etcd
from elasticd.kv.lease import Lease
from elasticd.kv.types import (
    Compare,
    Delete,
    EventKind,
    KeyValue,
    KVConfig,
    KVStats,
    Listing,
    Op,
    Put,
    Target,
    TLSFiles,
    TxnResult,
    WatchBatch,
    WatchEvent,
    WatchRange,
)
from elasticd.kv.watch import Watch

__all__ = [
    "Compare",
    "Delete",
    "EmbeddedEtcd",
    "EtcdBinary",
    "EtcdKV",
    "EventKind",
    "KVConfig",
    "KVStats",
    "KeyValue",
    "Lease",
    "Listing",
    "Op",
    "Put",
    "TLSFiles",
    "Target",
    "TxnResult",
    "Watch",
    "WatchBatch",
    "WatchEvent",
    "WatchRange",
    "find_etcd",
]
