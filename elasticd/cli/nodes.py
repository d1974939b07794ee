"""The verbs about nodes: nodes, cordon, drain, uncordon.

Owns: what each asks of the daemon, what it says about the answer, and what it waits for. Must not: know when a node is drained (`waiting`), or how
a table looks (`render_cluster`).
"""

from __future__ import annotations

from typing import Final

from elasticd.cli import waiting
from elasticd.cli.asking import Document, Manner, change, check_reason, confirm, given, node_path, put
from elasticd.cli.talk import Talk
from elasticd.cli.waiting import Errand, Sight, wait
from elasticd.errors import UsageError

_LOOK_TIMEOUT: Final = 3.0
_BUSY: Final = ("running", "starting", "leaving")


def show(node: str | None, manner: Manner) -> None:
    """One node, or all of them."""
    envelope = manner.client().get(node_path(node) if node else "/v1/nodes")
    if manner.as_json:
        put(envelope)
        return
    import time

    from elasticd.cli.looking import console
    from elasticd.cli.render_cluster import node_screen, nodes_screen

    data = envelope["data"]
    console().print(node_screen(data, time.time()) if node else nodes_screen(data["nodes"], time.time()))


def cordon(node: str, reason: str, manner: Manner) -> None:
    """Let nothing new be started on a node."""
    _tell(change(manner, node_path(node, "cordon"), {"reason": check_reason(reason)}), manner, f"{node}: cordoned, nothing new is started there")


def uncordon(node: str, reason: str, manner: Manner) -> None:
    """Use a node as usual again."""
    _tell(change(manner, node_path(node, "uncordon"), given(reason=reason)), manner, f"{node}: as usual again")


def drain(node: str | None, reason: str, manner: Manner) -> None:
    """Let a node's agents leave their jobs, and wait until they have. None is this node.

    Raises:
        UsageError: it is no usable name.
    """
    check_reason(reason)
    name = node if node is not None else str(manner.client().get("/v1/status")["data"]["node"])
    confirm(lambda: _question(name, manner), manner)
    envelope = change(manner, node_path(name, "drain"), {"reason": reason})
    _tell(envelope, manner, f"{name}: is to drain")
    if not manner.detach:
        _follow(name, envelope, manner)


def _question(name: str, manner: Manner) -> str:
    jobs: list[Document] = manner.client().get(node_path(name))["data"].get("jobs", [])
    leaving = [job["name"] for job in jobs if job["state"] in _BUSY]
    return f"Drain node {name}?" + (f" It leaves {', '.join(leaving)}." if leaving else " No job runs there.")


def which(node: str | None, *, this: bool) -> str | None:
    """The node that `NODE` or `--self` names; None is this one.

    Raises:
        UsageError: neither or both are given.
    """
    if this == (node is not None):
        raise UsageError("give either NODE or --self", remedy="--self is the node whose daemon is asked")
    return node


def _tell(envelope: Document, manner: Manner, words: str) -> None:
    if not manner.as_json:
        print(words + ("" if envelope["data"].get("changed") else " (it was so already)"), flush=True)


def _follow(name: str, envelope: Document, manner: Manner) -> None:
    client = manner.client(timeout=min(_LOOK_TIMEOUT, manner.timeout or _LOOK_TIMEOUT))
    since = envelope.get("revision") or 0

    def look() -> Sight:
        seen = client.get(node_path(name))
        if (seen.get("revision") or since) < since:
            return Sight(line="")
        jobs = client.get("/v1/jobs")["data"]["jobs"] if seen["data"]["state"] == "down" else ()
        return waiting.drained(seen["data"], jobs)

    errand = Errand(wanted=f"the draining of node {name!r}", see=f"elasticctl nodes {name}", cancel=f"elasticctl uncordon {name}")
    sight = wait(look, errand, timeout=manner.timeout, talk=Talk(as_json=manner.as_json))
    if not manner.as_json:
        print(sight.line, flush=True)
