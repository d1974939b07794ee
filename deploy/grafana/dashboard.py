"""Makes `elasticd.json`, the dashboard that Grafana imports: `python -m deploy.grafana.dashboard >deploy/grafana/elasticd.json`; a test keeps it so.

Owns: which panels there are, what they ask Prometheus, and where they lie. Must not: know how a metric comes about.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any, Final

WIDTH: Final = 24
"""Columns of Grafana's grid."""
HEIGHT: Final = 8
"""Of a panel, in rows of the grid."""
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
JOB: Final = 'cluster=~"$cluster",job_name=~"$job_name"'
NODE: Final = 'cluster=~"$cluster",instance=~"$instance"'
BOTH: Final = f"{JOB},{NODE.partition(',')[2]}"
RATE: Final = "$__rate_interval"


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        ask: what Prometheus is asked -> the name of what it answers, with labels in braces.
        unit: as Grafana names it.
        kind: timeseries, stat, state-timeline.
        stacked: its lines lie on one another.
        low, high: of its axis.
        names: value -> the word that is shown instead.
    """

    title: str
    ask: dict[str, str]
    unit: str = "short"
    about: str = ""
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    low: float | None = None
    high: float | None = None
    names: dict[str, str] = field(default_factory=dict)


def _quantile(share: float, bucket: str, by: str = "cluster, job_name") -> str:
    return f"histogram_quantile({share:g}, sum by ({by}, le) (rate({bucket}[{RATE}])))"


ROWS: Final[dict[str, tuple[Panel, ...]]] = {
    "Jobs": (
        Panel(
            title="Activity",
            kind="state-timeline",
            width=16,
            about="What each node's agent spends its time on.",
            ask={f"sum by (job_name, instance, activity) (elasticd_job_activity{{{BOTH}}})": "{{job_name}} {{instance}} {{activity}}"},
            names={"1": "yes"},
        ),
        Panel(title="Generation", kind="stat", width=4, ask={f"max by (job_name) (elasticd_job_generation{{{JOB}}})": "{{job_name}}"}),
        Panel(
            title="Restarts left",
            kind="stat",
            width=4,
            ask={f"max by (job_name) (elasticd_job_restart_budget{{{JOB}}}) - max by (job_name) (elasticd_job_restarts_used{{{JOB}}})": "{{job_name}}"},
        ),
        Panel(
            title="Nodes",
            low=0,
            ask={
                f"elasticd_job:nodes:max{{{JOB}}}": "{{job_name}} now",
                f"max by (job_name) (elasticd_job_nodes_desired{{{JOB}}})": "{{job_name}} wanted",
                f"max by (job_name) (elasticd_job_nodes_min{{{JOB}}})": "{{job_name}} least",
            },
        ),
        Panel(title="World size", low=0, ask={f"max by (job_name) (elasticd_job_world_size{{{JOB}}})": "{{job_name}}"}),
        Panel(
            title="New generations by cause",
            low=0,
            stacked=True,
            about="A generation counts once, however many nodes it has.",
            ask={
                "max by (job_name, cause) (sum by (job_name, cause, instance) "
                f"(increase(elasticd_job_rescales_total{{{JOB}}}[{RATE}]))) > 0.5": "{{job_name}} {{cause}}"
            },
        ),
    ),
    "Training": (
        Panel(title="Samples a second", low=0, ask={f"elasticd_job:samples:rate5m{{{JOB}}}": "{{job_name}}"}),
        Panel(
            title="Step",
            unit="s",
            low=0,
            ask={
                f"elasticd_job:step_duration_seconds:p50_5m{{{JOB}}}": "{{job_name}} p50",
                f"elasticd_job:step_duration_seconds:p95_5m{{{JOB}}}": "{{job_name}} p95",
            },
        ),
        Panel(title="Loss", ask={f"max by (job_name) (elasticd_job_loss{{{JOB}}})": "{{job_name}}"}),
        Panel(
            title="Goodput",
            unit="percentunit",
            low=0,
            high=1,
            about="Share of the last hour that went into steps that count.",
            ask={f"elasticd_job:goodput:ratio_rate1h{{{JOB}}}": "{{job_name}}"},
        ),
        Panel(
            title="Where the time goes",
            unit="percentunit",
            low=0,
            high=1,
            stacked=True,
            ask={
                f"sum by (activity) (rate(elasticd_job_wall_seconds_total{{{BOTH}}}[{RATE}])) "
                f"/ on () group_left () sum(rate(elasticd_job_wall_seconds_total{{{BOTH}}}[{RATE}]))": "{{activity}}"
            },
        ),
        Panel(title="Step number", ask={f"max by (job_name) (elasticd_job_step{{{JOB}}})": "{{job_name}}"}),
        Panel(
            title="Where a step goes",
            unit="s",
            low=0,
            stacked=True,
            about="Mean over the ranks.",
            ask={f"avg by (phase) (elasticd_rank_phase_seconds{{{BOTH}}})": "{{phase}}"},
        ),
        Panel(
            title="Slowest rank",
            low=1,
            about="Its own work over that of the middle rank.",
            ask={f"max by (job_name) (elasticd_job_slowest_rank_ratio{{{JOB}}})": "{{job_name}}"},
        ),
        Panel(
            title="Step of each rank, without waiting for others",
            unit="s",
            low=0,
            ask={
                f"elasticd_rank_step_seconds{{{BOTH}}} - on (cluster, instance, job_name, local_rank) "
                f'elasticd_rank_phase_seconds{{{BOTH},phase="communication"}}': "{{instance}} {{local_rank}}"
            },
        ),
        Panel(
            title="Gradient norm, and values that are no numbers",
            ask={
                f"max by (job_name) (elasticd_job_gradient_norm{{{JOB}}})": "{{job_name}} norm",
                f"sum by (job_name) (increase(elasticd_job_nonfinite_values_total{{{JOB}}}[{RATE}]))": "{{job_name}} not finite",
            },
        ),
        Panel(
            title="Memory of the ranks",
            unit="bytes",
            low=0,
            ask={f"max by (instance, kind) (elasticd_rank_memory_bytes{{{BOTH}}})": "{{instance}} {{kind}}"},
        ),
        Panel(
            title="Workers that ended",
            low=0,
            stacked=True,
            ask={f"sum by (job_name, reason) (increase(elasticd_job_worker_ends_total{{{BOTH}}}[{RATE}]))": "{{job_name}} {{reason}}"},
        ),
    ),
    "Recovery and checkpoints": (
        Panel(
            title="Recovery",
            unit="s",
            low=0,
            about="From the stop to the first new step; of the last hour.",
            ask={
                f"histogram_quantile({share}, sum by (job_name, le) (increase(elasticd_job_recovery_duration_seconds_bucket{{{JOB}}}[1h])))": name
                for share, name in ((0.5, "{{job_name}} p50"), (0.95, "{{job_name}} p95"))
            },
        ),
        Panel(
            title="Parts of recoveries",
            unit="s",
            low=0,
            stacked=True,
            ask={f"max by (job_name, phase) (increase(elasticd_job_recovery_phase_seconds_total{{{JOB}}}[1h]))": "{{job_name}} {{phase}}"},
        ),
        Panel(
            title="Downtime by cause",
            unit="s",
            low=0,
            stacked=True,
            ask={f"max by (job_name, cause) (increase(elasticd_job_downtime_seconds_total{{{JOB}}}[1h]))": "{{job_name}} {{cause}}"},
        ),
        Panel(
            title="Since the last checkpoint",
            unit="s",
            low=0,
            ask={
                f"elasticd_job:unsaved_seconds:min{{{JOB}}}": "{{job_name}}",
                f"max by (job_name) (elasticd_job_checkpoint_interval_seconds{{{JOB}}})": "{{job_name}} interval",
            },
        ),
        Panel(
            title="A checkpoint takes",
            unit="s",
            low=0,
            ask={
                f"histogram_quantile({share}, sum by (job_name, le) (increase(elasticd_job_checkpoint_duration_seconds_bucket{{{JOB}}}[1h])))": name
                for share, name in ((0.5, "{{job_name}} p50"), (0.95, "{{job_name}} p95"))
            },
        ),
        Panel(
            title="Checkpoints written and failed",
            low=0,
            ask={
                f"sum by (job_name) (increase(elasticd_job_checkpoints_total{{{JOB}}}[1h]))": "{{job_name}} written",
                f"sum by (job_name) (increase(elasticd_job_checkpoint_failures_total{{{JOB}}}[1h]))": "{{job_name}} failed",
            },
        ),
        Panel(title="Size of a checkpoint", unit="bytes", low=0, ask={f"max by (job_name) (elasticd_job_checkpoint_bytes{{{JOB}}})": "{{job_name}}"}),
        Panel(
            title="Steps that a crash would cost",
            low=0,
            ask={
                f"max by (job_name) (elasticd_job_step{{{JOB}}}) - max by (job_name) (elasticd_job_snapshot_step{{{JOB}}})": "{{job_name}} of a node",
                f"max by (job_name) (elasticd_job_step{{{JOB}}}) - max by (job_name) (elasticd_job_checkpoint_step{{{JOB}}})": "{{job_name}} of all nodes",
            },
        ),
        Panel(title="Steps lost", low=0, ask={f"max by (job_name) (increase(elasticd_job_steps_lost_total{{{JOB}}}[1h]))": "{{job_name}}"}),
    ),
    "etcd": (
        Panel(
            title="Out of reach",
            unit="s",
            low=0,
            about="Time since etcd answered last.",
            ask={f"time() - elasticd_etcd_last_success_timestamp_seconds{{{NODE}}}": "{{instance}}"},
        ),
        Panel(
            title="A request takes",
            unit="s",
            low=0,
            ask={
                _quantile(share, f"elasticd_etcd_request_duration_seconds_bucket{{{NODE}}}", "instance"): f"{{{{instance}}}} p{100 * share:g}"
                for share in (0.5, 0.99)
            },
        ),
        Panel(
            title="Requests that failed, a second",
            low=0,
            stacked=True,
            ask={f'sum by (instance, code) (rate(elasticd_etcd_requests_total{{{NODE},code!="ok"}}[{RATE}]))': "{{instance}} {{code}}"},
        ),
        Panel(
            title="Requests a second",
            low=0,
            stacked=True,
            ask={f"sum by (instance) (rate(elasticd_etcd_requests_total{{{NODE}}}[{RATE}]))": "{{instance}}"},
        ),
        Panel(
            title="Other endpoints taken, watches begun again",
            low=0,
            ask={
                f"sum by (instance) (increase(elasticd_etcd_endpoint_switches_total{{{NODE}}}[{RATE}]))": "{{instance}} endpoints",
                f"sum by (instance) (increase(elasticd_etcd_watch_restarts_total{{{NODE}}}[{RATE}]))": "{{instance}} watches",
            },
        ),
        Panel(
            title="Frozen and unregistered",
            low=0,
            high=1,
            ask={f"elasticd_frozen{{{NODE}}}": "{{instance}} frozen", f"1 - elasticd_registered{{{NODE}}}": "{{instance}} not registered"},
        ),
    ),
    "GPUs": (
        Panel(title="Utilization", unit="percentunit", low=0, high=1, ask={f"elasticd_gpu_utilization_ratio{{{NODE}}}": "{{instance}} {{gpu}}"}),
        Panel(
            title="GPU memory in use",
            unit="percentunit",
            low=0,
            high=1,
            ask={f"elasticd_gpu_memory_used_bytes{{{NODE}}} / elasticd_gpu_memory_total_bytes{{{NODE}}}": "{{instance}} {{gpu}}"},
        ),
        Panel(title="Temperature", unit="celsius", ask={f"elasticd_gpu_temperature_celsius{{{NODE}}}": "{{instance}} {{gpu}}"}),
        Panel(title="Power", unit="watt", low=0, ask={f"elasticd_gpu_power_watts{{{NODE}}}": "{{instance}} {{gpu}}"}),
        Panel(title="Slowed down", low=0, high=1, ask={f"elasticd_gpu_throttled{{{NODE}}}": "{{instance}} {{gpu}}"}),
        Panel(
            title="Errors",
            low=0,
            ask={
                f"increase(elasticd_gpu_xid_errors_total{{{NODE}}}[1h])": "{{instance}} {{gpu}} Xid",
                f"elasticd_gpu_ecc_uncorrected_errors_total{{{NODE}}}": "{{instance}} {{gpu}} ECC",
            },
        ),
    ),
    "Hosts": (
        Panel(title="Processors", unit="percentunit", low=0, high=1, ask={f"elasticd_host_cpu_ratio{{{NODE}}}": "{{instance}}"}),
        Panel(
            title="Memory in use",
            unit="percentunit",
            low=0,
            high=1,
            ask={f"1 - elasticd_host_memory_available_bytes{{{NODE}}} / elasticd_host_memory_total_bytes{{{NODE}}}": "{{instance}}"},
        ),
        Panel(
            title="Disks: free",
            unit="percentunit",
            low=0,
            high=1,
            ask={f"elasticd_host_disk_free_bytes{{{NODE}}} / elasticd_host_disk_size_bytes{{{NODE}}}": "{{instance}} {{volume}}"},
        ),
        Panel(
            title="Network",
            unit="Bps",
            ask={
                f"rate(elasticd_host_network_receive_bytes_total{{{NODE}}}[{RATE}])": "{{instance}} received",
                f"-rate(elasticd_host_network_transmit_bytes_total{{{NODE}}}[{RATE}])": "{{instance}} sent",
            },
        ),
        Panel(
            title="What the kernel says",
            low=0,
            stacked=True,
            ask={f"sum by (instance, kind) (increase(elasticd_kernel_events_total{{{NODE}}}[{RATE}]))": "{{instance}} {{kind}}"},
        ),
        Panel(title="Load", low=0, ask={f"elasticd_host_load1{{{NODE}}}": "{{instance}}"}),
    ),
    "Daemons": (
        Panel(title="Up", kind="state-timeline", ask={f'up{{job="elasticd",{NODE}}}': "{{instance}}"}, names={"0": "down", "1": "up"}),
        Panel(
            title="A turn of the loop takes",
            unit="s",
            low=0,
            ask={_quantile(0.95, f"elasticd_loop_turn_duration_seconds_bucket{{{NODE}}}", "instance"): "{{instance}} p95"},
        ),
        Panel(
            title="Certificates end in",
            unit="s",
            ask={f"elasticd_certificate_expiry_timestamp_seconds{{{NODE}}} - time()": "{{instance}} {{certificate}}"},
        ),
        Panel(
            title="Problems, cordoned, drained",
            low=0,
            ask={
                f"elasticd_problems{{{NODE}}}": "{{instance}} problems",
                f"elasticd_cordoned{{{NODE}}}": "{{instance}} cordoned",
                f"elasticd_drained{{{NODE}}}": "{{instance}} drained",
            },
        ),
        Panel(
            title="Slots",
            low=0,
            ask={f"sum(elasticd_slots{{{NODE}}})": "in all", f"sum(elasticd_slots_used{{{NODE}}})": "in use"},
        ),
        Panel(
            title="What a daemon costs",
            unit="percentunit",
            low=0,
            about="Of one processor.",
            ask={f'rate(process_cpu_seconds_total{{job="elasticd",{NODE}}}[{RATE}])': "{{instance}}"},
        ),
    ),
}
ANNOTATIONS: Final = (
    (
        "Generations",
        "blue",
        f"max by (job_name, cause) (sum by (job_name, cause, instance) (increase(elasticd_job_rescales_total{{{JOB}}}[1m]))) > 0.5",
        "{{job_name}}: {{cause}}",
    ),
    ("Alerts", "red", 'ALERTS{alertname=~"Elasticd.*",alertstate="firing",severity=~"critical|warning"}', "{{alertname}} {{job_name}} {{instance}}"),
)
"""Name, colour, what Prometheus is asked, and what is written at the mark."""
VARIABLES: Final = {
    "cluster": "label_values(elasticd_build_info, cluster)",
    "job_name": 'label_values(elasticd_job_state{cluster=~"$cluster"}, job_name)',
    "instance": 'label_values(elasticd_build_info{cluster=~"$cluster"}, instance)',
}


def dashboard() -> dict[str, Any]:
    """The whole of it, as Grafana's JSON model has it."""
    return {
        "uid": "elasticd",
        "title": "elasticd",
        "description": "Jobs, nodes and GPUs of elasticd. It needs the recording rules of elasticd.rules.yml.",
        "tags": ["elasticd"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "templating": {"list": [_datasource(), *(_variable(name, query) for name, query in VARIABLES.items())]},
        "annotations": {"list": [_annotation(*one) for one in ANNOTATIONS]},
        "panels": _panels(),
    }


def _panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS.items():
        made.append({"id": len(made) + 1, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _place(0, y, WIDTH, 1)})
        x, y = 0, y + 1
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            made.append(_panel(panel, len(made) + 1, _place(x, y, panel.width, HEIGHT)))
            x += panel.width
        y += HEIGHT
    return made


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    defaults |= {name: value for name, value in (("min", panel.low), ("max", panel.high)) if value is not None}
    if panel.names:
        defaults["mappings"] = [{"type": "value", "options": {value: {"text": word} for value, word in panel.names.items()}}]
    if panel.stacked:
        defaults["custom"] = {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 30}
    targets = [
        {"refId": chr(ord("A") + place_), "datasource": DATASOURCE, "expr": expr, "legendFormat": name, "instant": panel.kind == "stat"}
        for place_, (expr, name) in enumerate(panel.ask.items())
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {},
        "targets": targets,
    }


def _annotation(name: str, colour: str, expr: str, title: str) -> dict[str, Any]:
    return {"name": name, "datasource": DATASOURCE, "enable": True, "hide": False, "iconColor": colour, "expr": expr, "step": "60s", "titleFormat": title}


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",  # also what has no such label
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
