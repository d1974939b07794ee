"""What Prometheus reads: the right numbers, few enough series, in a form it takes, and an answer whatever is the matter.

NVML is a stand-in (tests.support.nvml), and so is the kernel's log; reports are files, as agents write them.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from elasticd import __version__
from elasticd.daemon import nvml
from elasticd.daemon.board import Turn
from elasticd.daemon.expiry import end_of, not_after
from elasticd.daemon.gpureadings import Gpus, bus_of
from elasticd.daemon.kmsg import EventKind, KernelCounts
from elasticd.daemon.metrics import FAMILIES
from elasticd.daemon.metrics.daemon import fill_etcd, together
from elasticd.daemon.metrics.families import Kind, Label, Sheet, counter, gauge, histogram, shown_buckets
from elasticd.daemon.metrics.gpus import fill_gpus
from elasticd.daemon.metrics.jobs import MEMORY_KINDS, STEP_PHASES
from elasticd.daemon.metrics.page import page
from elasticd.daemon.outlook import Lookout
from elasticd.daemon.reconcile import Policy
from elasticd.daemon.reports import Reports
from elasticd.kv.types import KVStats
from elasticd.observability.durations import Counted, Durations
from elasticd.observability.report import Activity, CheckpointReport, Histogram, JobReport, SnapshotReport
from elasticd.rendezvous.records import CauseKind, NodeJobState
from tests.daemon.api.world import World
from tests.daemon.scrapes import NOW, RANKS, Node, eight_gpus, having, rank, report, running, series, spec, stand_in, target, turn
from tests.support.etcd import Authority, await_
from tests.support.nvml import Gpu
from trainer.wire.window import PHASES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemon.daemons import Cluster
    from tests.support.etcd import Server

ROOT = Path(__file__).resolve().parents[2]
SERIES_MAX = 300
SECONDS_MAX = 0.02


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    stand_in(monkeypatch)
    made = Node(tmp_path)
    yield made
    made.close()


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Eight GPUs, each with an Xid, eight ranks, TLS everywhere: every metric has a number."""
    stand_in(monkeypatch, eight_gpus())
    authority = Authority(tmp_path / "tls")
    identity = authority.issue("node")
    tls = {"cert": str(identity.cert), "key": str(identity.key)}
    etcd = {"endpoints": ["127.0.0.1:1"], "cacert": str(authority.cacert), **tls, "operator_cert": tls["cert"], "operator_key": tls["key"]}
    made = Node(tmp_path / "node", watching=True, etcd=etcd, peer={"listen": ":0", **tls, "clients_ca": str(authority.cacert)})
    made.board.post(turn())
    made.board.turns.add(0.3)
    made.write(report())
    buses = {gpu.bus.lower()[4:-2]: (2, 79) for gpu in eight_gpus()}
    monkeypatch.setattr(type(made.kernel), "counts", KernelCounts(readable=True, events=dict.fromkeys(EventKind, 1), xids=buses))
    monkeypatch.setattr(
        type(made.kv), "stats", KVStats(by_code={"ok": 9, "unavailable": 2}, last_success=NOW, durations=Durations((0.01, 0.1, 0.5, 2.0)).counted)
    )
    yield made
    made.close()


# --- the whole of it -----------------------------------------------------------------------------------------------------


def test_a_node_of_eight_ranks_and_eight_gpus_with_a_number_for_everything_has_300_series_at_most(full: Node) -> None:
    full.scrape()  # a share of time needs two looks
    await_(lambda: having(found := full.scrape(), "elasticd_host_cpu_ratio") and having(found, "elasticd_gpu_power_watts"), what="every number")
    found = full.scrape()
    assert len(found) <= SERIES_MAX
    shown = {name.partition("{")[0] for name in found}
    suffix = {Kind.HISTOGRAM: "_bucket"}
    missing = {family.name for family in FAMILIES if family.name + suffix.get(family.kind, "") not in shown}
    assert missing == set(), "each metric is in this test"


def test_detectors_and_what_is_done_about_what_they_find(full: Node, node: Node) -> None:
    found = full.scrape()
    assert having(found, "elasticd_detectors_up") == {"": 1.0}
    assert having(found, "elasticd_job_incidents") == {'{job_name="llm"}': 3.0}, "an operator knows the fourth"
    assert having(found, "elasticd_job_model_timestamp_seconds") == {'{job_name="llm"}': NOW - 60.0}
    assert having(found, "elasticd_policy_actions_total") == {'{job_name="llm"}': 1.0}, "what was left out; the early checkpoint is none"
    assert having(found, "elasticd_policy_withheld_total") == {'{job_name="llm"}': 1.0}
    assert not any(name.startswith(("elasticd_detectors", "elasticd_policy")) for name in node.scrape()), "a node without detectors says nothing of them"


