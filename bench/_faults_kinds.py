"""What is done to a training in `bench.faults`, and what a detector should say of it: a table.

Owns: names, amounts, places and times, and which findings are right. Must not: do any of it (`bench.faults`, `bench._faults_script`).

Times are seconds from the first steps on. The time scale is one tenth of real life: windows of 1 s stand for windows of 10 s, and words of a rank come
three times a second. Amounts and places differ between the traces that detectors are tuned on and those that they are judged by, and so do the seeds.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

SPLITS: Final = ("tuning", "judging")
SECONDS: Final = 90.0
BEGINS: Final = 50.0
WINDOW: Final = 1.0
"""Width of the windows that the traces are made for, seconds."""
SCALE: Final = 10.0
"""How much slower real life is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One trace of a kind.

    Attributes:
        script: what the training script is told from `begins` on: its name for it -> how much.
        amount: what else there is to know, in the units that `Kind.about` names.
        rank: that it happens to; None: all, or none.
        node: that it happens to; "" if it is no node's, or the rank's.
        begins, ends: seconds; `ends` None: it goes on to the end.
    """

    script: Mapping[str, float] = field(default_factory=dict)
    amount: float = 0.0
    rank: int | None = None
    node: str = ""
    begins: float = BEGINS
    ends: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A fault, or something benign.

    Attributes:
        name: that stays.
        fault: whether a detector should say something. Of what is benign it must not want anything done.
        scope: "rank", "node" or "job": what it concerns.
        about: what happens, in a sentence.
        says: kinds of findings any of which is right, some of them prefixes that end in "*". Of what is benign: those that may be told as advice.
        within: windows after its beginning within which it should be said; 0 where that is not asked.
        act: who does it: "script", "signal", "disk", "kernel", "neighbour", "nodes", "again" or "none".
        alone: nothing else may be recorded meanwhile.
        settings: of training, besides the usual.
    """

    name: str
    fault: bool
    scope: str
    about: str
    tuning: Case
    judging: Case
    says: tuple[str, ...] = ()
    within: int = 0
    act: str = "script"
    alone: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)

    def case(self, split: str) -> Case:
        """Of that half."""
        return self.tuning if split == "tuning" else self.judging

    def seed(self, split: str) -> int:
        """Of its training; no two traces have the same."""
        return zlib.crc32(f"{self.name}/{split}".encode()) & 0x7FFFFFFF


_SLOW: Final = ("straggler",)
_JOINT: Final = ("joint_drift", "forest*")


def _slow(percent: int, within: int, *, tuning: int, judging: int) -> Kind:
    share = {"slow": percent / 100}
    return Kind(
        name=f"slow_{percent}",
        fault=True,
        scope="rank",
        about=f"the forward pass of one rank takes {percent} % longer",
        tuning=Case(script=share, amount=percent / 100, rank=tuning),
        judging=Case(script=share, amount=percent / 100, rank=judging),
        says=_SLOW,
        within=within,
    )


