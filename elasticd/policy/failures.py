"""What went wrong: the class of a failure, where it began, and one line that says so.

Owns: the table of what workers say, what their exit codes mean, and which of many ends was the first. Must not: decide what is done about it.

All of a DDP job's ranks wait for each other, so that one failure ends many workers, and what the others say of it is an echo. The root is the earliest end
that is no echo; if a node was lost, or its hardware is known to be at fault, that is the root. An OOM soon after a fault of hardware on the same node is that
fault's echo too.

Texts are those of Python, PyTorch, NCCL, gloo, CUDA and the kernel; detectors know far more of them, line by line. This table is for what a worker says of
its own end, and works without a detector.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from elasticd.policy.evidence import Certainty, Fault, Incident
from elasticd.policy.reading import harmless

if TYPE_CHECKING:
    from elasticd.policy.budgets import Ledger
    from elasticd.policy.settings import Settings

EXIT_ASKED: Final = 143
"""128 + SIGTERM: a worker that stopped since it was asked to."""
EXIT_USAGE: Final = 2
"""What argparse, and most programs, end with for arguments that they do not know."""


class FailureClass(StrEnum):
    """Whose a failure is, and with it what helps."""

    CODE = "code"
    """Import, syntax, shape, argument: the same again each time."""
    STARTUP = "startup"
    """The script raised before the job's first step."""
    USER = "user"
    """The script raised later, for whatever reason."""
    MEMORY = "memory"
    NUMERICS = "numerics"
    UNKNOWN = "unknown"
    INFRASTRUCTURE = "infrastructure"
    """Network, storage, a port: things that come back."""
    HARDWARE = "hardware"
    PREEMPTION = "preemption"
    """Somebody asked for the end; not a failure of the job's."""
    MEMBERSHIP = "membership"
    """A node is gone; not a failure of the job's either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnd:
    """How one worker ended, before anybody stopped it.

    Attributes:
        code: exit code as subprocess gives it, -9 for SIGKILL.
        exception: first line of its error, "ValueError: no such layer"; "" if it said nothing.
        message: all it said.
        at: seconds since the epoch by its own clock, None if unknown. Nodes' clocks may differ by as much as they do.
        order: of the reports as they came in; decides where times do not.
    """

    node: str
    rank: int
    code: int
    exception: str = ""
    message: str = ""
    at: float | None = None
    order: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """See the module.

    Attributes:
        cls: of the root.
        kind: what it is, a name that stays: "import_error", "segfault".
        node, rank: where it began; "" and None where that is not known.
        summary: one line for people: rank, node, error.
        sure: False if only echoes were seen.
        echoes: ends of other workers that followed from it.
        nodes: for a loss, all that are gone.
    """

    cls: FailureClass
    kind: str
    at: float
    node: str = ""
    rank: int | None = None
    summary: str
    sure: bool = True
    echoes: int = 0
    nodes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """What it is and where."""
        return f"{self.kind}@{self.node}" if self.node else self.kind


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """A worker that raised one of `types`, or said one of `cues` (lower case), failed of `kind`."""

    kind: str
    cls: FailureClass
    types: frozenset[str] = frozenset()
    cues: tuple[str, ...] = ()
    echo: bool = False


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_C: Final = FailureClass
# What is narrower stands first: an echo is worded like an error of one's own, and "RuntimeError" says nothing.
RULES: Final = (
    _Rule(
        kind="gpu_fault",
        cls=_C.HARDWARE,
        cues=("uncorrectable ecc", "cudaerroreccuncorrectable", "uncorrectable nvlink", "gpu is lost", "fallen off the bus", "driver/library version mismatch"),
    ),
    _Rule(kind="duplicate_gpu", cls=_C.CODE, cues=("duplicate gpu detected",)),
    _Rule(
        kind="peer_lost",
        cls=_C.UNKNOWN,
        echo=True,
        cues=(
            "connection reset by peer",
            "connection closed by peer",
            "connection closed by remote peer",
            "socket closed",
            "broken pipe",
            "ncclremoteerror",
            "remote process exited or there was a network error",
            "failed to recv, got 0 bytes",
            "nccl communicator was aborted",
        ),
    ),
    _Rule(
        kind="collective_timeout",
        cls=_C.UNKNOWN,
        echo=True,
        cues=("watchdog caught collective operation timeout", "application timeout caused pair closure", "timed out waiting"),
    ),
    _Rule(
        kind="out_of_memory",
        cls=_C.MEMORY,
        types=_names("OutOfMemoryError MemoryError _ArrayMemoryError"),
        cues=("cuda out of memory", "hip out of memory", "cuda error: out of memory", "can't allocate memory", "std::bad_alloc", "cublas_status_alloc_failed"),
    ),
    _Rule(kind="disk_full", cls=_C.USER, types=_names("NoSpaceError"), cues=("no space left on device", "disk quota exceeded")),
    _Rule(
        kind="not_finite",
        cls=_C.NUMERICS,
        types=_names("FloatingPointError"),
        cues=("loss is nan", "loss is inf", "nan loss", "loss is not finite", "non-finite", "nan or inf", "returned nan values"),
    ),
    _Rule(kind="checkpoint_damaged", cls=_C.INFRASTRUCTURE, types=_names("DamagedError")),
    _Rule(kind="state_unavailable", cls=_C.INFRASTRUCTURE, types=_names("StateUnavailable")),
    _Rule(
        kind="import_error",
        cls=_C.CODE,
        types=_names("ImportError ModuleNotFoundError SyntaxError IndentationError TabError"),
        cues=("error while loading shared libraries",),
    ),
    _Rule(
        kind="shape_mismatch",
        cls=_C.CODE,
        types=_names("StateError"),
        cues=(
            "size mismatch",
            "shape mismatch",
            "shapes cannot be multiplied",
            "must match the size of tensor",
            "missing key(s) in state_dict",
            "unexpected key(s) in state_dict",
            "expected all tensors to be on the same device",
        ),
    ),
    _Rule(
        kind="bad_arguments",
        cls=_C.CODE,
        types=_names("ArgumentError ArgumentTypeError SetupError"),
        cues=("unrecognized arguments", "the following arguments are required", "unexpected keyword argument", "missing 1 required"),
    ),
    _Rule(
        kind="cuda_crash",
        cls=_C.UNKNOWN,
        cues=("illegal memory access", "device-side assert", "unspecified launch failure", "cuda error: unknown error", "illegal instruction was encountered"),
    ),
    _Rule(kind="storage_error", cls=_C.INFRASTRUCTURE, cues=("input/output error", "stale file handle", "transport endpoint is not connected")),
    _Rule(
        kind="network_error",
        cls=_C.INFRASTRUCTURE,
        types=_names(
            "ConnectionError ConnectionRefusedError ConnectionResetError ConnectionAbortedError TimeoutError DistNetworkError DistStoreError"
            " DistBackendError gaierror"
        ),
        cues=(
            "connection refused",
            "no route to host",
            "network is unreachable",
            "temporary failure in name resolution",
            "name or service not known",
            "connection timed out",
            "client socket has timed out",
            "ncclsystemerror",
            "ncclinternalerror",
            "unhandled system error",
            "third_party/gloo",
            "connectfullmesh failed",
        ),
    ),
    _Rule(kind="address_in_use", cls=_C.INFRASTRUCTURE, cues=("address already in use",)),
    _Rule(kind="device_busy", cls=_C.INFRASTRUCTURE, cues=("cuda-capable device(s) is/are busy", "device or resource busy")),
    # Once more, before the first step too: storage may not have been mounted yet.
    _Rule(kind="file_missing", cls=_C.USER, types=_names("FileNotFoundError PermissionError NotADirectoryError")),
    _Rule(kind="interrupted", cls=_C.PREEMPTION, types=_names("KeyboardInterrupt")),
)

_BY_SIGNAL: Final = {
    signal.SIGSEGV: "segfault",
    signal.SIGBUS: "bus_error",
    signal.SIGILL: "illegal_instruction",
    signal.SIGFPE: "arithmetic_fault",
    signal.SIGABRT: "aborted",
    signal.SIGKILL: "killed",
}
CRASHES: Final = frozenset({"segfault", "bus_error", "illegal_instruction", "arithmetic_fault", "aborted", "cuda_crash"})
"""Kinds that code or hardware may be behind: on one node again and again, and on no other, it is the node."""
_LATE: Final = frozenset({"aborted", "interrupted", "preempted"})
"""Kinds that are the root only if nothing else is: libraries abort for what they were told, and who is told to stop was told for a reason."""
_APART_FROM_LOSS: Final = frozenset({FailureClass.CODE, FailureClass.MEMORY, FailureClass.NUMERICS})
"""What a worker does not say for the loss of another node; anything else may be how it words the echo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Judged:
    end: WorkerEnd
    kind: str
    cls: FailureClass
    weight: int  # 0 may be the root, 1 if nothing else is, 2 is an echo

    @property
    def order(self) -> tuple[int, bool, float, int, int]:
        return self.weight, self.end.at is None, self.end.at or 0.0, self.end.order, self.end.rank