def test_a_scrape_takes_20_ms_at_most(full: Node) -> None:
    def median_of_some() -> float:
        took = []
        for number in range(15):
            full.write(report(step=41 + number))  # as the agent does between two scrapes
            began = time.perf_counter()
            full.text()
            took.append(time.perf_counter() - began)
        return statistics.median(took)

    full.text()
    assert min(median_of_some() for _ in range(3)) <= SECONDS_MAX, "on a machine that has other things to do as well"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (package prometheus)")
def test_promtool_has_nothing_to_say_against_the_metrics(full: Node) -> None:
    full.scrape()
    done = subprocess.run(["promtool", "check", "metrics"], input=full.text(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (package prometheus)")
def test_promtool_would_see_a_bad_name() -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input="# TYPE x_ms counter\nx_ms 1\n", capture_output=True, text=True, timeout=60)
    assert done.returncode != 0


def test_the_page_of_metrics_is_made_of_the_metrics() -> None:
    """If not: python -m elasticd.daemon.metrics.page > docs/metrics.md."""
    assert (ROOT / "docs/metrics.md").read_text() == page()


def test_every_metric_is_named_as_prometheus_wants_it() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert re.fullmatch(r"elasticd_[a-z0-9_]+", family.name)
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER), family.name
        assert not family.name.endswith(("_count", "_sum", "_bucket")), family.name
        assert family.about.endswith("."), family.name
        for label in family.labels:
            assert label.values or label.name in {"job_name", "gpu", "local_rank", "version"}, family.name


def test_phases_and_kinds_are_those_that_workers_measure() -> None:
    assert set(STEP_PHASES) <= set(PHASES)
    assert set(MEMORY_KINDS) <= {"rss", "allocated", "reserved", "peak"}


# --- the daemon ----------------------------------------------------------------------------------------------------------


def test_the_loops_heart_is_a_date(node: Node) -> None:
    assert having(node.scrape(), "elasticd_loop_last_turn_timestamp_seconds") == {}, "it has not turned yet"
    node.board.post(turn(at=time.monotonic() - 100))
    assert node.scrape()["elasticd_loop_last_turn_timestamp_seconds"] == pytest.approx(time.time() - 100, abs=1)


def test_what_the_daemon_says_of_itself(node: Node) -> None:
    node.board.post(turn(jobs=(running("train", 5), running("other", 2)), problems=("one", "two")))
    for seconds in (0.05, 0.1, 0.2, 40.0):
        node.board.turns.add(seconds)
    found = node.scrape()
    assert found[f'elasticd_build_info{{version="{__version__}"}}'] == 1
    assert {name: found[f"elasticd_{name}"] for name in ("slots", "slots_used", "problems", "registered", "etcd_reachable", "frozen")} == {
        "slots": RANKS,
        "slots_used": 7,
        "problems": 2,
        "registered": 1,
        "etcd_reachable": 1,
        "frozen": 0,
    }
    assert having(found, "elasticd_loop_turn_duration_seconds_bucket") == {'{le="0.1"}': 2, '{le="1.0"}': 3, '{le="5.0"}': 3, '{le="+Inf"}': 4}
    assert found["elasticd_loop_turn_duration_seconds_sum"] == pytest.approx(40.35)
    assert (found["elasticd_loop_wait_seconds"], found["elasticd_etcd_lease_ttl_seconds"]) == (10, 30)
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes"} <= found.keys()


@pytest.mark.parametrize(
    ("policy", "numbers"), [(None, (None, None)), (Policy(), (0, 0)), (Policy(cordoned=True), (1, 0)), (Policy(cordoned=True, draining=True), (1, 1))]
)
def test_cordon_and_drain_are_shown_once_etcd_has_said_anything(node: Node, policy: Policy | None, numbers: tuple[float | None, ...]) -> None:
    node.board.post(turn(policy=policy))
    found = node.scrape()
    assert (found.get("elasticd_cordoned"), found.get("elasticd_drained")) == numbers


