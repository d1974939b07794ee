"""How a verb asks the daemon of this machine.

Owns: where its socket is, what may be part of a path, the question before something disruptive, and the JSON of an answer. Must not: know what
an answer means.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elasticd.cli.checks import check_range
from elasticd.cli.failures import DeclinedError, WaitInterruptedError
from elasticd.daemon.client import ApiClient
from elasticd.errors import UsageError
from elasticd.rendezvous.keys import checked_name

Document = dict[str, Any]
"""Part of an answer, as docs/api.md has it."""

DEFAULT_SOCKET: Final = Path("/run/elasticd/api.sock")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """How a verb is to be carried out.

    Attributes:
        as_json: print answers as the daemon gave them.
        detach: do not wait for what comes of a change.
        timeout: seconds to wait for it at most, 0 for as long as it takes.
        yes: do not ask.
    """

    socket: Path = DEFAULT_SOCKET
    as_json: bool = False
    detach: bool = False
    timeout: float = 0.0
    yes: bool = False

    def __post_init__(self) -> None:
        """Refuse a time that cannot be waited."""
        check_range("--timeout", self.timeout, 0, 31_536_000)

    def client(self, timeout: float = 10.0) -> ApiClient:
        """Who answers. `timeout` is seconds for each step of a request."""
        return ApiClient(self.socket, timeout=timeout)


def job_path(job: str, *more: str) -> str:
    """The path of a job, or of something of it.

    Raises:
        UsageError: it is no usable name.
    """
    return "/".join(("/v1/jobs", checked_name("job", job), *more))


def node_path(node: str, *more: str) -> str:
    """The path of a node, or of something of it.

    Raises:
        UsageError: it is no usable name.
    """
    return "/".join(("/v1/nodes", checked_name("node", node), *more))


def given(**fields: Any) -> Document:
    """The body of a request: what was given. None, "" and an unset flag are left out, and the daemon has its own word for them."""
    return {name: value for name, value in fields.items() if not (value is None or value is False or value in ("", {}))}


def check_reason(reason: str) -> str:
    """The reason of a change that needs one.

    Raises:
        UsageError: it says nothing.
    """
    if not reason.strip():
        raise UsageError("--reason is empty", remedy="say why, for whoever finds the effect later")
    return reason


def change(manner: Manner, path: str, body: Document) -> Document:
    """Ask for a change, and print the answer where it is for a program.

    Returns:
        The envelope of kind Change.

    Raises:
        WaitInterruptedError: Ctrl-C came before the answer did.
        ElasticdError: the daemon does not answer, or refuses.
    """
    try:
        envelope = manner.client().post(path, body)
    except KeyboardInterrupt:
        raise WaitInterruptedError("interrupted; whether the change was made is not known", remedy="see elasticctl status") from None
    if manner.as_json:
        put(envelope)
    return envelope


def put(envelope: Document) -> None:
    """An answer on stdout, as one line of JSON."""
    print(json.dumps(envelope), flush=True)


def confirm(question: Callable[[], str], manner: Manner) -> None:
    """Ask a person on a terminal, in words that are looked for only then; anybody else has decided already.

    Raises:
        DeclinedError: the answer is not yes.
    """
    if manner.yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    print(f"{question()} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise DeclinedError("nothing was changed")
