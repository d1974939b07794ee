"""What an answer of etcd means: which error it is, whether the request may have been done, and how to say it to a person.

Owns: the table from gRPC code and details to our error tree; pure functions over names. Must not: import grpc, retry or log.

The codes are those of etcd's `api/v3rpc/rpctypes/error.go` (3.4 and 3.5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from elasticd.errors import KVClosedError, KVError, KVInvalidError, KVPermissionError, KVUnavailableError, LeaseLostError

# Refused before etcd proposed anything, or never sent: doing it again cannot do it twice.
_NOT_DONE = (
    "failed to connect to all addresses",
    "connection refused",
    "etcdserver: no leader",
    "etcdserver: too many requests",
    "etcdserver: not capable",
    "name resolution failure",
    "dns resolution failed",
)
# INVALID_ARGUMENT by etcd's table, yet it means "tell me who you are".
_NO_IDENTITY = ("user name is empty", "user name not found", "authentication failed")
# INVALID_ARGUMENT by etcd's table, yet it passes: the request crossed a change of users or roles.
_AUTH_RACE = "revision of auth store is old"

_CAUSES: tuple[tuple[str, str], ...] = (
    (r"certificate_verify_failed.*(expired)", "its certificate has expired"),
    (r"certificate_verify_failed|self.signed|unable to get local issuer", "its certificate is not signed by our CA (cacert)"),
    (r"hostname verification check failed|peer name .* is not in peer certificate", "its certificate does not carry this host name"),
    (r"wrong_version_number|packet_length_too_long|http_request", "it speaks plain text, and TLS was asked for"),
    (
        r"unknown_ca|bad_certificate|certificate_required|certificate_unknown|handshake_failure|tlsv1_alert|sslv3_alert|tsi_data_corrupted",
        "it refuses our client certificate (cert, key)",
    ),
    (r"connection refused", "nothing listens there (connection refused)"),
    (r"dns resolution failed|name resolution failure|domain name not found", "the host name does not resolve"),
    (r"no route to host|network is unreachable", "no route to the host"),
    (r"deadline exceeded|timed out|handshaker? timed? ?out", "no answer in time"),
    (r"no leader", "it has no leader (quorum lost?)"),
)


class Code(StrEnum):
    """How one attempt at one endpoint ended, as it is counted."""

    OK = "ok"
    UNAVAILABLE = "unavailable"  # nothing there, or it does not serve
    TIMEOUT = "timeout"  # no answer in time
    DENIED = "denied"  # it says that we may not
    ERROR = "error"  # it refuses what was asked: a lease that is gone, a request that makes no sense


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One failed attempt.

    Attributes:
        error: the class to raise if nothing else helps.
        cause: one phrase for a person.
        maybe_done: the request may have been applied, or may be yet.
        late: there was no answer in time.
    """

    error: type[KVError]
    cause: str
    maybe_done: bool
    late: bool = False

    @property
    def moves(self) -> bool:
        """Whether another endpoint may answer better."""
        return self.error is KVUnavailableError

    @property
    def code(self) -> Code:
        """What it is counted as."""
        if self.error is KVPermissionError:
            return Code.DENIED
        if self.error in (KVUnavailableError, KVClosedError):
            return Code.TIMEOUT if self.late else Code.UNAVAILABLE
        return Code.ERROR


def error_class(code: str, details: str) -> type[KVError]:
    """The error that a gRPC status means.

    Args:
        code: the name of the status, for example "UNAVAILABLE".
        details: the text that came with it.
    """
    text = details.lower()
    if code == "CANCELLED":
        return KVClosedError
    if code in ("PERMISSION_DENIED", "UNAUTHENTICATED") or (code == "INVALID_ARGUMENT" and any(mark in text for mark in _NO_IDENTITY)):
        return KVPermissionError
    if code == "NOT_FOUND" and "lease not found" in text:
        return LeaseLostError
    if code == "INVALID_ARGUMENT" and _AUTH_RACE in text:
        return KVUnavailableError
    if code in ("INVALID_ARGUMENT", "OUT_OF_RANGE") or "larger than max" in text or "too large" in text:
        return KVInvalidError
    return KVUnavailableError


def cause_of(code: str, details: str, *, tls: bool) -> str:
    """One phrase that a person can act on, else etcd's own words."""
    text = details.lower()
    for pattern, phrase in _CAUSES:
        if re.search(pattern, text, re.DOTALL):
            return phrase
    if code == "DEADLINE_EXCEEDED":
        return "no answer in time"
    if code == "UNAVAILABLE" and re.search(r"socket closed|connection reset|recvmsg|end of tcp stream|broken pipe", text):
        return "it closed the connection" + (_at_first_sight(tls=tls) if "failed to connect" in text else "")
    return details.strip().splitlines()[0][:300] if details.strip() else code.lower().replace("_", " ")


def _at_first_sight(*, tls: bool) -> str:
    return " at once (does it speak plain text, or refuse our client certificate?)" if tls else " at once (does it want TLS?)"


def judge(code: str, details: str, *, tls: bool) -> Failure:
    """All that is to be known about a failed attempt."""
    text = details.lower()
    error = error_class(code, details)
    done = error in (KVUnavailableError, KVClosedError) and not any(mark in text for mark in _NOT_DONE)
    late = code == "DEADLINE_EXCEEDED" or "request timed out" in text
    return Failure(error=error, cause=cause_of(code, details, tls=tls), maybe_done=done, late=late)