def test_requests_of_all_clients_are_added_up(node: Node) -> None:
    bounds = (0.01, 0.1, 0.5, 2.0)
    one = Counted(bounds=bounds, counts=(1, 2, 0, 0, 1), total=4.0)
    two = Counted(bounds=bounds, counts=(1, 0, 0, 0, 0), total=0.5)
    sheet = Sheet()
    fill_etcd(
        sheet,
        [
            KVStats(by_code={"ok": 3, "timeout": 1}, endpoint_switches=1, last_success=100.0, durations=one),
            KVStats(by_code={"ok": 4, "denied": 1}, watch_restarts=2, last_success=200.0, durations=two),
        ],
        node.config,
    )
    found = {metric.name: [sample.value for sample in metric.samples] for metric in sheet.metrics()}
    assert found == {
        "elasticd_etcd_lease_ttl_seconds": [30],
        "elasticd_etcd_last_success_timestamp_seconds": [200],
        "elasticd_etcd_requests": [7, 1, 1],
        "elasticd_etcd_endpoint_switches": [1],
        "elasticd_etcd_watch_restarts": [2],
        "elasticd_etcd_request_duration_seconds": [2, 4, 4, 4, 5, 5, 4.5],
    }


def test_histograms_with_the_same_buckets_are_one() -> None:
    one, two = Durations((1.0, 2.0)), Durations((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5):
        one.add(seconds)
    two.add(9.0)
    assert together([one.counted, two.counted]) == Counted(bounds=(1.0, 2.0), counts=(2, 1, 1), total=12.0)


# --- certificates --------------------------------------------------------------------------------------------------------


def openssl_end(path: Path) -> float:
    told = subprocess.run(["openssl", "x509", "-noout", "-enddate", "-dateopt", "iso_8601", "-in", path], capture_output=True, text=True, check=True).stdout
    return time.mktime(time.strptime(told.strip().removeprefix("notAfter="), "%Y-%m-%d %H:%M:%SZ")) - time.timezone


@pytest.fixture
def openssl() -> str:
    path = shutil.which("openssl")
    if path is None:
        pytest.skip("needs the package openssl")
    return path


def self_signed(openssl: str, path: Path, days: int) -> Path:
    made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=x", "-days", str(days)]
    subprocess.run([openssl, *made, "-keyout", path.with_suffix(".key"), "-out", path], capture_output=True, check=True)
    return path


@pytest.mark.parametrize("days", [3, 3650, 36_500])
def test_a_certificate_ends_when_openssl_says_so(openssl: str, tmp_path: Path, days: int) -> None:
    """After 2049 the date is written in another form."""
    cert = self_signed(openssl, tmp_path / "cert.pem", days)
    command = [openssl, "x509", "-noout", "-enddate", "-dateopt", "iso_8601", "-in", str(cert)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert end_of(cert) == datetime.fromisoformat(told.strip().removeprefix("notAfter=")).timestamp()


def test_of_several_certificates_in_a_file_the_first_to_end_counts(openssl: str, tmp_path: Path) -> None:
    soon, late = (self_signed(openssl, tmp_path / f"{days}.pem", days) for days in (3, 300))
    bundle = tmp_path / "bundle.pem"
    for order in ((soon, late), (late, soon)):
        bundle.write_text("a comment\n" + "".join(one.read_text() for one in order))
        assert end_of(bundle) == end_of(soon)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 100, b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", b"-----BEGIN CERTIFICATE-----\n%%%\n-----END CERTIFICATE-----\n"],
)
def test_a_file_without_a_certificate_has_no_end(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    assert end_of(tmp_path / "x") is None
    assert end_of(tmp_path / "missing") is None


def test_a_certificate_cut_anywhere_is_refused(tmp_path: Path) -> None:
    import ssl

    der = ssl.PEM_cert_to_DER_cert(Authority(tmp_path).cacert.read_text())
    assert not_after(der) > 0
    for length in range(len(der)):
        with pytest.raises(ValueError):
            not_after(der[:length])


def test_every_certificate_that_the_configuration_names_is_shown(full: Node) -> None:
    found = having(full.scrape(), "elasticd_certificate_expiry_timestamp_seconds")
    assert set(found) == {f'{{certificate="{name}"}}' for name in ("etcd_ca", "etcd", "operator", "peer", "peer_ca")}
    assert found['{certificate="etcd"}'] == end_of(full.config.etcd.cert or Path())


# --- jobs ----------------------------------------------------------------------------------------------------------------


def test_a_jobs_numbers_are_those_of_its_report(node: Node) -> None:
    node.board.post(turn())
    node.write(report())
    found = node.scrape()
    told = {name: found[f'elasticd_job_{name}{{job_name="train"}}'] for name in ("nodes", "world_size", "generation", "coordinates", "step", "loss")}
    assert told == {"nodes": 3, "world_size": 24, "generation": 7, "coordinates": 1, "step": 41, "loss": 0.25}
    assert found['elasticd_job_last_step_timestamp_seconds{job_name="train"}'] == NOW - 0.5
    assert found['elasticd_job_report_timestamp_seconds{job_name="train"}'] == NOW
    counts = {name: found[f'elasticd_job_{name}_total{{job_name="train"}}'] for name in ("steps", "samples", "steps_lost", "nonfinite_values", "checkpoints")}
    assert counts == {"steps": 40, "samples": 5120, "steps_lost": 2, "nonfinite_values": RANKS, "checkpoints": 4}
    assert having(found, "elasticd_job_activity") == {'{activity="training",job_name="train"}': 1}
    assert having(found, "elasticd_job_state") == {'{job_name="train",state="running"}': 1}
    assert len(having(found, "elasticd_job_wall_seconds_total")) == len(Activity)
    assert having(found, "elasticd_job_worker_ends_total")['{job_name="train",reason="stopped"}'] == 3
    assert having(found, "elasticd_job_slowest_rank_ratio") == {'{job_name="train"}': 1.4}


def test_buckets_are_cumulative_also_where_some_are_left_out(node: Node) -> None:
    node.board.post(turn())
    node.write(report())
    found = node.scrape()
    # Counted: one below 2.5 s, two below 5, one below 30, one above 900.
    assert having(found, "elasticd_job_recovery_duration_seconds_bucket") == {
        f'{{job_name="train",le="{bound}"}}': count
        for bound, count in (("5.0", 3), ("10.0", 3), ("30.0", 4), ("60.0", 4), ("120.0", 4), ("300.0", 4), ("+Inf", 5))
    }
    assert found['elasticd_job_recovery_duration_seconds_sum{job_name="train"}'] == 1234.5
    assert found['elasticd_job_recovery_duration_seconds_count{job_name="train"}'] == 5


def test_ranks_are_shown_by_local_rank_with_phases_and_memory(node: Node) -> None:
    node.board.post(turn())
    node.write(report())
    found = node.scrape()
    assert len(having(found, "elasticd_rank_step_seconds")) == RANKS
    assert found['elasticd_rank_phase_seconds{job_name="train",local_rank="3",phase="backward"}'] == 0.03
    assert found['elasticd_rank_memory_bytes{job_name="train",kind="allocated",local_rank="7"}'] == 2000
    assert len(having(found, "elasticd_rank_phase_seconds")) == RANKS * len(STEP_PHASES)


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        (target(), (3, 2, 4, 0)),
        (target(desired=9, max_nodes=4), (4, 2, 4, 0)),
        (target(paused=True), (3, 2, 4, 1)),
        (target(run=False), (0, 2, 4, 0)),
    ],
)
def test_what_operators_want_comes_from_the_daemon(node: Node, wanted: Any, numbers: tuple[float, ...]) -> None:
    node.board.post(turn(wanted={"train": wanted}, jobs=(running(state=NodeJobState.WAITING),), etcd_problem="gone"))
    found = node.scrape()
    names = ("nodes_desired", "nodes_min", "nodes_max", "paused")
    assert tuple(found[f'elasticd_job_{name}{{job_name="train"}}'] for name in names) == numbers


