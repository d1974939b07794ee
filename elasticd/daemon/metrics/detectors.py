"""Metrics of the detectors of this node, and of what is done about what they find.

Owns: their names, and where each number is from. Must not: keep numbers of its own, judge, or ask etcd.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from elasticd.daemon.metrics.families import Label, counter, gauge
from elasticd.policy.decisions import Action

if TYPE_CHECKING:
    from elasticd.daemon.acting import Acting
    from elasticd.daemon.detecting import Detecting
    from elasticd.daemon.metrics.families import Sheet

_JOB: Final = Label(name="job_name", about="a job that runs on this node")

UP: Final = gauge("elasticd_detectors_up", "1 while the detectors of this node run and answer; no series where it has none.")
OPEN: Final = gauge("elasticd_job_incidents", "Incidents that are believed, not over, and not acknowledged, as this node's detectors see them.", _JOB)
MODEL: Final = gauge("elasticd_job_model_timestamp_seconds", "When the isolation forest was grown last; no series while it learns.", _JOB)
DONE: Final = counter(
    "elasticd_policy_actions_total", "What stopped the job's workers of free will, decided on this node; early checkpoints are not among it.", _JOB
)
WITHHELD: Final = counter(
    "elasticd_policy_withheld_total", "What the evidence asked for, and the mode, a budget, a guard or the pause did not allow; decided on this node.", _JOB
)
FAMILIES: Final = (UP, OPEN, MODEL, DONE, WITHHELD)


def fill_detectors(sheet: Sheet, detecting: Detecting | None, acting: Acting | None = None) -> None:
    """How they are, and what they see that no operator knows of."""
    if detecting is None:
        return
    pulse, settled = detecting.pulse, acting.settled if acting else {}
    sheet.put(UP, pulse.alive)
    for job in detecting.watched:
        known = settled.get(job, frozenset())
        sheet.put(OPEN, sum(one["state"] == "confirmed" and one["id"] not in known for one in detecting.incidents(job)), job)
        sheet.put(MODEL, (pulse.jobs.get(job, {}).get("model") or {}).get("grown_at"), job)


def fill_acting(sheet: Sheet, acting: Acting | None) -> None:
    """What is done about it."""
    if acting is None:
        return
    counts = acting.counts
    for (job, action), count in counts.done.items():
        sheet.put(DONE, count if action != Action.CHECKPOINT else 0, job)
    for (job, _), count in counts.withheld.items():
        sheet.put(WITHHELD, count, job)
