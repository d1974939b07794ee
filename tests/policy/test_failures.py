"""What a failure is taken for, and which of many ends is the root."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd.policy.budgets import Ledger, PastFailure
from elasticd.policy.evidence import Certainty, Standing
from elasticd.policy.failures import Failure, FailureClass, WorkerEnd, classify, describe
from elasticd.policy.settings import Settings
from tests.policy.made import NOW, end, hardware, incident, sign

pytestmark = pytest.mark.timeout(30)


def found(*ends: WorkerEnd, **changes: object) -> Failure:
    arguments: dict[str, object] = {"ledger": Ledger(), "stepped": True, "settings": Settings(), "now": NOW, **changes}
    return classify(ends, **arguments)  # type: ignore[arg-type]  # as the case has it


@pytest.mark.parametrize(
    ("exception", "code", "stepped", "cls", "kind"),
    [
        ("ModuleNotFoundError: No module named 'timm'", 1, True, "code", "import_error"),
        ("SyntaxError: invalid syntax", 1, False, "code", "import_error"),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)", 1, True, "code", "shape_mismatch"),
        ("RuntimeError: Error(s) in loading state_dict for Net: size mismatch for a", 1, True, "code", "shape_mismatch"),
        ("trainer.errors.StateError: the optimizer differs", 1, True, "code", "shape_mismatch"),
        ("", 2, False, "code", "bad_arguments"),
        ("", 2, True, "unknown", "exit_2"),
        ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error", 1, False, "infrastructure", "network_error"),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, internal error", 1, False, "infrastructure", "network_error"),
        ("KeyError: 'lr'", 1, False, "startup", "KeyError"),
        ("KeyError: 'lr'", 1, True, "user", "KeyError"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data'", 1, False, "user", "file_missing"),
        ("OSError: [Errno 28] No space left on device", 1, True, "user", "disk_full"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 1, True, "memory", "out_of_memory"),
        ("MemoryError", 1, True, "memory", "out_of_memory"),
        ("ValueError: loss is NaN at step 4", 1, True, "numerics", "not_finite"),
        ("FloatingPointError: overflow", 1, True, "numerics", "not_finite"),
        ("ConnectionRefusedError: [Errno 111] Connection refused", 1, False, "infrastructure", "network_error"),
        ("OSError: [Errno 5] Input/output error", 1, True, "infrastructure", "storage_error"),
        ("RuntimeError: The server socket has failed to listen: Address already in use", 1, False, "infrastructure", "address_in_use"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", 1, True, "hardware", "gpu_fault"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", 1, True, "unknown", "cuda_crash"),
        ("", -11, True, "unknown", "segfault"),
        ("", 139, True, "unknown", "segfault"),
        ("", -9, True, "unknown", "killed"),
        ("", -15, True, "preemption", "preempted"),
        ("", 143, True, "preemption", "preempted"),
        ("", 1, False, "unknown", "exit_1"),
        ("KeyboardInterrupt", 1, True, "preemption", "interrupted"),
    ],
)
def test_one_end_is_told_by_its_error_or_its_exit_code(exception: str, code: int, stepped: bool, cls: str, kind: str) -> None:
    failure = found(end(3, exception, code), stepped=stepped)
    assert (failure.cls.value, failure.kind, failure.node, failure.rank) == (cls, kind, "n3", 3)
    assert failure.sure


def test_the_root_is_the_first_that_is_no_echo() -> None:
    """The echoes are earlier by their clocks, and louder."""
    failure = found(
        end(0, "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:2941", at=NOW - 30.0),
        end(1, "RuntimeError: Connection reset by peer", at=NOW - 29.0),
        end(2, "KeyError: 'label'", at=NOW - 28.0),
        end(3, "KeyError: 'label'", at=NOW - 20.0),
    )
    assert (failure.cls, failure.rank, failure.node, failure.echoes) == (FailureClass.USER, 2, "n2", 3)
    assert failure.summary == "rank 2 on n2: KeyError: 'label'"


def test_an_abort_is_the_root_only_if_nothing_else_is() -> None:
    """NCCL's watchdog aborts the others, minutes later or by a clock that is behind."""
    assert found(end(0, code=-6, at=NOW - 60.0), end(2, code=-11, at=NOW - 30.0)).kind == "segfault"
    assert found(end(0, code=-6)).kind == "aborted"