def test_while_etcd_has_never_answered_what_is_wanted_is_what_the_agent_knew(node: Node) -> None:
    node.board.post(turn(wanted={}))
    node.write(report(target_nodes=5, min_nodes=1, max_nodes=6))
    found = node.scrape()
    assert [found.get(f'elasticd_job_{name}{{job_name="train"}}') for name in ("nodes_desired", "nodes_min", "nodes_max", "paused")] == [5, 1, 6, None]


def test_counters_are_there_from_0_on_so_that_the_first_event_shows(node: Node) -> None:
    node.board.post(turn())
    node.write(report(seconds={}, downtime={}, rescales={}, worker_ends={}, recovery_phases={}, recovery=Histogram(), checkpoint=CheckpointReport()))
    found = node.scrape()
    for name, count in (
        ("rescales_total", len(CauseKind) - 1),  # an operator's stop leads to none
        ("downtime_seconds_total", len(CauseKind) - 1),
        ("worker_ends_total", 4),
        ("recovery_phase_seconds_total", 5),
    ):
        numbers = having(found, f"elasticd_job_{name}")
        assert (len(numbers), set(numbers.values())) == (count, {0}), name
    assert found['elasticd_job_recovery_duration_seconds_count{job_name="train"}'] == 0
    assert found['elasticd_job_checkpoint_failures_total{job_name="train"}'] == 0


