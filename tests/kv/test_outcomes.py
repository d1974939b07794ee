"""The table from gRPC statuses to our errors. The texts are etcd's own (api/v3rpc/rpctypes/error.go) and gRPC's."""

from __future__ import annotations

import pytest

from elasticd.errors import KVClosedError, KVError, KVInvalidError, KVPermissionError, KVUnavailableError, LeaseLostError
from elasticd.kv.outcomes import cause_of, error_class, judge

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("code", "details", "error"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses", KVUnavailableError),
        ("UNAVAILABLE", "etcdserver: leader changed", KVUnavailableError),
        ("UNAVAILABLE", "etcdserver: request timed out", KVUnavailableError),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", KVUnavailableError),
        ("INTERNAL", "stream terminated by RST_STREAM", KVUnavailableError),
        ("UNKNOWN", "context canceled", KVUnavailableError),
        ("UNIMPLEMENTED", "unknown service etcdserverpb.KV", KVUnavailableError),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", KVUnavailableError),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", KVUnavailableError),
        ("RESOURCE_EXHAUSTED", "grpc: received message larger than max (9 vs. 8)", KVInvalidError),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", KVInvalidError),
        ("INVALID_ARGUMENT", "etcdserver: too many operations in txn request", KVInvalidError),
        ("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request", KVInvalidError),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted", KVInvalidError),
        ("PERMISSION_DENIED", "etcdserver: permission denied", KVPermissionError),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", KVPermissionError),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", KVPermissionError),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", KVUnavailableError),
        ("NOT_FOUND", "etcdserver: requested lease not found", LeaseLostError),
        ("NOT_FOUND", "etcdserver: member not found", KVUnavailableError),
        ("CANCELLED", "Channel closed!", KVClosedError),
    ],
)
def test_a_status_means_an_error(code: str, details: str, error: type[KVError]) -> None:
    """Each status that etcd or gRPC is known to give has its class."""
    assert error_class(code, details) is error


@pytest.mark.parametrize(
    ("code", "details", "maybe"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; last error: UNKNOWN: connect: Connection refused (111)", False),
        ("UNAVAILABLE", "etcdserver: no leader", False),
        ("PERMISSION_DENIED", "etcdserver: permission denied", False),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", False),
        ("UNAVAILABLE", "Socket closed", True),
        ("UNAVAILABLE", "etcdserver: leader changed", True),
        ("UNAVAILABLE", "etcdserver: request timed out", True),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", True),
        ("UNKNOWN", "", True),
    ],
)
def test_only_what_was_never_proposed_is_surely_not_done(code: str, details: str, maybe: bool) -> None:
    """Whether a write may be sent again without a comparison hangs on this."""
    assert judge(code, details, tls=False).maybe_done is maybe


@pytest.mark.parametrize(
    ("details", "tls", "phrase"),
    [
        ("last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: connect: Connection refused (111)", False, "connection refused"),
        ("Ssl handshake failed: SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED", True, "not signed by our CA"),
        ("Ssl handshake failed: SSL_ERROR_SSL: error:100000f7:SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER", True, "plain text"),
        ("failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed", True, "client certificate"),
        ("failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed", False, "want TLS"),
        ("failed to connect to all addresses; last error: UNAVAILABLE: Unwrap failed (TSI_DATA_CORRUPTED)", True, "refuses our client certificate"),
        ("Tls handshake failed: SSL_ERROR_SSL: error:10000412:SSL routines:OPENSSL_internal:SSLV3_ALERT_BAD_CERTIFICATE", True, "refuses our client"),
        ("", False, "unavailable"),
        ("etcdserver: something new", False, "etcdserver: something new"),
    ],
)
def test_a_cause_is_worded_for_a_person(details: str, tls: bool, phrase: str) -> None:
    """Known failures get words that lead to the remedy; unknown ones keep etcd's."""
    assert phrase in cause_of("UNAVAILABLE", details, tls=tls)


def test_a_member_that_dies_is_not_suspected_of_wanting_tls() -> None:
    """An established connection that ends is no question of certificates."""
    assert cause_of("UNAVAILABLE", "Socket closed", tls=False) == "it closed the connection"
    assert cause_of("UNAVAILABLE", "recvmsg:Connection reset by peer", tls=True) == "it closed the connection"
