"""Checks before a node joins: real file systems, real sockets, real commands with children of their own. NVML alone is a stand-in (tests.support.nvml)."""

from __future__ import annotations

import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from structlog.testing import capture_logs

from elasticd.daemon import usercheck
from elasticd.daemon.config import HealthSection
from elasticd.daemon.health import Check, Checker, Health, _clock_doubt, clock, disk, gpus, own_check, reachable, reachable_soon, run_checks
from elasticd.daemon.jobs import JobSpec
from elasticd.daemon.slots import Slot
from elasticd.daemon.usercheck import OUTPUT_MAX
from elasticd.rendezvous.records import TEXT_MAX, NodeJob, NodeJobState
from tests.support.nvml import Gpu, StandInNvml

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(60)

ROOM = HealthSection(disk_free_min=0)
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it becomes another user, or mounts")


def script(text: str, **values: object) -> JobSpec:
    return JobSpec.model_validate({"name": "a", "argv": ["/bin/true"], "max_nodes": 1, "health_check": ["/bin/sh", "-c", text], **values})


def check(text: str, *, seconds: float = 30.0, **values: object) -> Check:
    return own_check(script(text, **values), (), seconds=seconds, cancelled=threading.Event())


class Lifeline:
    """A pipe in the file system that a script and its children hold open: it ends when the last of them has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path, 0o666)
        path.chmod(0o666)
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    @property
    def hold(self) -> str:
        """What a shell script says to hold it, and to say that it runs."""
        return f"exec 9>{self.path}; echo ready >&9;"

    def wait_until_held(self) -> None:
        assert select.select([self._fd], [], [], 20)[0], "the script did not begin"
        assert os.read(self._fd, 100) == b"ready\n"

    def ends(self) -> bool:
        """Whether all who held it end within 10 s."""
        deadline = time.monotonic() + 10
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        while time.monotonic() < deadline:
            poller.poll(100)
            try:
                if os.read(self._fd, 100) == b"":
                    return True
            except BlockingIOError:
                continue
        return False

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def lifeline(tmp_path: Path) -> Iterator[Lifeline]:
    held = Lifeline(tmp_path / "lifeline")
    yield held
    held.close()


# --- the job's own check -----------------------------------------------------------------------------------------------


def test_a_check_that_returns_0_is_passed_whatever_it_prints() -> None:
    assert check("echo fine; echo fine >&2") == Check("health_check", ok=True)


def test_a_check_that_fails_tells_its_code_and_what_it_printed_last() -> None:
    assert check("echo one; echo two >&2; exit 3") == Check("health_check", ok=False, detail="exit code 3: one | two")
    assert check("kill -9 $$") == Check("health_check", ok=False, detail="killed by SIGKILL (9)")


def test_what_it_prints_cannot_steer_a_terminal_or_break_a_record() -> None:
    found = check(r"printf 'a\033[31mred\007\n\n  b\tc \377\342\200\256\n'; exit 1")
    assert found.detail == "exit code 1: a?[31mred? | b?c \N{REPLACEMENT CHARACTER}?"


def test_a_command_that_is_not_there_is_named() -> None:
    missing = "no such program, or the interpreter in its first line is missing"
    for argv, cwd, said in (
        (["/opt/none.sh"], "/", f"exit code 127: elasticd: cannot run '/opt/none.sh': {missing}"),
        (["/etc/passwd"], "/", "exit code 126: elasticd: cannot run '/etc/passwd': Permission denied"),
        (["/bin/true"], "/nowhere", "exit code 126: elasticd: cannot enter working directory '/nowhere': No such file or directory"),
    ):
        found = own_check(script("", health_check=argv, cwd=cwd), (), seconds=30, cancelled=threading.Event())
        assert found == Check("health_check", ok=False, detail=said)


def test_it_finds_the_slots_gpus_and_nothing_of_the_daemons_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials/elasticd.service")
    spec = script("env | sort; pwd; exit 1", cwd=str(tmp_path))
    slots = [Slot(id="GPU-a", gpu_uuid="GPU-a"), Slot(id="GPU-b", gpu_uuid="GPU-b")]
    found = own_check(spec, slots, seconds=30, cancelled=threading.Event())
    me = pwd.getpwuid(os.geteuid())
    assert found.detail.removeprefix("exit code 1: ").split(" | ") == [
        "CUDA_VISIBLE_DEVICES=GPU-a,GPU-b",
        "ELASTICD_JOB=a",
        f"HOME={me.pw_dir}",
        "LANG=C.UTF-8",
        f"LOGNAME={me.pw_name}",
        f"PATH={usercheck.PATH}",
        f"PWD={tmp_path}",
        f"SHELL={me.pw_shell}",
        f"USER={me.pw_name}",
        str(tmp_path),
    ]
    assert "CUDA_VISIBLE_DEVICES" not in check("env; exit 1").detail


def test_a_check_that_hangs_is_killed_in_time_with_its_grandchildren(lifeline: Lifeline) -> None:
    """They ignore SIGTERM, and the shell in between waits for them."""
    began = time.monotonic()
    found = check(lifeline.hold + "trap '' TERM; echo begun; (sh -c 'sleep 1000; :' & wait); :", seconds=0.5)
    assert found == Check("health_check", ok=False, detail="not done after 0.5 s: begun")
    assert 0.5 <= time.monotonic() - began < 20
    assert lifeline.ends()


def test_children_that_a_check_leaves_behind_end_with_it_and_are_not_waited_for(lifeline: Lifeline) -> None:
    began = time.monotonic()
    assert check(lifeline.hold + "sleep 1000 & exit 0") == Check("health_check", ok=True)
    assert time.monotonic() - began < 20
    assert lifeline.ends()


def test_who_left_the_group_and_holds_the_output_is_not_waited_for(tmp_path: Path, lifeline: Lifeline) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    began = time.monotonic()
    assert check(f"{lifeline.hold} setsid sh -c 'read x < {gate}' & echo gone; exit 4").detail == "exit code 4: gone"
    assert time.monotonic() - began < 20
    gate_fd = os.open(gate, os.O_RDWR)  # it goes, too
    try:
        os.write(gate_fd, b"\n")
        assert lifeline.ends()
    finally:
        os.close(gate_fd)


def test_a_hundred_megabytes_of_output_do_not_stop_it_and_are_not_kept() -> None:
    found = check("head -c 100000000 /dev/zero | tr '\\0' x; echo; echo the end; exit 1")
    assert found.detail.startswith("exit code 1: xxx")
    assert found.detail.endswith("xxx | the end")
    assert len(found.detail) == OUTPUT_MAX


def test_output_without_end_ends_by_the_clock() -> None:
    found = check("exec yes", seconds=0.5)
    assert found.detail.startswith("not done after 0.5 s: ")
    assert found.detail.endswith("y | y | y")


def test_a_check_that_closes_its_output_and_goes_on_is_waited_for(lifeline: Lifeline) -> None:
    began = time.thread_time()
    assert check(f"exec >&- 2>&-; {lifeline.hold} sleep 1; exit 5").detail == "exit code 5"
    assert time.thread_time() - began < 0.25, "it turned around a pipe that had ended"
    assert lifeline.ends()


def test_a_check_is_ended_when_the_daemon_stops(lifeline: Lifeline) -> None:
    cancelled = threading.Event()
    found: list[Check] = []
    spec = script(lifeline.hold + "echo begun; sleep 1000")
    thread = threading.Thread(target=lambda: found.append(own_check(spec, (), seconds=600, cancelled=cancelled)))
    thread.start()
    lifeline.wait_until_held()
    cancelled.set()
    thread.join(20)
    assert [item.detail for item in found] == ["cancelled: begun"]
    assert lifeline.ends()


DAEMON = """
import sys, threading
from elasticd.daemon.health import own_check
from elasticd.daemon.jobs import JobSpec
spec = JobSpec(name="a", argv=("/bin/true",), max_nodes=1, health_check=("/bin/sh", "-c", sys.argv[1]))
own_check(spec, (), seconds=600, cancelled=threading.Event())
"""


def test_a_check_does_not_outlive_a_daemon_that_is_killed(lifeline: Lifeline) -> None:
    with subprocess.Popen([sys.executable, "-c", DAEMON, lifeline.hold + "exec sleep 1000"], cwd=Path(__file__).parents[2]) as daemon:
        lifeline.wait_until_held()
        daemon.kill()
    assert lifeline.ends()


def test_signals_that_a_thread_of_the_daemon_blocks_are_not_blocked_in_a_check() -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        assert check("kill $$; exit 1").detail == "killed by SIGTERM (15)"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def test_nothing_is_left_of_many_checks() -> None:
    process = psutil.Process()
    before = process.num_fds(), process.children()
    for _ in range(5):
        check("echo x; exit 1")
    assert (process.num_fds(), process.children()) == before


@root_only
def test_a_check_is_run_as_the_jobs_user_with_that_users_groups_and_no_rights() -> None:
    found = check("id -un; id -G; grep -E '^Cap(Inh|Prm|Eff|Amb)' /proc/self/status; echo $HOME; exit 1", user="nobody")
    nobody = pwd.getpwnam("nobody")
    groups = " ".join(map(str, sorted(os.getgrouplist("nobody", nobody.pw_gid))))
    none = [f"Cap{kind}:?{0:016x}" for kind in ("Inh", "Prm", "Eff", "Amb")]
    said = found.detail.removeprefix("exit code 1: ").split(" | ")
    assert [said[0], " ".join(sorted(said[1].split()))] == ["nobody", groups]
    assert said[2:] == [*none, nobody.pw_dir]


@root_only
def test_a_check_may_lie_where_only_its_user_may_go_and_gains_nothing_by_programs_with_rights() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own is closed to others
        Path(name).chmod(0o755)
        home = Path(name) / "home"
        home.mkdir(mode=0o700)
        shutil.chown(home, "nobody")
        assert check("pwd; grep NoNewPrivs /proc/self/status; exit 1", user="nobody", cwd=str(home)).detail == f"exit code 1: {home} | NoNewPrivs:?1"


@root_only
def test_a_hanging_check_of_another_user_is_killed() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own is closed to others
        Path(name).chmod(0o755)
        lifeline = Lifeline(Path(name) / "lifeline")
        try:
            assert check(lifeline.hold + "sleep 1000", user="nobody", seconds=0.5).detail == "not done after 0.5 s"
            assert lifeline.ends()
        finally:
            lifeline.close()


CAPABLE = """
import threading
from elasticd.daemon.health import own_check
from elasticd.daemon.jobs import JobSpec
def run(text, seconds, user="nobody"):
    spec = JobSpec(name="a", argv=("/bin/true",), max_nodes=1, user=user, health_check=("/bin/sh", "-c", text))
    print(own_check(spec, (), seconds=seconds, cancelled=threading.Event()).detail)