def test_what_has_nothing_to_say_is_left_out(node: Node) -> None:
    node.board.post(turn())
    node.write(report(loss=None, grad_norm=None, slowest=None, stepped_at=0.0, checkpoint=CheckpointReport(), snapshot=SnapshotReport(), ranks=()))
    shown = {name.partition("{")[0] for name in node.scrape()}
    silent = {"loss", "gradient_norm", "slowest_rank_ratio", "last_step_timestamp_seconds", "snapshot_step", "checkpoint_bytes", "checkpoint_step"}
    silent |= {"checkpoint_last_success_timestamp_seconds", "checkpoint_interval_seconds"}
    assert {f"elasticd_job_{name}" for name in silent} & shown == set()
    assert not {name for name in shown if name.startswith("elasticd_rank_")}


def test_the_slowest_rank_is_told_by_rank_0s_node_alone(node: Node) -> None:
    node.board.post(turn())
    node.write(report(node_rank=1))
    found = node.scrape()
    assert found['elasticd_job_coordinates{job_name="train"}'] == 0
    assert having(found, "elasticd_job_slowest_rank_ratio") == {}


def test_labels_cannot_be_made_up_by_a_report(node: Node) -> None:
    ranks = (rank(0), rank(0, step_seconds=0.7), rank(RANKS), rank(10**6), rank(1, phases={"x": 1.0}, memory={"y": 1}))
    node.board.post(turn())
    node.write(report(ranks=ranks, downtime={"gremlins": 1.0, "\n": 2.0, "loss": 4.0}, rescales={"x" * 1000: 5}, worker_ends={"eaten": 3}))
    found = node.scrape()
    assert having(found, "elasticd_rank_step_seconds") == {'{job_name="train",local_rank="0"}': 0.7, '{job_name="train",local_rank="1"}': 0.5}
    assert having(found, "elasticd_job_downtime_seconds_total")['{cause="other",job_name="train"}'] == 3
    assert having(found, "elasticd_job_downtime_seconds_total")['{cause="loss",job_name="train"}'] == 4
    assert having(found, "elasticd_job_rescales_total")['{cause="other",job_name="train"}'] == 5
    assert len(having(found, "elasticd_job_worker_ends_total")) == 4
    assert len(having(found, "elasticd_rank_phase_seconds")) == len(STEP_PHASES)


@pytest.mark.parametrize(
    "broken",
    [
        {"bounds": (1.0, 1.0), "counts": (1, 1, 1)},
        {"bounds": (2.0, 1.0), "counts": (1, 1, 1)},
        {"bounds": (1.0,), "counts": (1,)},
        {"bounds": tuple(map(float, range(100))), "counts": (1,) * 101},
        {"bounds": (float("nan"),), "counts": (1, 1)},
    ],
)
def test_a_histogram_that_makes_no_sense_is_left_out(broken: dict[str, Any]) -> None:
    shown = shown_buckets(Histogram.model_construct(**broken, total=1.0), (1.0,))
    assert shown is None or [bound for bound, _ in shown] == ["+Inf"]


def test_without_an_agent_what_lasts_stays_and_what_is_present_goes(node: Node) -> None:
    node.write(report())
    node.board.post(turn(jobs=(running(state=NodeJobState.WAITING),)))
    found = node.scrape()
    assert found['elasticd_job_steps_total{job_name="train"}'] == 40
    assert found['elasticd_job_checkpoint_step{job_name="train"}'] == 40
    shown = {name.partition("{")[0] for name in found}
    present = {"elasticd_job_nodes", "elasticd_job_world_size", "elasticd_job_activity", "elasticd_job_loss", "elasticd_rank_step_seconds"}
    assert present & shown == set()


def test_a_job_that_is_no_longer_allowed_stays_while_its_agent_runs_and_goes_with_it(node: Node) -> None:
    node.write(report())
    node.board.post(turn(allowed={}))
    assert any('job_name="train"' in name for name in node.scrape())
    node.board.post(turn(allowed={}, jobs=(running(state=NodeJobState.REFUSED, slots=0),)))
    assert not any("job_name" in name for name in node.scrape())


def test_a_report_of_a_job_that_nobody_allows_is_not_read(node: Node) -> None:
    node.board.post(turn())
    node.write(report("intruder"))
    assert not any("intruder" in name for name in node.scrape())


