"""bench.rendezvous: one real quick run, and its arithmetic on made-up costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench._common import Row
from bench.rendezvous import Cost, Found, growth_rows, judged

ROOT = Path(__file__).resolve().parents[2]


def a_cost(members: int, *, requests: int, size: int) -> Cost:
    return Cost(members=members, seconds=1.0, requests=requests, keepalives=0, bytes=size, writes=members, etcd_cpu=0.1, members_cpu=0.1)


@pytest.mark.timeout(60)
def test_the_quick_bench_forms_joins_and_loses_for_real(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "bench.rendezvous", "--quick", "--sizes", "10", "--processes", "2", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in json.loads(file.read_text())["rows"]}

    for name in ("form_10", "registered_10", "seen_10", "join_10", "loss_10"):
        assert 0 < rows[name]["median"] < 30, name
    # The first generation costs every member its key; a change costs it one report. The rest are the coordinator's.
    assert 1 <= rows["form_writes_per_member_10"]["median"] <= 2
    assert 1 <= rows["join_writes_per_member_10"]["median"] <= 2
    assert 1 <= rows["loss_writes_per_member_10"]["median"] <= 2
    # One keepalive each third of the lease, and the watch alone brings the rest.
    assert 1.0 <= rows["idle_requests_per_node_s_ttl_2"]["median"] <= 2.0
    assert rows["idle_requests_per_node_s"]["median"] < 1.0
    assert 0 < rows["outage_cpu_percent"]["median"] < 50


def test_a_target_is_said_to_be_met_or_missed() -> None:
    assert judged(Row.of("seen_1000", "elasticd", [0.9])).note == "target <= 1 s: met"
    assert judged(Row.of("seen_1000", "elasticd", [1.1]), note="two cores").note == "target <= 1 s: MISSED; two cores"
    assert judged(Row.of("seen_1000", "elasticd", [None])).note == "target <= 1 s: MISSED"
    assert judged(Row.of("seen_10", "elasticd", [9.0])).note == ""


def test_growth_is_1_where_a_member_costs_the_same_in_any_job_and_2_where_it_costs_ten_times_as_much_in_a_ten_times_larger_one() -> None:
    small, large = Found(size=10), Found(size=100)
    small.costs["join"].append(a_cost(11, requests=30, size=1_000))
    large.costs["join"].append(a_cost(101, requests=300, size=100_000))
    exponents = {row.name: row.median for row in growth_rows([small, large])}
    assert exponents == {"join_requests_growth_10_to_100": pytest.approx(1.0), "join_bytes_growth_10_to_100": pytest.approx(2.0)}