who = "id -un; grep -E '^Cap(Prm|Eff|Amb)' /proc/self/status; exit 1"
run(who, 30)
run(who, 30, user=None)
run("echo $$; exec sleep 1000", 0.5)
"""


@root_only
def test_a_daemon_that_is_not_root_but_may_change_its_user_gives_none_of_that_away_and_can_end_the_check() -> None:
    """As a unit with User= and AmbientCapabilities= is: ambient rights would outlive setuid and exec."""
    caps = "+setuid,+setgid,+kill,+syslog,+dac_read_search"  # the last to read what root's Python is made of
    command = ["setpriv", "--reuid=daemon", "--regid=daemon", "--clear-groups", f"--inh-caps={caps}", f"--ambient-caps={caps}"]
    tried = subprocess.run([*command, sys.executable, "-c", CAPABLE], capture_output=True, text=True, timeout=50, cwd=Path(__file__).parents[2])
    assert tried.returncode == 0, tried.stderr
    other, itself, hanging = tried.stdout.splitlines()
    none = " | ".join(f"Cap{kind}:?{0:016x}" for kind in ("Prm", "Eff", "Amb"))
    assert other == f"exit code 1: nobody | {none}"
    assert itself == f"exit code 1: daemon | {none}", "nor does a check that is run as the daemon is"
    assert hanging.startswith("not done after 0.5 s: ")
    assert not Path("/proc", hanging.rpartition(" ")[2]).exists()


@root_only
def test_without_the_right_to_become_its_user_a_check_fails() -> None:
    """It is not run as who we are: its user may be able to write the program, and would be us."""
    assert check("true", user="daemon").ok  # first as root: Python may have to load something, from where others may not go
    os.seteuid(65534)
    try:
        found = check("true", user="daemon")
    finally:
        os.seteuid(0)
    said = "it cannot be run as daemon: this daemon may not become another user; give it CAP_SETUID, CAP_SETGID, CAP_KILL"
    assert found == Check("health_check", ok=False, detail=said)


def test_an_unknown_user_fails_the_check() -> None:
    assert check("true", user="no-such-user").detail == "job file asks for user no-such-user, whom this machine does not know"


# --- disk, clock, peers, GPUs ------------------------------------------------------------------------------------------


def test_a_disk_with_room_passes_and_keeps_nothing_of_the_probe(tmp_path: Path) -> None:
    assert disk(tmp_path / "log" / "elasticd", 1) == Check("disk", ok=True)
    assert list((tmp_path / "log" / "elasticd").iterdir()) == []


def test_a_disk_without_enough_room_fails(tmp_path: Path) -> None:
    found = disk(tmp_path, 1 << 60)
    assert not found.ok
    assert found.detail.startswith(f"{tmp_path} has ")
    assert found.detail.endswith(" free, and 1048576.0 TiB are wanted")


def test_a_log_directory_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert disk(tmp_path / "file" / "log", 0) == Check("disk", ok=False, detail=f"{tmp_path}/file/log cannot be written: Not a directory")


MOUNTED = """
import sys
from pathlib import Path
from elasticd.daemon.health import disk
print(disk(Path(sys.argv[1]), 0).detail)
"""


@root_only
@pytest.mark.parametrize(
    ("options", "said"),
    [("nr_inodes=100", "can take 99 more files, and 1000 are wanted"), ("ro", "cannot be written: Read-only file system"), ("size=1m,nr_inodes=2000", "")],
)
def test_a_file_system_that_takes_no_more_files_fails(tmp_path: Path, options: str, said: str) -> None:
    """Mounted where only that one process sees it."""
    inner = f'mount -t tmpfs -o {options} none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    done = subprocess.run(["unshare", "-m", "sh", "-c", inner, MOUNTED], capture_output=True, text=True, timeout=50, cwd=Path(__file__).parents[2])
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    assert done.stderr == ""
    assert done.stdout.strip() == (f"{tmp_path} {said}" if said else "")


@pytest.mark.parametrize(
    ("state", "status", "off", "doubt"),
    [
        (0, 0, 0.2, ""),
        (0, 0x2001, 5.0, ""),
        (5, 0x40, 16.0, "the kernel says that nobody synchronizes the clock; run chrony or systemd-timesyncd"),
        (0, 0x40, 0.0, "the kernel says that nobody synchronizes the clock; run chrony or systemd-timesyncd"),
        (0, 0, 7.26, "the clock may be off by 7.3 s, and 5 s are thought too much"),
    ],
)
def test_a_clock_that_is_in_doubt_is_worth_a_word(state: int, status: int, off: float, doubt: str) -> None:
    assert _clock_doubt(state, status, off, 5.0) == doubt


def test_the_clock_of_this_machine_keeps_nobody_out() -> None:
    found = clock(5.0)
    assert (found.name, found.ok) == ("clock", True)
    assert found.detail in ("", "the kernel says that nobody synchronizes the clock; run chrony or systemd-timesyncd") or "may be off" in found.detail


@pytest.fixture
def listening() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield "127.0.0.1", server.getsockname()[1]


@pytest.fixture
def refusing() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return "127.0.0.1", server.getsockname()[1]


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """A port whose queue is full: the kernel drops what comes, as the network does when a cable is cut."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield "127.0.0.1", server.getsockname()[1]