def test_a_report_that_grew_old_keeps_its_numbers_and_its_date(node: Node) -> None:
    node.board.post(turn())
    node.write(report(at=NOW - 500))
    found = node.scrape()
    assert found['elasticd_job_world_size{job_name="train"}'] == 24
    assert found['elasticd_job_report_timestamp_seconds{job_name="train"}'] == NOW - 500


# --- reports as files ----------------------------------------------------------------------------------------------------


def test_a_report_is_read_when_it_changed_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    real = JobReport.read.__func__  # type: ignore[attr-defined]

    def read(cls: Any, path: Path) -> JobReport | None:
        nonlocal count
        count += 1
        found: JobReport | None = real(cls, path)
        return found

    monkeypatch.setattr(JobReport, "read", classmethod(read))
    reports = Reports(tmp_path)
    path = tmp_path / "train.json"
    report(step=1).write(path)
    assert [reports.read(["train"])["train"].step for _ in range(3)] == [1, 1, 1]
    report(step=2).write(path)
    assert reports.read(["train"])["train"].step == 2
    assert count == 2


@pytest.mark.parametrize("data", [b"", b"{", b"\xff" * 300_000, b"[" * 100_000, b'{"v": 2}', b'{"v": 1, "job": "train", "node": "n", "at": "x"}'])
def test_a_report_that_is_garbage_does_no_harm_and_the_last_that_made_sense_counts(node: Node, data: bytes) -> None:
    node.board.post(turn())
    (node.reports / "train.json").write_bytes(data)
    assert having(node.scrape(), "elasticd_job_steps_total") == {}
    node.write(report())
    assert node.scrape()['elasticd_job_steps_total{job_name="train"}'] == 40
    (node.reports / "train.json").write_bytes(data)
    assert node.scrape()['elasticd_job_steps_total{job_name="train"}'] == 40
    (node.reports / "train.json").unlink()
    assert having(node.scrape(), "elasticd_job_steps_total") == {}


def test_a_report_of_another_job_is_not_believed(node: Node) -> None:
    node.board.post(turn())
    report("other").write(node.reports / "train.json")
    assert having(node.scrape(), "elasticd_job_steps_total") == {}


def test_what_is_no_file_is_not_waited_for(node: Node) -> None:
    """To open a pipe would take until somebody writes."""
    os.mkfifo(node.reports / "train.json")
    node.board.post(turn())
    assert having(node.scrape(), "elasticd_job_steps_total") == {}


def test_a_directory_that_cannot_be_read_leaves_the_last_numbers(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the kernel's refusal is pretended."""
    node.board.post(turn())
    node.write(report())
    node.scrape()

    def refuse(_self: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "lstat", refuse)
    assert node.scrape()['elasticd_job_steps_total{job_name="train"}'] == 40


# --- GPUs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "bus"),
    [("00000000:3B:00.0", "0000:3b:00"), ("0000:3b:00", "0000:3b:00"), ("10000:86:00.0", "10000:86:00"), ("rubbish", ""), ("", ""), ("1:2", "")],
)
def test_nvml_and_the_kernel_write_an_address_the_same_way_in_the_end(address: str, bus: str) -> None:
    assert bus_of(address) == bus


def test_each_gpu_is_shown_by_its_index_in_base_units(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, [Gpu("a"), Gpu("b", "00000000:86:00.0", utilization=50, throttle_reasons=0x40, uncorrected=3)])
    found = await_(lambda: found if having(found := node.scrape(), "elasticd_gpu_power_watts") else None, what="the GPUs")
    assert found is not None
    told = {
        name: having(found, f"elasticd_gpu_{name}") for name in ("utilization_ratio", "memory_used_bytes", "temperature_celsius", "power_watts", "throttled")
    }
    assert told == {
        "utilization_ratio": {'{gpu="0"}': 0.97, '{gpu="1"}': 0.5},
        "memory_used_bytes": {'{gpu="0"}': 60 << 30, '{gpu="1"}': 60 << 30},
        "temperature_celsius": {'{gpu="0"}': 64, '{gpu="1"}': 64},
        "power_watts": {'{gpu="0"}': 512.5, '{gpu="1"}': 512.5},
        "throttled": {'{gpu="0"}': 0, '{gpu="1"}': 1},
    }
    assert having(found, "elasticd_gpu_ecc_uncorrected_errors_total") == {'{gpu="0"}': 0, '{gpu="1"}': 3}