def classify(
    ends: Sequence[WorkerEnd],
    *,
    lost: Sequence[str] = (),
    incidents: Iterable[Incident] = (),
    ledger: Ledger,
    stepped: bool,
    settings: Settings,
    now: float,
) -> Failure:
    """What a generation failed of.

    Args:
        ends: of its workers, those that nobody stopped.
        lost: nodes of it that are gone.
        incidents: what detectors told, those that are over included.
        ledger: what happened before.
        stepped: whether the job has ever done a step.
        now: seconds since the epoch.
    """
    judged = sorted((_judge(end, stepped) for end in ends), key=lambda one: one.order)
    root = judged[0] if judged and judged[0].weight < 2 else None
    hardware = _hardware(root, lost, judged, incidents, ledger, settings, now)
    if hardware is not None:
        return _by_hardware(hardware, root, judged, now)
    if root is None or (lost and root.cls not in _APART_FROM_LOSS):
        return _without_root(judged, lost, now)
    cls, kind = root.cls, root.kind
    if kind in CRASHES and _repeats(root, ledger, settings):
        return Failure(
            cls=FailureClass.HARDWARE,
            kind=kind,
            at=now,
            node=root.end.node,
            rank=root.end.rank,
            summary=f"{_told(root)}; the {ledger.crashes(kind, root.end.node) + 1}. of that sort on {root.end.node}, and on no other node",
            echoes=len(judged) - 1,
        )
    return Failure(cls=cls, kind=kind, at=now, node=root.end.node, rank=root.end.rank, summary=_told(root), echoes=len(judged) - 1)


