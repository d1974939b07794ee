"""Without root, what needs hosts is skipped, and says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import hosts
from tests.cluster.places import ROOT

AS_SOMEBODY = "import os, sys, pytest; os.geteuid = lambda: 1000; sys.exit(pytest.main(sys.argv[1:]))"


def test_hosts_are_skipped_without_root_and_the_reason_is_printed() -> None:
    command = [sys.executable, "-c", AS_SOMEBODY, "-q", "-p", "no:cacheprovider", "tests/cluster/test_hosts.py", "tests/cluster/test_etcd.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    summary = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert any("no hosts on this machine: needs root" in line for line in summary if line.startswith("SKIPPED"))
    assert "passed" not in summary[-1]
    assert "skipped" in summary[-1]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(hosts, "TOOLS", ("sh", "no-such-tool"))
    if Path("/lib/systemd/systemd").exists():
        assert hosts.missing() == "needs no-such-tool (packages iproute2, util-linux, dbus)"
    else:
        assert hosts.missing() == "needs the package systemd"