def test_one_peer_that_answers_is_enough(listening: tuple[str, int], refusing: tuple[str, int], silent: tuple[str, int]) -> None:
    assert reachable([refusing, silent, ("no-such-host.invalid", 1), listening], seconds=10) == Check("peers", ok=True)


def test_without_peers_there_is_nothing_to_find_out() -> None:
    assert reachable([]) == Check("peers", ok=True)


def test_if_no_peer_answers_each_says_why(refusing: tuple[str, int], silent: tuple[str, int]) -> None:
    began = time.monotonic()
    found = reachable([refusing, silent], seconds=0.3)
    assert 0.3 <= time.monotonic() - began < 20
    assert found == Check(
        "peers",
        ok=False,
        detail=f"none of 2 other nodes can be reached: 127.0.0.1:{refusing[1]} (Connection refused), 127.0.0.1:{silent[1]} (no answer within 0.3 s)",
    )


def test_of_many_peers_three_are_named(refusing: tuple[str, int]) -> None:
    found = reachable([(f"127.0.0.{number}", refusing[1]) for number in range(1, 6)])
    assert found.detail.startswith("none of 5 other nodes can be reached: 127.0.0.1:")
    assert found.detail.count("(") == 3
    assert found.detail.endswith(", …")


def test_unreachable_peers_are_asked_for_again_for_a_while_since_they_may_be_gone(refusing: tuple[str, int], listening: tuple[str, int]) -> None:
    """After a power cut of all nodes the first one back sees the others' leases, and nobody behind them."""
    gone = iter([[refusing], [refusing], []])
    assert reachable_soon(lambda: next(gone), 30.0, threading.Event()) == Check("peers", ok=True)
    back = iter([[refusing], [listening]])
    assert reachable_soon(lambda: next(back), 30.0, threading.Event()) == Check("peers", ok=True)
    asked: list[float] = []

    def cut() -> list[tuple[str, int]]:
        asked.append(time.monotonic())
        return [refusing]

    assert not reachable_soon(cut, 1.5, threading.Event()).ok
    assert asked[-1] - asked[0] >= 1.5
    cancelled = threading.Event()
    cancelled.set()
    assert not reachable_soon(lambda: [refusing], 1e9, cancelled).ok