def _judge(end: WorkerEnd, stepped: bool) -> _Judged:
    """What one end is, taken by itself."""
    rule = _said(end)
    if rule is not None:
        weight = 2 if rule.echo else int(rule.kind in _LATE)
        return _Judged(end=end, kind=rule.kind, cls=rule.cls, weight=weight)
    if end.exception:
        cls = FailureClass.USER if stepped else FailureClass.STARTUP
        return _Judged(end=end, kind=_exception_kind(end), cls=cls, weight=0)
    number = _signal(end.code)
    if end.code == EXIT_ASKED or number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return _Judged(end=end, kind="preempted", cls=FailureClass.PREEMPTION, weight=1)
    if number is not None:
        kind = _BY_SIGNAL.get(signal.Signals(number), f"signal_{number}") if number in set(signal.Signals) else f"signal_{number}"
        return _Judged(end=end, kind=kind, cls=FailureClass.UNKNOWN, weight=int(kind in _LATE))
    if end.code == EXIT_USAGE and not stepped:
        return _Judged(end=end, kind="bad_arguments", cls=FailureClass.CODE, weight=0)
    return _Judged(end=end, kind=f"exit_{end.code}", cls=FailureClass.UNKNOWN, weight=0)


def _said(end: WorkerEnd) -> _Rule | None:
    name = _exception_name(end)
    # What torch writes is the traceback, whose first line is the error; what is in the middle of it is code.
    lines = end.message.strip().splitlines()
    text = " ".join([end.exception, *lines[:1], *lines[-1:]]).lower()
    by_cue = next((rule for rule in RULES if any(cue in text for cue in rule.cues)), None)
    by_type = next((rule for rule in RULES if name in rule.types), None)
    if by_cue is None or by_type is None:
        return by_cue or by_type
    return min(by_cue, by_type, key=RULES.index)


def _exception_name(end: WorkerEnd) -> str:
    return _error(end).partition(":")[0].strip().rpartition(".")[2]


def _error(end: WorkerEnd) -> str:
    """The line that names the exception: torch puts it first, a bare traceback last."""
    lines = end.message.strip().splitlines()
    return lines[-1] if end.exception.startswith("Traceback") and lines else end.exception


