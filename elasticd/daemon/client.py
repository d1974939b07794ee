"""The node API as a caller sees it: HTTP over the daemon's unix socket, by the standard library alone.

Owns: one request and its answer, and turning an error answer into this project's exception for it. Must not: import what serves the API (a
command that only asks must start in a blink), or know what an answer means.
"""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from elasticd.daemon.unixpath import reachable
from elasticd.errors import (
    AccessDeniedError,
    ConflictError,
    DaemonUnavailableError,
    ElasticdError,
    KVUnavailableError,
    NotAllowedError,
    NotRunningError,
    RefusedError,
    UsageError,
)

API_VERSION: Final = "elasticd/v1"
ERRORS: Final[dict[str, type[ElasticdError]]] = {
    "usage": UsageError,
    "permission": AccessDeniedError,
    "not_running": NotRunningError,
    "conflict": ConflictError,
    "refused": RefusedError,
    "not_allowed": NotAllowedError,
    "kv_unavailable": KVUnavailableError,
    "internal": ElasticdError,
}
"""What each `code` of an error answer is raised as."""
_MAX_ANSWER = 256 * 1024 * 1024  # a thousand nodes and jobs are a few MB; a peer that never ends is not ours


class ApiClient:
    """Asks one daemon; a connection for each request. Thread-safe.

    Args:
        path: the daemon's socket.
        timeout: seconds that each step (connect, send, each piece of the answer) may take.
    """

    def __init__(self, path: Path, timeout: float = 10.0) -> None:
        self.path = path
        self.timeout = timeout

    def get(self, path: str, **query: str | int | None) -> dict[str, Any]:
        """Read something: `get("/v1/events", job="mnist", after=12)`; what is None is left out.

        Returns:
            The whole envelope: apiVersion, kind, revision, data.

        Raises:
            ElasticdError: as in `post`.
        """
        given = {name: value for name, value in query.items() if value is not None}
        return self._envelope("GET", quote(path) + (f"?{urlencode(given)}" if given else ""), None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Change something: `post("/v1/jobs/mnist/scale", {"nodes": 4})`.

        Returns:
            The whole envelope: apiVersion, kind, revision, data.

        Raises:
            UsageError, AccessDeniedError, NotRunningError, ConflictError, RefusedError, NotAllowedError, KVUnavailableError: the daemon says so.
            DaemonUnavailableError: nobody answers on the socket, or not in time; a change may then have been made all the same.
            ElasticdError: a fault of the daemon's, or an answer that is none of this API's.
        """
        return self._envelope("POST", quote(path), body or {})

    def text(self, path: str) -> tuple[int, str]:
        """The status code and the text of a path outside `/v1`, as `/readyz` and `/metrics` are, whatever the code.

        Raises:
            AccessDeniedError, DaemonUnavailableError: as in `post`.
        """
        status, body = self._exchange("GET", quote(path), None)
        return status, body.decode("utf-8", "replace")

    def _envelope(self, method: str, target: str, body: dict[str, Any] | None) -> dict[str, Any]:
        status, answer = self._exchange(method, target, body)
        try:
            document = json.loads(answer)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise self._strange(status)
        if status != http.client.OK:
            raise self._refusal(document, status)
        if document.get("apiVersion") != API_VERSION or "data" not in document:
            raise self._strange(status)
        return document

    def _refusal(self, document: dict[str, Any], status: int) -> ElasticdError:
        error = document.get("error")
        if not isinstance(error, dict):
            return self._strange(status)
        return ERRORS.get(str(error.get("code")), ElasticdError)(str(error.get("message") or "no reason given"), remedy=str(error.get("hint") or ""))

    def _strange(self, status: int) -> ElasticdError:
        return ElasticdError(
            f"what answers at {self.path} does not speak this API (HTTP {status})", remedy="is the daemon of the same version as this command?"
        )

    def _exchange(self, method: str, target: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        connection = _UnixConnection(self.path, self.timeout)
        headers = {"Accept": "application/json"} | ({} if body is None else {"Content-Type": "application/json"})
        try:
            connection.request(method, target, None if body is None else json.dumps(body).encode(), headers)
            # Closed here, not by its finalizer: Python drops what is raised in that one, and a Ctrl-C would be lost there.
            with connection.getresponse() as answer:
                data = answer.read(_MAX_ANSWER + 1)
                if answer.length and len(data) <= _MAX_ANSWER:
                    raise http.client.IncompleteRead(data, answer.length)  # read() with a limit says nothing of it
        except TimeoutError:
            remedy = "look whether the change was made before asking again" if body is not None else "see its log: journalctl -u elasticd"
            raise DaemonUnavailableError(f"the daemon at {self.path} did not answer within {self.timeout:g} s", remedy=remedy) from None
        except PermissionError:
            raise AccessDeniedError(f"may not connect to {self.path}", remedy="only members of the daemon's groups may: see `id`") from None
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
            raise DaemonUnavailableError(f"no daemon answers at {self.path} ({error.strerror})", remedy="start it: systemctl start elasticd") from None
        except (OSError, http.client.HTTPException) as error:
            raise DaemonUnavailableError(
                f"the daemon at {self.path} hung up: {str(error) or type(error).__name__}", remedy="see its log: journalctl -u elasticd"
            ) from None
        finally:
            connection.close()
        if len(data) > _MAX_ANSWER:
            raise self._strange(answer.status)
        return answer.status, data


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket. A path too long for one is a mistake of the caller's, and the kernel's words say so."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        with reachable(self._path) as name:
            self.sock.connect(name)