FAULTS: Final = (
    Kind(
        name="kill",
        fault=True,
        scope="rank",
        about="SIGKILL of one worker; the job goes on from its last snapshot",
        tuning=Case(rank=2, ends=BEGINS),
        judging=Case(rank=1, ends=47.0, begins=47.0),
        says=("killed", "worker_*", "dead_rank"),
        within=3,
        act="signal",
    ),
    Kind(
        name="stop",
        fault=True,
        scope="rank",
        about="SIGSTOP of one worker, for good: its process is there and does nothing, and all others wait for it",
        tuning=Case(rank=1),
        judging=Case(rank=3, begins=53.0),
        says=("dead_rank", "stalled"),
        within=5,
        act="signal",
    ),
    _slow(5, 18, tuning=1, judging=2),
    _slow(10, 6, tuning=3, judging=0),
    _slow(20, 6, tuning=0, judging=1),
    _slow(50, 6, tuning=2, judging=3),
    Kind(
        name="slow_data",
        fault=True,
        scope="rank",
        about="one rank waits several times as long for its batches",
        tuning=Case(script={"slow_data": 4.0}, amount=4.0, rank=1),
        judging=Case(script={"slow_data": 2.5}, amount=2.5, rank=2, begins=48.0),
        says=("peer_outlier", "straggler", "slow_data*"),
        within=10,
    ),
    Kind(
        name="loss_spike",
        fault=True,
        scope="job",
        about="the loss of six steps in a row is multiplied by ten; then all is as before",
        tuning=Case(script={"loss_spike": 10.0}, amount=10.0, ends=BEGINS + 1),
        judging=Case(script={"loss_spike": 12.0}, amount=12.0, begins=54.0, ends=55.0),
        says=("loss_spike", *_JOINT),
        within=3,
    ),
    Kind(
        name="nonfinite",
        fault=True,
        scope="job",
        about="one value of one batch of one rank is NaN, and from the next step on all weights are",
        tuning=Case(script={"nonfinite": 1.0}, amount=1.0, rank=2),
        judging=Case(script={"nonfinite": 3.0}, amount=3.0, rank=0, begins=46.0),
        says=("nonfinite", "loss_not_finite"),
        within=1,
    ),
    Kind(
        name="divergence",
        fault=True,
        scope="job",
        about="the optimizer's weight decay has the wrong sign, more and more: weights and loss grow slowly",
        tuning=Case(script={"divergence": 1.3}, amount=1.3),
        judging=Case(script={"divergence": 1.0}, amount=1.0, begins=45.0),
        says=("diverged", *_JOINT),
        within=30,
    ),
    Kind(
        name="leak",
        fault=True,
        scope="rank",
        about="one rank takes MiB after MiB of memory each second and gives none back",
        tuning=Case(script={"leak": 4.0}, amount=4.0, rank=0),
        judging=Case(script={"leak": 2.5}, amount=2.5, rank=3, begins=45.0),
        says=("peer_outlier", "memory_grows*", *_JOINT),
        within=30,
    ),
    Kind(
        name="disk_fill",
        fault=True,
        scope="node",
        about="a volume of 200 GiB (ext4 on a sparse file) fills up, so many GiB a second",
        tuning=Case(amount=3.6, node="node-0", begins=30.0),
        judging=Case(amount=2.4, node="node-1", begins=28.0),
        says=("disk_*",),
        within=60,
        act="disk",
    ),
    Kind(
        name="inodes_fill",
        fault=True,
        scope="node",
        about="a volume of 25,600 inodes is filled with empty files, so many a second",
        tuning=Case(amount=450.0, node="node-1", begins=30.0),
        judging=Case(amount=400.0, node="node-0", begins=28.0),
        says=("disk_*",),
        within=60,
        act="disk",
    ),
    Kind(
        name="xid",
        fault=True,
        scope="node",
        about="a line of NVIDIA's driver about a GPU is written to /dev/kmsg, and read back from there; `amount` is the number of the Xid",
        tuning=Case(amount=79, node="node-1", ends=BEGINS),
        judging=Case(amount=48, node="node-0", begins=52.0, ends=52.0),
        says=("xid_79", "xid_48"),
        within=1,
        act="kernel",
    ),
    Kind(
        name="error_storm",
        fault=True,
        scope="rank",
        about="one rank prints more than a hundred error lines a second, many of them hostile; `amount` is the share of steps with eight",
        tuning=Case(script={"storm": 0.9}, amount=0.9, rank=3, ends=62.0),
        judging=Case(script={"storm": 0.7}, amount=0.7, rank=1, begins=48.0, ends=60.0),
        says=("error_storm*", "log_*", "peer_outlier", *_JOINT),
        within=10,
    ),
    Kind(
        name="telemetry_gap",
        fault=True,
        scope="rank",
        about="one rank trains on, and nothing that it says of its steps comes through",
        tuning=Case(script={"gap": 1.0}, amount=1.0, rank=3),
        judging=Case(script={"gap": 1.0}, amount=1.0, rank=2, begins=55.0, ends=85.0),
        says=("telemetry_*", "silent_*"),
        within=10,
    ),
    Kind(
        name="drift_rank",
        fault=True,
        scope="rank",
        about="work, reading, the rest and the loss of one rank rise together, each by less than 2.5 robust deviations of its own windows",
        tuning=Case(script={"drift_forward": 0.012, "drift_data": 0.11, "drift_other": 0.00004, "drift_loss": 0.25}, rank=1),
        judging=Case(script={"drift_forward": 0.011, "drift_data": 0.16, "drift_other": 0.0002, "drift_loss": 0.3}, rank=2, begins=47.0),
        says=_JOINT,
        within=30,
    ),
    Kind(
        name="drift_job",
        fault=True,
        scope="job",
        about="the same of all ranks at once",
        tuning=Case(script={"drift_forward": 0.011, "drift_data": 0.1, "drift_other": 0.00003, "drift_loss": 0.25}),
        judging=Case(script={"drift_forward": 0.016, "drift_data": 0.14, "drift_other": 0.00025, "drift_loss": 0.25}, begins=47.0),
        says=_JOINT,
        within=30,
    ),
)
_EVERY: Final = "checkpoint_every_s"
BENIGN: Final = (
    Kind(name="healthy", fault=False, scope="job", about="nothing", tuning=Case(), judging=Case(), act="none"),
    Kind(name="healthy_too", fault=False, scope="job", about="nothing, with other seeds", tuning=Case(), judging=Case(), act="none"),
    Kind(
        name="checkpoint",
        fault=False,
        scope="job",
        about="elasticd writes a checkpoint every so many seconds, from the start on",
        tuning=Case(amount=12.0, begins=0.0),
        judging=Case(amount=9.0, begins=0.0),
        act="none",
    ),
    Kind(
        name="own_checkpoint",
        fault=False,
        scope="rank",
        about="rank 0 saves for a second, every so many steps, with all others waiting; only lines say so",
        tuning=Case(script={"own_checkpoint": 180}, amount=180, rank=0, begins=20.0),
        judging=Case(script={"own_checkpoint": 140}, amount=140, rank=0, begins=25.0),
    ),
    Kind(
        name="evaluation",
        fault=False,
        scope="job",
        about="three seconds without steps, every so many steps; a line says so",
        tuning=Case(script={"evaluation": 240}, amount=240, begins=10.0),
        judging=Case(script={"evaluation": 200}, amount=200, begins=15.0),
    ),
    Kind(
        name="evaluation_unsaid",
        fault=False,
        scope="job",
        about="the same, and no line says so that a machine could know",
        tuning=Case(script={"evaluation_unsaid": 240}, amount=240, begins=10.0),
        judging=Case(script={"evaluation_unsaid": 200}, amount=200, begins=15.0),
    ),
    Kind(
        name="warm_up",
        fault=False,
        scope="job",
        about="from the first step on work takes longer, on each rank by another amount, less and less over some seconds",
        tuning=Case(script={"warm_up": 1.5}, amount=1.5, begins=0.0, ends=20.0),
        judging=Case(script={"warm_up": 2.0}, amount=2.0, begins=0.0, ends=20.0),
    ),
    Kind(
        name="rescale",
        fault=False,
        scope="job",
        about="a node leaves in order, and later another one joins",
        tuning=Case(begins=35.0, ends=70.0),
        judging=Case(begins=40.0, ends=65.0),
        act="nodes",
    ),
    Kind(
        name="resume",
        fault=False,
        scope="job",
        about="the job is stopped in order, and some seconds later begun again where it was",
        tuning=Case(begins=50.0, ends=55.0),
        judging=Case(begins=44.0, ends=52.0),
        act="again",
    ),
    Kind(
        name="neighbour",
        fault=False,
        scope="node",
        about="other programs, as many as `amount`, take all of the processors' time that they can get, for some seconds",
        tuning=Case(amount=2, begins=50.0, ends=70.0),
        judging=Case(amount=3, begins=45.0, ends=60.0),
        act="neighbour",
        alone=True,
    ),
    Kind(
        name="log_level",
        fault=False,
        scope="job",
        about="from some moment on ten times as many lines come as before, the new ones of level debug",
        tuning=Case(script={"loglevel": 1.0}, ends=None),
        judging=Case(script={"loglevel": 1.0}, begins=42.0, ends=75.0),
    ),
    Kind(
        name="framework",
        fault=False,
        scope="job",
        about="from some moment on progress is told in other words: dictionaries, and bars that write over themselves",
        tuning=Case(script={"framework": 1.0}),
        judging=Case(script={"framework": 1.0}, begins=40.0),
    ),
)
KINDS: Final[Mapping[str, Kind]] = {kind.name: kind for kind in (*FAULTS, *BENIGN)}