def test_where_only_echoes_are_seen_nobody_is_blamed() -> None:
    failure = found(end(0, "RuntimeError: Connection reset by peer"), end(1, "RuntimeError: Connection reset by peer"))
    assert not failure.sure
    assert (failure.node, failure.rank, failure.cls) == ("", None, FailureClass.UNKNOWN)
    assert "only echoes" in failure.summary


def test_no_end_at_all_is_a_failure_that_is_not_explained() -> None:
    assert (found().kind, found().sure) == ("unexplained", False)


def test_a_lost_node_is_the_root_of_what_the_others_say() -> None:
    failure = found(end(0, "RuntimeError: something that gloo says in its next version"), lost=["n5"])
    assert (failure.cls, failure.node, failure.nodes) == (FailureClass.MEMBERSHIP, "n5", ("n5",))


def test_an_import_error_is_no_echo_of_a_loss() -> None:
    assert found(end(0, "ImportError: no"), lost=["n5"], stepped=False).cls is FailureClass.CODE


@pytest.mark.parametrize(("ago", "cls"), [(1800.0, FailureClass.HARDWARE), (4000.0, FailureClass.MEMORY)])
def test_an_oom_soon_after_a_fault_of_hardware_on_its_node_is_that_faults(ago: float, cls: FailureClass) -> None:
    """The fault's incident is long over; the ledger remembers."""
    ledger = Ledger(hardware={"n3": NOW - ago})
    failure = found(end(3, "OutOfMemoryError: CUDA out of memory"), ledger=ledger)
    assert failure.cls is cls
    assert failure.node == "n3"


def test_an_oom_on_another_node_than_the_fault_is_memory() -> None:
    assert found(end(3, "OutOfMemoryError: CUDA out of memory"), ledger=Ledger(hardware={"n4": NOW - 60.0})).cls is FailureClass.MEMORY


def test_the_ledger_notices_faults_of_hardware_and_only_sure_ones() -> None:
    unsure = incident(replace(hardware("n4").root, certainty=Certainty.STRONG, kind="kernel_lockup"))
    ledger = Ledger().noticed([hardware("n3", standing=Standing.OVER), unsure, incident(sign())])
    assert dict(ledger.hardware) == {"n3": NOW - 5.0}


def test_a_fault_of_hardware_is_the_root_of_a_crash_there_and_says_what_followed() -> None:
    failure = found(end(3, code=-11), end(0, "RuntimeError: Connection reset by peer"), incidents=[hardware("n3")])
    assert (failure.cls, failure.node, failure.kind) == (FailureClass.HARDWARE, "n3", "xid_79")
    assert failure.summary == "n3: a GPU of n3 fell off the bus 5 s before; rank 3 on n3: killed by SIGSEGV followed"


def test_a_fault_of_hardware_excuses_no_import_error() -> None:
    assert found(end(3, "ImportError: no"), incidents=[hardware("n3")]).cls is FailureClass.CODE


def test_a_crash_again_on_one_node_and_on_no_other_is_the_nodes() -> None:
    there = PastFailure(at=NOW - 900.0, cls=FailureClass.UNKNOWN, kind="segfault", node="n3")
    elsewhere = replace(there, node="n1")
    assert found(end(3, code=-11), ledger=Ledger(failures=(there,))).cls is FailureClass.HARDWARE
    assert found(end(3, code=-11), ledger=Ledger(failures=(there, elsewhere))).cls is FailureClass.UNKNOWN
    assert found(end(3, code=-11), ledger=Ledger(failures=(elsewhere,))).cls is FailureClass.UNKNOWN


def test_code_in_the_middle_of_a_traceback_says_nothing() -> None:
    """The source lines of a traceback may hold any words."""
    message = 'Traceback (most recent call last):\n  File "a.py", line 3\n    retry("connection refused", "size mismatch")\nKeyError: \'lr\''
    failure = found(end(3, "Traceback (most recent call last):", message=message))
    assert (failure.cls, failure.kind, failure.summary) == (FailureClass.USER, "KeyError", "rank 3 on n3: KeyError: 'lr'")


def test_what_a_worker_says_is_put_on_one_line() -> None:
    assert "\x1b" not in found(end(3, "ValueError: \x1b[31mred\nmore")).summary
    assert "\n" not in found(end(3, "ValueError: \x1b[31mred\nmore")).summary


@pytest.mark.parametrize(
    ("code", "words"), [(1, "exit code 1"), (-9, "killed by SIGKILL"), (137, "killed by SIGKILL"), (143, "exit code 143"), (255, "exit code 255")]
)
def test_an_exit_code_in_words(code: int, words: str) -> None:
    assert describe(code) == words