def test_what_a_gpu_does_not_know_is_left_out_and_a_lost_one_altogether(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    least = Gpu("a", utilization=None, memory=None, milliwatts=None, throttle_reasons=None, uncorrected=None)
    stand_in(monkeypatch, [least, Gpu("b", lost=True)])
    found = await_(lambda: found if having(found := node.scrape(), "elasticd_gpu_temperature_celsius") else None, what="the GPUs")
    assert {name for name in found or {} if name.startswith("elasticd_gpu_")} == {'elasticd_gpu_temperature_celsius{gpu="0"}'}


def test_an_older_pynvml_has_fewer_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    standin = stand_in(monkeypatch, [Gpu("a")])
    monkeypatch.delattr(type(standin), "nvmlDeviceGetCurrentClocksThrottleReasons")
    gpus = Gpus()
    (reading,) = await_(gpus.read, what="the GPU")
    assert (reading.throttled, reading.power) == (None, 512.5)


def test_a_driver_that_hangs_holds_up_no_scrape(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    standin = stand_in(monkeypatch, [Gpu("a")])
    await_(lambda: having(node.scrape(), "elasticd_gpu_power_watts"), what="the GPU")
    time.sleep(1.01)  # until it is looked at again; the clock is the real one
    standin.hang = threading.Event()
    try:
        began = time.monotonic()
        assert having(node.scrape(), "elasticd_gpu_power_watts") == {'{gpu="0"}': 512.5}, "the last number"
        for _ in range(20):
            node.scrape()
        assert time.monotonic() - began < 5.0
    finally:
        standin.hang.set()
    assert await_(lambda: nvml.ask(lambda _: 1, seconds=5) == 1, what="its answer")


def test_a_gpu_that_fell_off_the_bus_keeps_what_the_kernel_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    standin = stand_in(monkeypatch, [Gpu("a", "00000000:3B:00.0"), Gpu("b", "00000000:86:00.0")])
    gpus = Gpus()
    await_(lambda: len(gpus.read()) == 2, what="the GPUs")
    standin.gpus[1].lost = True
    await_(lambda: len(gpus.read()) == 1, what="the loss")
    sheet = Sheet()
    xids = {"0000:86:00": (3, 79), "0000:ff:00": (9, 13)}
    fill_gpus(sheet, gpus.read(), KernelCounts(readable=True, events={}, xids=xids), gpus.index_of)
    found = {metric.name: {sample.labels["gpu"]: sample.value for sample in metric.samples} for metric in sheet.metrics()}
    assert found["elasticd_gpu_xid_errors"] == {"0": 0, "1": 3}
    assert found["elasticd_gpu_last_xid"] == {"1": 79}
    assert set(found["elasticd_gpu_power_watts"]) == {"0"}


# --- the machine ---------------------------------------------------------------------------------------------------------


def test_the_volumes_are_those_of_logs_state_and_the_jobs_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    node = Node(tmp_path)
    try:
        node.board.post(turn(allowed={"train": spec(trainer={"checkpoint_dir": "/proc"}), "other": spec("other")}))
        found = await_(lambda: numbers if len(numbers := having(node.scrape(), "elasticd_host_disk_size_bytes")) == 3 else None, what="the disks")
        assert found is not None
        assert found['{volume="checkpoints"}'] == 0, "the one with the least room"
        assert found['{volume="logs"}'] == found['{volume="state"}'] == shutil.disk_usage(tmp_path).total
    finally:
        node.close()


def test_kernel_events_are_there_from_0_on_and_say_if_nobody_may_read_them(node: Node) -> None:
    with capture_logs():
        node.kernel.start()
    found = node.scrape()
    assert having(found, "elasticd_kernel_events_total") == {f'{{kind="{kind.value}"}}': 0 for kind in EventKind}
    assert found["elasticd_kernel_log_readable"] == 0


# --- an answer whatever is the matter ------------------------------------------------------------------------------------


def test_before_the_first_turn_there_is_an_answer(node: Node) -> None:
    node.board.post(Turn())
    found = node.scrape()
    assert (found["elasticd_registered"], found["elasticd_frozen"]) == (0, 1)


def test_a_room_that_fails_is_left_out_and_told_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.board.post(turn())
    node.write(report())
    monkeypatch.setattr("elasticd.daemon.metrics.host.fill_host", lambda *_: 1 / 0)
    with capture_logs() as logs:
        found = [node.scrape() for _ in range(3)][-1]
    assert [(line["event"], line["room"]) for line in logs] == [("metrics_failed", "host")]
    assert having(found, "elasticd_host_load1") == {}
    assert found['elasticd_job_step{job_name="train"}'] == 41
    monkeypatch.undo()
    assert having(node.scrape(), "elasticd_host_load1") != {}


# --- a sheet -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf")])
def test_a_number_that_says_nothing_is_no_series(value: float | None) -> None:
    sheet = Sheet()
    sheet.put(gauge("a", "A."), value)
    assert list(sheet.metrics()) == []


def test_values_of_a_closed_set_are_checked_and_what_falls_together_is_added_up() -> None:
    open_set, closed = Label(name="l", values=("a", "other")), Label(name="l", values=("a",))
    sheet = Sheet()
    for value, number in (("a", 1), ("b", 2), ("c", 4)):
        sheet.put(counter("x_total", "X.", open_set), number, value)
        sheet.put(counter("y_total", "Y.", closed), number, value)
    sheet.put(gauge("z", "Z.", open_set), 1, "a")
    sheet.put(gauge("z", "Z.", open_set), 2, "a")
    found = {metric.name: {sample.labels["l"]: sample.value for sample in metric.samples} for metric in sheet.metrics()}
    assert found == {"x": {"a": 1, "other": 6}, "y": {"a": 1}, "z": {"a": 2}}


def test_a_histogram_shows_the_buckets_that_were_counted_in() -> None:
    sheet = Sheet()
    sheet.spread(histogram("h", "H.", (1.0, 3.0)), Counted(bounds=(1.0, 2.0), counts=(1, 2, 4), total=9.0))
    (metric,) = sheet.metrics()
    assert [(sample.name, sample.labels.get("le"), sample.value) for sample in metric.samples] == [
        ("h_bucket", "1.0", 1),
        ("h_bucket", "+Inf", 7),
        ("h_count", None, 7),
        ("h_sum", None, 9),
    ]


@pytest.mark.parametrize(("state", "failed"), [("active", False), ("failed", True), ("succeeded", False), ("stopped", False)])
def test_a_job_that_failed_is_told_from_one_that_succeeded(daemon_server: Server, state: str, failed: bool) -> None:
    world = World(daemon_server)
    lookout = Lookout(world.kv, world.keys, "n1", lambda: None)
    try:
        world.target()
        world.generation("n1", state=state)
        wanted = lookout.read(["train"]).jobs["train"]
        assert (wanted.failed, bool(wanted.over)) == (failed, state != "active")
    finally:
        lookout.close()
        world.close()


def test_a_failed_job_is_shown_on_every_node_that_allows_it(node: Node) -> None:
    node.board.post(turn(jobs=(running(state=NodeJobState.ENDED, slots=0),), failed=frozenset({"train"})))
    assert having(node.scrape(), "elasticd_job_failed") == {'{job_name="train"}': 1}


# --- a real daemon -------------------------------------------------------------------------------------------------------


def test_a_real_daemon_tells_of_its_job_and_answers_while_etcd_is_away(cluster: Cluster) -> None:
    cluster.job("n1")
    cluster.start("n1")
    cluster.want(desired=1)
    cluster.await_state("n1", "running")

    def scrape() -> dict[str, float]:
        status, text = cluster.api("n1").text("/metrics")
        assert status == 200
        return series(text)

    found = await_(lambda: found if (found := scrape()).get('elasticd_job_nodes{job_name="job"}') == 1 else None, within=30, what="its agent's report")
    assert found is not None
    assert (found["elasticd_registered"], found["elasticd_etcd_reachable"], found["elasticd_frozen"]) == (1, 1, 0)
    assert having(found, "elasticd_job_state") == {'{job_name="job",state="running"}': 1}
    assert (found['elasticd_job_nodes_desired{job_name="job"}'], found['elasticd_job_coordinates{job_name="job"}']) == (1, 1)
    assert having(found, "elasticd_job_failed") == {'{job_name="job"}': 0}
    assert found['elasticd_etcd_requests_total{code="ok"}'] > 0
    assert found["elasticd_loop_turn_duration_seconds_count"] > 0
    assert abs(time.time() - found["elasticd_loop_last_turn_timestamp_seconds"]) < 30

    cluster.server.pause()
    away = await_(lambda: found if (found := scrape())["elasticd_frozen"] == 1 else None, within=30, what="the frost")
    assert away is not None
    assert away["elasticd_etcd_reachable"] == 0
    assert away['elasticd_etcd_requests_total{code="timeout"}'] > 0
    assert away["elasticd_etcd_last_success_timestamp_seconds"] < time.time()
    assert away['elasticd_job_nodes_desired{job_name="job"}'] == 1, "the last word"
    cluster.server.resume()
    await_(lambda: scrape()["elasticd_frozen"] == 0, within=30, what="the thaw")