def _exception_kind(end: WorkerEnd) -> str:
    name = _exception_name(end)
    return name[:64] if name.isascii() and name.isidentifier() and not name.startswith("_") else "error"


def _signal(code: int) -> int | None:
    """The signal that ended it, also where a shell in between made 128 + n of it."""
    if code < 0:
        return -code
    return code - 128 if 128 < code < 128 + 65 else None


def _repeats(root: _Judged, ledger: Ledger, settings: Settings) -> bool:
    node = root.end.node
    return ledger.crashes(root.kind, node) + 1 >= settings.crash_repeats and ledger.crashes(root.kind) == ledger.crashes(root.kind, node)


# --- hardware as the root ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fault:
    node: str
    what: str
    kind: str
    ago: float


def _hardware(
    root: _Judged | None, lost: Sequence[str], judged: Sequence[_Judged], incidents: Iterable[Incident], ledger: Ledger, settings: Settings, now: float
) -> _Fault | None:
    """A fault of hardware that is known to have come before, on the node where the failure began, or on any if only echoes are seen."""
    blamed = {root.end.node} if root is not None and root.weight == 0 else {*(one.end.node for one in judged), *lost}
    if root is not None and root.cls in (FailureClass.CODE, FailureClass.STARTUP):
        return None  # what the script itself says, on every node, needs no hardware
    window = settings.hardware_memory_s if root is not None and root.cls is FailureClass.MEMORY else settings.hardware_root_s
    known = [
        _Fault(node=one.root.node, what=one.root.summary, kind=one.root.kind, ago=max(0.0, now - one.root.at))
        for one in incidents
        if one.root.fault is Fault.HARDWARE and one.root.node and (one.root.certainty is Certainty.CERTAIN or one.corroborated)
    ]
    known += [_Fault(node=node, what="a fault of hardware was seen there", kind="hardware", ago=max(0.0, now - at)) for node, at in ledger.hardware.items()]
    fitting = [fault for fault in known if fault.node in blamed and fault.ago <= window]
    return max(fitting, key=lambda fault: (fault.kind != "hardware", fault.ago), default=None)


def _by_hardware(fault: _Fault, root: _Judged | None, judged: Sequence[_Judged], now: float) -> Failure:
    here = root if root is not None and root.end.node == fault.node else next((one for one in judged if one.end.node == fault.node), None)
    then = f"; {_told(here)} followed" if here is not None else ""
    return Failure(
        cls=FailureClass.HARDWARE,
        kind=fault.kind,
        at=now,
        node=fault.node,
        rank=here.end.rank if here is not None else None,
        summary=f"{fault.node}: {fault.what} {fault.ago:.0f} s before{then}",
        echoes=max(0, len(judged) - 1),
    )


# --- words -----------------------------------------------------------------------------------------------------------------


def _without_root(judged: Sequence[_Judged], lost: Sequence[str], now: float) -> Failure:
    if lost:
        summary = f"lost {', '.join(lost[:3])}" + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        if judged:
            summary += f"; {len(judged)} worker{'s' * (len(judged) > 1)} of other nodes ended with it"
        return Failure(cls=FailureClass.MEMBERSHIP, kind="node_lost", at=now, node=lost[0], summary=summary, echoes=len(judged), nodes=tuple(lost))
    if not judged:
        return Failure(cls=FailureClass.UNKNOWN, kind="unexplained", at=now, summary="no worker said how it ended", sure=False)
    first = judged[0]
    return Failure(
        cls=first.cls,
        kind=first.kind,
        at=now,
        node="" if first.weight == 2 else first.end.node,
        rank=None if first.weight == 2 else first.end.rank,
        summary=f"only echoes of a failure were seen, the first: {_told(first)}",
        sure=False,
        echoes=len(judged) - 1,
    )


def _told(judged: _Judged) -> str:
    end = judged.end
    said = harmless(_error(end))[:200] or describe(end.code)
    return f"rank {end.rank} on {end.node}: {said}"


def describe(code: int) -> str:
    """An exit code in words: "exit code 1", "killed by SIGSEGV"."""
    number = _signal(code)
    if number is None or code == EXIT_ASKED:
        return f"exit code {code}"
    return f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else f"killed by signal {number}"
