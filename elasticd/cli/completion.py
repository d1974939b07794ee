"""Names for the shell to complete: jobs and nodes, as the daemon knows them, and settings.

Owns: asking for them in a moment or not at all. Must not: print or fail; a shell shows whatever is written while somebody types.
"""

from __future__ import annotations

import os
from pathlib import Path

import typer

_TIMEOUT = 0.5
"""Seconds for each step of the one request."""


def job_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Jobs whose name begins so."""
    return _names(ctx, "/v1/jobs", "jobs", "job", incomplete)


def node_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Nodes whose name begins so."""
    return _names(ctx, "/v1/nodes", "nodes", "name", incomplete)


def setting_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Settings of training that etcd may hold and whose name begins so."""
    try:
        from trainer.settings import SAFE

        sign = "=" if ctx.info_name == "set" else ""
        return [name + sign for name in sorted(SAFE) if name.startswith(incomplete)]
    except Exception:
        return []


def _names(ctx: typer.Context, path: str, kind: str, field: str, incomplete: str) -> list[str]:
    try:
        from elasticd.cli.asking import DEFAULT_SOCKET
        from elasticd.daemon.client import ApiClient

        socket = ctx.params.get("socket") or os.environ.get("ELASTICCTL_SOCKET") or DEFAULT_SOCKET
        items = ApiClient(Path(socket), timeout=_TIMEOUT).get(path)["data"][kind]
        return [name for item in items if (name := str(item[field])).startswith(incomplete)]
    except Exception:  # whatever it is, nobody is here who could be told
        return []
