"""The one import of etcd3 and grpc.

Owns: making etcd3 0.12.0 importable beside a current protobuf, and when it happens: at `load`, which `EtcdKV` calls when it is constructed. Must
not: hold behaviour; everything it offers is untyped (`Any`) and stays inside this package.

etcd3's generated code predates protobuf 4 and loads only under protobuf's pure-Python implementation, which is chosen by an environment variable
at protobuf's first import. The variable is put back at once: worker processes inherit the environment and must keep the fast implementation.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

from elasticd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_SWITCH = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
# Unless told otherwise, gRPC's core writes each failed TLS handshake to stderr, several a second; our errors word it once.
_VERBOSITY = "GRPC_VERBOSITY"

_LONGEST_WAIT = 5.0  # seconds; deadlines that are nearer are kept to

etcd3: Any = None
rpc: Any = None
grpc: Any = None

_lock = threading.Lock()


def load() -> None:
    """Import etcd3 and grpc, once per process; before it, the names here are None.

    Raises:
        UsageError: protobuf was imported before with another implementation, which cannot be changed any more.
    """
    global etcd3, rpc, grpc  # noqa: PLW0603 - modules are process-wide, and so is what stands for them
    with _lock:
        if etcd3 is None:
            _refuse_foreign_protobuf()
            grpc, etcd3 = _import_pure()
            rpc = etcd3.etcdrpc
            _wait_without_polling(grpc)


def _refuse_foreign_protobuf() -> None:
    loaded = sys.modules.get("google.protobuf.internal.api_implementation")
    if loaded is not None and loaded.Type() != "python":
        raise UsageError(
            f"protobuf was imported before elasticd's etcd client in this process, with its {loaded.Type()!r} implementation; etcd3 needs 'python'",
            remedy=f"construct elasticd.kv.EtcdKV before anything imports protobuf, or start the process with {_SWITCH}=python",
        )


def _import_pure() -> tuple[Any, Any]:
    with _environment(_SWITCH, "python"), _environment(_VERBOSITY, os.environ.get(_VERBOSITY, "ERROR")), warnings.catch_warnings():
        # The library is of 2020; its import-time deprecations are not our user's business.
        warnings.simplefilter("ignore")
        # Here and not above: when this happens is the point of the module.
        import etcd3 as library
        import grpc as transport
    return transport, library


def _wait_without_polling(transport: Any) -> None:
    """Let whoever waits for gRPC sleep until it is notified.

    gRPC wakes each waiting thread ten times a second, so that Python 2 would hear signals: 1 ms a second for every watch, a tenth of a core for what
    a daemon and its agents hold. A release that has no such constant any more needs nothing.
    """
    common = getattr(transport, "_common", None)
    if common is not None and hasattr(common, "MAXIMUM_WAIT_TIMEOUT"):
        common.MAXIMUM_WAIT_TIMEOUT = _LONGEST_WAIT


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
