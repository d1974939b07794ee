"""Fixtures: a real etcd, and real agents on it that are gone afterwards."""

from __future__ import annotations

from tests.e2e.conftest import binary, make_nodes, server

__all__ = ["binary", "make_nodes", "server"]
