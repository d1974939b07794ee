"""docs/metrics.md, made of the metrics themselves: `python -m elasticd.daemon.metrics.page > docs/metrics.md`.

Owns: the words around the tables. Must not: say anything about a metric that its definition does not.
"""

from __future__ import annotations

import sys
from typing import Final

from elasticd.daemon.metrics import FAMILIES, daemon, detectors, gpus, host, jobs
from elasticd.daemon.metrics.families import Family, Label

HEAD: Final = """\
# Metrics

Made of `elasticd/daemon/metrics/` by `python -m elasticd.daemon.metrics.page`; a test keeps it so.

Each daemon answers `GET /metrics` on its plain listener (`[metrics] listen`, by default `127.0.0.1:9464`), and on its socket. It answers from what is
known, with etcd away, a loop that is stuck or a driver that hangs as well: what cannot be known is left out, and no number stands for "unknown".

- A node with 8 GPUs and one job of 8 ranks has at most 300 series.
- Labels come from closed sets, which the tables name, and from the node itself. A value that a set does not have is `other` where the set has that,
  and else left out. There is no label for the node: that is Prometheus's `instance`.
- Times are seconds since the epoch, durations seconds, sizes bytes, shares 0 to 1.
- Counters of a job begin again at 0 with a new agent, those of the daemon with a new daemon, and those of the machine when it starts.
- While a job has no agent here, its counters and what remains true of it stay; what is true only of a living agent (activity, sizes, loss, ranks) goes.
  A job that has no agent and is no longer allowed here goes altogether.
- Numbers of a job come from its agent's report, which is written about once a second. `elasticd_job_report_timestamp_seconds` says when.

Goodput, the share of time that went into new steps:

```
sum by (job_name) (rate(elasticd_job_wall_seconds_total{activity="training"}[1h])) / sum by (job_name) (rate(elasticd_job_wall_seconds_total[1h]))
```

Numbers of a whole job, such as its nodes, are said by every node of it. To count them once, take the node of rank 0:

```
elasticd_job_nodes and on (job_name, instance) elasticd_job_coordinates == 1
```
"""
_ROOMS: Final = (
    ("The daemon", daemon.FAMILIES),
    ("Jobs", jobs.FAMILIES),
    ("The machine", host.FAMILIES),
    ("GPUs", gpus.FAMILIES),
    ("Detectors and policy", detectors.FAMILIES),
)
_TAIL: Final = """\
## The daemon's process

`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds` and `process_start_time_seconds`, as prometheus-client has them.
"""


def page() -> str:
    """The whole page."""
    assert sum(len(families) for _, families in _ROOMS) == len(FAMILIES)
    return "\n".join([HEAD, _open_labels(), *(_room(title, families) for title, families in _ROOMS), _TAIL])


def _room(title: str, families: tuple[Family, ...]) -> str:
    rows = [(f"`{family.name}`", family.kind.value, "; ".join(map(_label, family.labels)) or "none", family.about) for family in families]
    lines = [f"## {title}", "", "| name | type | labels | what it is |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows), ""])


def _open_labels() -> str:
    """Those whose values no table can name."""
    found = {label.name: label.about for family in FAMILIES for label in family.labels if not label.values}
    return "\n".join(["Labels with values of the node's own:", "", *(f"- `{name}`: {about}" for name, about in found.items()), ""])


def _label(label: Label) -> str:
    return f"`{label.name}`" + (": " + ", ".join(f"`{value}`" for value in label.values) if label.values else "")


if __name__ == "__main__":
    sys.stdout.write(page())
