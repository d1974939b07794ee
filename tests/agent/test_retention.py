"""Old generations' logs go, and nothing else does, whatever lies in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from elasticd.agent.logs import GenerationLogs
from elasticd.agent.retention import Kept, retain, surplus

pytestmark = pytest.mark.timeout(60)

PLENTY = 1 << 40
NOBODY = 65_534


# --- the decision


def kept(*sizes: int) -> list[Kept]:
    """Generations 1, 2, ... of so many bytes."""
    return [Kept(name=f"generation-{number:06d}", born=float(number), nbytes=size) for number, size in enumerate(sizes, 1)]


def names(*numbers: int) -> list[str]:
    return [f"generation-{number:06d}" for number in numbers]


def test_the_newest_stay_and_the_oldest_go_first() -> None:
    assert surplus(kept(1, 1, 1, 1, 1), (), generations=3, nbytes=PLENTY) == names(1, 2)


def test_as_many_go_as_are_too_many_bytes() -> None:
    assert surplus(kept(10, 10, 10, 10), (), generations=9, nbytes=25) == names(1, 2)
    assert surplus(kept(10, 10, 10, 10), (), generations=9, nbytes=40) == []


def test_what_is_in_use_stays_however_old_or_large() -> None:
    assert surplus(kept(100, 1, 1, 1), names(1), generations=2, nbytes=10) == names(2, 3)


def test_the_newest_stays_however_large() -> None:
    assert surplus(kept(1, 100), (), generations=9, nbytes=10) == names(1)


def test_age_counts_and_not_the_number() -> None:
    """A job that was made anew begins with 1 again."""
    found = [Kept(name="generation-000009", born=1.0, nbytes=1), Kept(name="generation-000001-2", born=2.0, nbytes=1)]
    assert surplus(found, (), generations=1, nbytes=PLENTY) == ["generation-000009"]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12), st.sets(st.integers(1, 12)), st.integers(2, 9), st.integers(0, 500))
def test_what_stays_fits_unless_it_must_stay(sizes: list[int], used: set[int], generations: int, nbytes: int) -> None:
    found = kept(*sizes)
    present = names(*used)
    gone = surplus(found, present, generations=generations, nbytes=nbytes)
    stay = [one for one in found if one.name not in gone]
    assert not set(gone) & {*present, found[-1].name}
    may_go = [one for one in stay if one.name not in present and one is not found[-1]]
    assert not may_go or sum(one.nbytes for one in stay) <= nbytes
    assert len([one for one in stay if one.name not in present]) <= generations


# --- doing it


def make(root: Path, count: int, fill: int = 0) -> list[Path]:
    """Generations 1 to `count`, each a second older than the next."""
    made = []
    for number in range(1, count + 1):
        logs = GenerationLogs.create(root, "job", "a", number, "a1")
        (logs.rank(0).stdout).write_bytes(b"x" * fill)
        os.utime(logs.directory / "incarnation", (1e9 + number, 1e9 + number))
        made.append(logs.directory)
    return made


def test_too_many_are_taken_away_and_logs_beside_them_stay(tmp_path: Path) -> None:
    made = make(tmp_path, 5)
    node = tmp_path / "job" / "a"
    for name in ("agent.jsonl", "agent.jsonl.1", "agent.stderr"):
        (node / name).write_text("mine")
    for name in ("generation-x", "generation-1", "notes", ".hidden", "generation-000001.bak"):
        (node / name).mkdir()
    (node / "generation-000099").write_text("a file")
    assert retain(node, generations=2, nbytes=PLENTY) == ["generation-000001", "generation-000002", "generation-000003"]
    assert [path.exists() for path in made] == [False, False, False, True, True]
    left = {path.name for path in node.iterdir()}
    assert left >= {
        "agent.jsonl",
        "agent.jsonl.1",
        "agent.stderr",
        "generation-x",
        "generation-1",
        "notes",
        ".hidden",
        "generation-000001.bak",
        "generation-000099",
    }
    assert not [name for name in left if name.startswith(".removing")]


def test_too_many_bytes_are_taken_away(tmp_path: Path) -> None:
    make(tmp_path, 5, fill=100_000)
    assert retain(tmp_path / "job" / "a", generations=20, nbytes=350_000) == ["generation-000001", "generation-000002"]


def test_the_present_one_stays_however_old(tmp_path: Path) -> None:
    """The one that `latest` points at, and the one that the agent names."""
    made = make(tmp_path, 5, fill=100_000)
    (tmp_path / "job" / "a" / "latest").unlink()
    (tmp_path / "job" / "a" / "latest").symlink_to("generation-000001")
    retain(tmp_path / "job" / "a", {"generation-000002"}, generations=2, nbytes=1)
    assert [path.exists() for path in made] == [True, True, False, False, True]


def test_it_stops_when_it_is_asked_to(tmp_path: Path) -> None:
    make(tmp_path, 5)
    assert retain(tmp_path / "job" / "a", generations=2, nbytes=PLENTY, stopped=lambda: True) == []


def test_a_directory_that_is_not_there_is_no_trouble(tmp_path: Path) -> None:
    assert retain(tmp_path / "none", generations=2, nbytes=1) == []


def test_a_link_in_place_of_a_directory_is_not_followed(tmp_path: Path) -> None:
    """Neither at the top, nor for a generation, nor inside one."""
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    (outside / "inner" / "file").write_text("mine")
    made = make(tmp_path / "logs", 4)
    node = tmp_path / "logs" / "job" / "a"
    (node / "generation-000000").symlink_to(outside)
    (made[0] / "rank-0" / "link").symlink_to(outside)
    (made[0] / "rank-0" / "stderr.log").symlink_to(outside / "inner" / "file")
    (made[0] / "rank-1").symlink_to(outside)
    retain(node, generations=2, nbytes=PLENTY)
    assert not made[0].exists()
    assert (node / "generation-000000").is_symlink()
    assert (outside / "inner" / "file").read_text() == "mine"
    (tmp_path / "link").symlink_to(node)
    assert retain(tmp_path / "link", generations=2, nbytes=1) == []
    assert made[3].exists()


def test_a_second_name_of_a_file_elsewhere_only_goes_itself(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    victim.chmod(0o640)
    made = make(tmp_path / "logs", 3)
    os.link(victim, made[0] / "rank-0" / "error.json")
    retain(tmp_path / "logs" / "job" / "a", generations=2, nbytes=PLENTY)
    assert not made[0].exists()
    assert (victim.read_text(), victim.stat().st_nlink, victim.stat().st_mode & 0o777) == ("mine", 1, 0o640)


def test_a_tree_deeper_than_any_path_and_names_that_are_no_text_go_too(tmp_path: Path) -> None:
    made = make(tmp_path, 3)
    script = "import os, sys\nos.chdir(sys.argv[1])\nfor _ in range(3000):\n    os.mkdir('deep'); os.chdir('deep')\nopen(b'\\xff\\n', 'w')"
    subprocess.run([sys.executable, "-c", script, str(made[0] / "rank-0")], check=True)
    os.mkfifo(made[0] / "rank-0" / "pipe")
    retain(tmp_path / "job" / "a", generations=2, nbytes=PLENTY)
    assert sorted(path.name for path in (tmp_path / "job" / "a").iterdir()) == ["generation-000002", "generation-000003", "latest"]


def test_what_a_crash_left_half_done_is_finished(tmp_path: Path) -> None:
    make(tmp_path, 2)
    left = tmp_path / "job" / "a" / ".removing-0123456789abcdef"
    (left / "0" / "rank-0" / "deep").mkdir(parents=True)
    (left / "7").mkdir()
    (left / "0" / "rank-0" / "stdout.log").write_text("x")
    retain(tmp_path / "job" / "a", generations=2, nbytes=PLENTY)
    assert not left.exists()


root = pytest.mark.root
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes files of others and mounts")

AS_AGENT = """
import ctypes, os, sys
from pathlib import Path
from elasticd.agent.retention import retain  # what it imports may lie where only root can go
os.setgroups([]); os.setgid(64321)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(8, 1, 0, 0, 0) == 0  # PR_SET_KEEPCAPS
os.setresuid(64321, 64321, 64321)
class Head(ctypes.Structure): _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
class Data(ctypes.Structure): _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]
chown = 1 << 0
data = (Data * 2)(Data(chown, chown, 0), Data(0, 0, 0))
assert libc.capset(ctypes.byref(Head(0x20080522, 0)), data) == 0, ctypes.get_errno()
libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as after exec: /proc/self is ours
print(*retain(Path(sys.argv[1]), generations=2, nbytes=1 << 40))
"""


@root
@needs_root
def test_an_agent_that_is_not_root_takes_away_what_its_workers_own(tmp_path: Path) -> None:
    """Directories that only they may enter among it. It has CAP_CHOWN, as its unit gives it."""
    public = Path(tempfile.mkdtemp(prefix="elasticd-retention-", dir="/var/tmp"))
    try:
        public.chmod(0o755)
        made = make(public, 3)
        shut = made[0] / "rank-0" / "shut"
        (shut / "inner").mkdir(parents=True)
        (shut / "inner" / "file").write_text("x")
        for path in (made[0] / "rank-0", shut, shut / "inner", shut / "inner" / "file"):
            os.chown(path, NOBODY, NOBODY)
            path.chmod(0o700 if path.name != "inner" else 0)
        for path in (public / "job", public / "job" / "a", *made, *(one / "incarnation" for one in made)):
            os.chown(path, 64_321, 64_321)
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        done = subprocess.run([sys.executable, "-c", AS_AGENT, str(public / "job" / "a")], env=env, capture_output=True, text=True, check=False)
        assert done.stdout.split()[-1:] == ["generation-000001"], done.stderr + done.stdout
        assert not made[0].exists()
        assert made[1].exists()
    finally:
        shutil.rmtree(public)


@root
@needs_root
def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    made = make(tmp_path, 4)
    os.chown(made[0], NOBODY, NOBODY)
    assert retain(tmp_path / "job" / "a", generations=2, nbytes=PLENTY) == ["generation-000002"]
    assert made[0].exists()


@root
@needs_root
def test_what_is_mounted_inside_is_not_touched(tmp_path: Path) -> None:
    """Even where it is another place of the same file system. The rest goes, and it is said that something stayed."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (outside / "file").write_text("mine")
    made = make(tmp_path / "logs", 3)
    inside = made[0] / "rank-0" / "mounted"
    inside.mkdir()
    subprocess.run(["mount", "--bind", str(outside), str(inside)], check=True)
    node = tmp_path / "logs" / "job" / "a"
    try:
        with capture_logs() as said:
            assert retain(node, generations=2, nbytes=PLENTY) == []
        assert ("old_logs_not_removed", "something is mounted there") in {(line["event"], line.get("error")) for line in said}
        assert (outside / "file").read_text() == "mine"
        assert outside.stat().st_mode & 0o777 == 0o755
    finally:
        mounted = next(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if line.split()[4].endswith("/mounted"))
        subprocess.run(["umount", mounted], check=True)
    retain(node, generations=2, nbytes=PLENTY)
    assert sorted(path.name for path in node.iterdir()) == ["generation-000002", "generation-000003", "latest"]
