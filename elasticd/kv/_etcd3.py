"""The one import of etcd3 and grpc.

Owns: making etcd3 0.12.0 importable beside a current protobuf, and when it happens: at `load`, which `EtcdKV` calls when it is constructed. Must
not: hold behaviour; everything it offers is untyped (`Any`) and stays inside this package.

etcd3's generated code predates protobuf 4 and loads only under protobuf's pure-Python implementation, which is chosen by an environment variable
at protobuf's first import. The variable is put back at once: worker processes inherit the environment and must keep the fast implementation.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from typing import Any

from elasticd.errors import UsageError

_SWITCH = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"

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


def _refuse_foreign_protobuf() -> None:
    loaded = sys.modules.get("google.protobuf.internal.api_implementation")
    if loaded is not None and loaded.Type() != "python":
        raise UsageError(
            f"protobuf was imported before elasticd's etcd client in this process, with its {loaded.Type()!r} implementation; etcd3 needs 'python'",
            remedy=f"construct elasticd.kv.EtcdKV before anything imports protobuf, or start the process with {_SWITCH}=python",
        )


def _import_pure() -> tuple[Any, Any]:
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "python"
    try:
        with warnings.catch_warnings():
            # The library is of 2020; its import-time deprecations are not our user's business.
            warnings.simplefilter("ignore")
            import etcd3 as library  # noqa: PLC0415 - the point of this module is when this happens
            import grpc as transport  # noqa: PLC0415
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before
    return transport, library