def test_a_connection_that_cannot_set_out_is_no_connection() -> None:
    """A link-local address without its link: the fault comes from connect itself, and SO_ERROR knows nothing of it."""
    found = reachable([("fe80::1", 9)])
    assert not found.ok
    assert found.detail.startswith("none of 1 other nodes can be reached: fe80::1:9 (")


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> StandInNvml:
    standin = StandInNvml()
    monkeypatch.setitem(sys.modules, "pynvml", standin)
    return standin


@pytest.mark.parametrize(
    ("gpu", "detail"),
    [
        (Gpu("GPU-a"), ""),
        (Gpu("GPU-a", recovery=None, uncorrected=None, links=None), ""),
        (Gpu("GPU-a", links=(True,) * 18), ""),
        (Gpu("GPU-a", links=(False,) * 12), ""),
        (Gpu("GPU-a", recovery=1), "GPU-a: it must be reset"),
        (Gpu("GPU-a", recovery=2), "GPU-a: the node must be rebooted"),
        (Gpu("GPU-a", recovery=4), "GPU-a: it works at reduced capacity, and must be drained and reset"),
        (Gpu("GPU-a", recovery=77), "GPU-a: the driver asks for recovery action 77"),
        (Gpu("GPU-a", uncorrected=3), "GPU-a: 3 memory errors could not be corrected since its last reset"),
        (Gpu("GPU-a", links=(True, False, True, False)), "GPU-a: NVLink 1, 3 of 4 is down"),
        (Gpu("GPU-a", lost=True), "GPU-a: it is no longer there (error 15)"),
        (Gpu("GPU-b"), "GPU-a: it is no longer there (error 6)"),
        (
            Gpu("GPU-a", recovery=1, uncorrected=2),
            "GPU-a: it must be reset; GPU-a: 2 memory errors could not be corrected since its last reset",
        ),
    ],
)
def test_a_gpu_fails_only_on_a_definite_bad_answer(standin: StandInNvml, gpu: Gpu, detail: str) -> None:
    standin.gpus = [gpu]
    assert gpus(["GPU-a"]) == Check("gpus", ok=not detail, detail=detail)