def settings_of(kind: Kind, case: Case) -> dict[str, str]:
    """Of training: `elasticctl run --trainer NAME=VALUE`."""
    every = {_EVERY: f"{case.amount:g}"} if kind.name == "checkpoint" else {}
    return {"telemetry_every_s": "0.35", **every, **kind.settings}


def trace_names(split: str | None = None) -> list[str]:
    """All of them, as `--only` takes them: "tuning/kill"."""
    return [f"{one}/{name}" for name in KINDS for one in SPLITS if split in (None, one)]


def parse_name(name: str) -> tuple[str, Kind]:
    """The half and the kind that such a name means.

    Raises:
        ValueError: there is none.
    """
    split, _, kind = name.partition("/")
    if split not in SPLITS or kind not in KINDS:
        raise ValueError(f"there is no trace {name!r}; --list names them all")
    return split, KINDS[kind]


def label(name: str, **seen: Any) -> dict[str, Any]:
    """A trace's label: what was done, and what should be said of it.

    Args:
        name: "tuning/kill".
        seen: what only the recording knows: "began", "ended", "started", "until", "node", "note", …
    """
    split, kind = parse_name(name)
    case = kind.case(split)
    return {
        "name": name,
        "kind": kind.name,
        "split": split,
        "fault": kind.fault,
        "scope": kind.scope,
        "about": kind.about,
        "amount": case.amount,
        "script": dict(case.script),
        "rank": case.rank,
        "node": case.node,
        "seed": kind.seed(split),
        "says": list(kind.says),
        "within": kind.within,
        **seen,
    }
