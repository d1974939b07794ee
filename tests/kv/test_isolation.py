"""What importing and using the package does to a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)
SWITCH = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
MAKE = "from elasticd.kv import EtcdKV, KVConfig; kv = EtcdKV(KVConfig(endpoints=('127.0.0.1:1',)))"


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter prints; its warnings are errors."""
    import os

    clean = {name: value for name, value in os.environ.items() if name != SWITCH}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=50, env=clean | environment)
    return done.stdout.strip() + done.stderr.strip()


def test_importing_the_package_is_light() -> None:
    """Types, errors and classes come without etcd3, grpc or protobuf."""
    code = "import elasticd.kv, sys; print([name for name in ('etcd3', 'grpc', 'google.protobuf') if name in sys.modules])"
    assert run(code) == "[]"


def test_the_switch_is_taken_out_again() -> None:
    """Workers started later keep protobuf's fast implementation."""
    code = f"{MAKE}; import os, sys; print(os.environ.get({SWITCH!r}), 'grpc' in sys.modules)"
    assert run(code) == "None True"


def test_a_users_own_switch_is_kept() -> None:
    """What was in the environment is there again."""
    assert run(f"{MAKE}; import os; print(os.environ[{SWITCH!r}])", **{SWITCH: "upb"}) == "upb"


def test_protobuf_first_is_told_clearly() -> None:
    """Another implementation in the process already: one UsageError with the remedy, not protobuf's TypeError."""
    said = run(f"import google.protobuf.timestamp_pb2; {MAKE}")
    assert "UsageError: protobuf was imported before elasticd's etcd client in this process" in said
    assert f"{SWITCH}=python" in said
    assert "Descriptors cannot be created directly" not in said


def test_protobuf_first_in_its_pure_form_is_fine() -> None:
    """The remedy in that message works."""
    assert run(f"import google.protobuf.timestamp_pb2; {MAKE}; print('ok')", **{SWITCH: "python"}) == "ok"


def test_grpc_stays_quiet_about_handshakes() -> None:
    """A wrong certificate is our error to word; the setting for it does not leak either."""
    assert run(f"{MAKE}; import os; print(os.environ.get('GRPC_VERBOSITY'))") == "None"


def test_an_unclosed_client_lets_the_process_end() -> None:
    """Threads of leases and watches hold nothing up and print nothing at exit."""
    code = f"{MAKE}; from elasticd.kv import WatchRange; kv.watch([WatchRange(key='a')], 1, print); print('end')"
    assert run(code) == "end"