def test_gpus_of_other_jobs_are_not_looked_at(standin: StandInNvml) -> None:
    standin.gpus = [Gpu("GPU-a"), Gpu("GPU-b", recovery=1)]
    assert gpus(["GPU-a"]).ok
    assert gpus([]).ok


def test_an_older_module_without_a_question_is_no_fault(standin: StandInNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.gpus = [Gpu("GPU-a", uncorrected=1)]
    monkeypatch.delattr(StandInNvml, "nvmlDeviceGetFieldValues")
    assert gpus(["GPU-a"]).detail == "GPU-a: 1 memory errors could not be corrected since its last reset"


def test_nvml_that_cannot_be_asked_keeps_nobody_out_and_is_told(standin: StandInNvml) -> None:
    standin.init_error = StandInNvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    assert gpus(["GPU-a"]) == Check("gpus", ok=True, detail="they could not be looked at: NVML: error 18")


def test_nvml_that_does_not_answer_fails(standin: StandInNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.hang = threading.Event()
    monkeypatch.setattr("elasticd.daemon.nvml.ask.__kwdefaults__", {"seconds": 0.05})
    try:
        assert gpus(["GPU-a"]) == Check("gpus", ok=False, detail="NVML: no answer within 0.05 s")
    finally:
        standin.hang.set()


# --- all together ------------------------------------------------------------------------------------------------------


def test_a_node_that_is_well_is_told_so_by_each_check(tmp_path: Path) -> None:
    health = Checker(ROOM, tmp_path)(script("exit 0"), (), threading.Event())
    assert (health.ok, health.reason) == (True, "")
    assert [found.name for found in health.checks] == ["disk", "clock", "peers", "gpus", "health_check"]


def test_a_job_without_a_check_of_its_own_has_ours_alone(tmp_path: Path) -> None:
    health = run_checks(script("", health_check=[]), (), limits=ROOM, log_dir=tmp_path)
    assert [found.name for found in health.checks] == ["disk", "clock", "peers", "gpus"]


def test_on_a_node_that_is_not_well_the_jobs_own_check_is_not_run(tmp_path: Path, refusing: tuple[str, int]) -> None:
    spec = script(f"touch {tmp_path}/ran")
    health = run_checks(spec, (), limits=HealthSection(disk_free_min=1 << 60), log_dir=tmp_path, peers=lambda: [refusing])
    assert not health.ok
    assert health.reason.startswith(f"disk: {tmp_path} has ")
    assert "; peers: none of 1 other nodes can be reached: " in health.reason
    assert not (tmp_path / "ran").exists()


def test_the_limit_of_time_is_the_jobs_or_else_the_daemons(tmp_path: Path) -> None:
    limits = HealthSection(disk_free_min=0, timeout=0.3)
    assert run_checks(script("sleep 1000"), (), limits=limits, log_dir=tmp_path).reason == "health_check: not done after 0.3 s"
    assert run_checks(script("sleep 1000", health_timeout=0.2), (), limits=limits, log_dir=tmp_path).reason == "health_check: not done after 0.2 s"


def test_a_long_reason_fits_into_a_record_and_keeps_its_end(tmp_path: Path) -> None:
    health = run_checks(script("seq 100000; exit 1"), (), limits=ROOM, log_dir=tmp_path)
    assert health.reason.endswith(" | 99999 | 100000")
    assert len(health.reason) <= TEXT_MAX - 150, "the daemon puts a job's name before it"
    NodeJob(name="a", state=NodeJobState.KEPT_OUT, why=health.reason)


def test_what_was_cancelled_before_it_began_is_not_begun(tmp_path: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    assert run_checks(script(""), (), limits=ROOM, log_dir=tmp_path, cancelled=cancelled) == Health(ok=False, reason="cancelled")


def test_a_check_that_passed_with_a_doubt_is_logged(tmp_path: Path, standin: StandInNvml) -> None:
    standin.init_error = StandInNvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    with capture_logs() as logs:
        health = run_checks(script("exit 0"), [Slot(id="GPU-a", gpu_uuid="GPU-a")], limits=ROOM, log_dir=tmp_path)
    assert health.ok
    assert {"check": "gpus", "detail": "they could not be looked at: NVML: error 18", "event": "check_passed_but", "job": "a", "log_level": "warning"} in logs
