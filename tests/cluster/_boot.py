"""One throw-away host, as a process of its own: it boots systemd in fresh namespaces, keeps the host's disk, and ends everything with itself.

Owns: namespaces, mounts, cgroup, console and PID 1 of one host. Must not: import the project (it runs isolated, by any Python), or touch the
network, which `hosts` plugs in between `boot` and `go`.

The host is the machine's own systemd as PID 1 over an overlay of the machine's `/`. What it writes lands in a tmpfs that only this process holds:
it survives a power cut and a reboot of the host, and is gone with this process. It has its own /tmp, /run, /dev, /proc, read-only /sys, cgroup,
machine id and boot id; units for which systemd mounts a fresh /proc (ProtectKernelTunables= and others) see the machine's boot id all the same. What
the machine itself has enabled (units, generators, fstab) is not taken over.

Spoken on stdin and stdout, one line each; an answer that begins with "error" says what went wrong:

    boot    "pid N": the host's PID 1, seen from here; it waits with its namespaces made
    go      "up": systemd has been let go
    kill    "off": PID 1 and with it every process of the host is gone, at once
    (end)   everything is ended and removed. So the host dies with whoever holds the other end of stdin, however that one ends
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import stat
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MS_PRIVATE, MS_SLAVE, MS_SHARED = 1 << 18, 1 << 19, 1 << 20
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1

SYSTEMD = ("/lib/systemd/systemd", "/usr/lib/systemd/systemd")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# They would work on the kernel, which is the machine's, or mount file systems that show it.
MASKED = (
    "systemd-modules-load.service",
    "kmod-static-nodes.service",
    "modprobe@drm.service",
    "systemd-sysctl.service",
    "systemd-binfmt.service",
    "proc-sys-fs-binfmt_misc.automount",
    "sys-kernel-config.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "sys-fs-fuse-connections.mount",
    "dev-hugepages.mount",
    "systemd-udevd.service",
    "systemd-udev-trigger.service",
    "systemd-tmpfiles-setup-dev.service",
    "systemd-repart.service",
    "getty.target",
)
GENERATORS = ("usr/lib/systemd/system-generators", "usr/local/lib/systemd/system-generators")

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """One function of libc that returns 0; OSError says which one failed, and on what."""
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}{arguments}: {os.strerror(code)}")


def mount(source: str | Path, target: Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    call("mount", os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode())


def bind(source: Path, target: Path, *, read_only: bool = False) -> None:
    """Show `source` at `target`, too."""
    mount(source, target, flags=MS_BIND)
    if read_only:
        mount(source, target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)


class Machine:
    """See the module.

    Args:
        name: the host's name.
        address: its address, for its own /etc/hosts.
        folder: of this process; removed at the end.
        cgroup: the name of its cgroup, at the root of the unified hierarchy.
        shown: directories of the machine that every user of the host must be able to see, and the places where.
    """

    def __init__(self, name: str, address: str, folder: Path, cgroup: str, shown: Sequence[tuple[Path, Path]]) -> None:
        self._name = name
        self._address = address
        self._folder = folder
        self._disk = folder / "disk"
        self._root = self._disk / "root"
        self._cgroup = self._disk / "cgroup" / cgroup
        self._shown = shown
        self._pid = 0
        self._hold = -1  # what PID 1 waits at
        self._ready = -1
        self._console, self._terminal = os.openpty()
        self._log = (folder / "console.log").open("ab", buffering=0)

    # --- this process ---------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """The disk and the cgroup, in a mount namespace of our own, which goes with us."""
        call("unshare", CLONE_NEWNS)
        mount("none", Path("/"), flags=MS_REC | MS_SLAVE)
        self._disk.mkdir()
        mount("tmpfs", self._disk, "tmpfs", data="mode=0755")
        for name in ("root", "cgroup"):
            (self._disk / name).mkdir()
        mount("none", self._cgroup.parent, "cgroup2")
        self._cgroup.mkdir()

    def serve(self) -> None:
        """Obey until stdin ends; write the console into its file meanwhile, or the host would wait for a reader."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self._console, select.POLLIN)
        pending = b""
        while True:
            for fd, _ in poll.poll():
                if fd == self._console:
                    self._log.write(os.read(fd, 65536))
                    continue
                data = os.read(0, 4096)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._answer(line.decode())

    def _answer(self, word: str) -> None:
        try:
            said = {"boot": self._boot, "go": self._go, "kill": self.kill}[word]()
        except Exception as error:  # the asker raises it
            said = f"error {type(error).__name__} {error}".replace("\n", " ")
        os.write(1, f"{said}\n".encode())

    def _boot(self) -> str:
        if self._pid:
            return "error: it is on already"
        if not self._disk.exists():
            self._prepare()
        # Our own pid namespace again: a second unshare is refused where the first has been left to children.
        fd = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        call("setns", fd, CLONE_NEWPID)
        os.close(fd)
        call("unshare", CLONE_NEWPID)
        wait_at, self._hold = os.pipe()
        self._ready, tell_by = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._hold)
            self._become_init(wait_at, tell_by)
        os.close(wait_at)
        os.close(tell_by)
        os.write(self._hold, b".")
        said = os.read(self._ready, 4096)
        if said != b"ready":
            self.kill()
            return f"error: the host did not boot: {said.decode(errors='replace')}".replace("\n", " ")
        return f"pid {self._pid}"

    def _go(self) -> str:
        os.write(self._hold, b".")
        said = os.read(self._ready, 4096)  # exec closes the other end; words are what kept it from that
        if said:
            self.kill()
            return f"error: systemd was not started: {said.decode(errors='replace')}".replace("\n", " ")
        return "up"

    def kill(self) -> str:
        """As a power cut does. Once PID 1 is reaped, the kernel has ended every process of its namespace."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            os.close(self._hold)
            os.close(self._ready)
            self._pid = 0
        return "off"

    def end(self) -> None:
        """Remove all that this process made."""
        self.kill()
        deadline = time.monotonic() + 5
        while self._cgroup.exists() and time.monotonic() < deadline:
            for path in sorted((path for path in self._cgroup.rglob("*") if path.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    path.rmdir()
            with contextlib.suppress(OSError):
                self._cgroup.rmdir()
            time.sleep(0.01)
        self._log.close()
        for path in (self._cgroup.parent, self._disk):
            with contextlib.suppress(OSError):  # not there, if preparing failed
                call("umount2", os.fsencode(path), MNT_DETACH)
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- what becomes PID 1 ----------------------------------------------------------------------------------------------

    def _become_init(self, wait_at: int, tell_by: int) -> NoReturn:
        try:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
            if not os.read(wait_at, 1):
                os._exit(1)  # our parent died before it could be noticed otherwise
            (self._cgroup / "cgroup.procs").write_text("0")  # first, so that it is the root of the cgroup namespace
            os.setsid()
            call("unshare", CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET | CLONE_NEWCGROUP)
            mount("none", Path("/"), flags=MS_REC | MS_PRIVATE)
            socket.sethostname(self._name)
            self._mount_root()
            os.write(tell_by, b"ready")
            if not os.read(wait_at, 1):
                os._exit(1)
            self._exec()
        except BaseException as error:
            os.write(tell_by, f"{type(error).__name__}: {error}".encode()[:4000])
        os._exit(1)

    def _exec(self) -> None:
        terminal = os.open(os.ttyname(self._terminal), os.O_RDWR | os.O_NOCTTY)
        os.chdir(self._root)
        call("pivot_root", b".", b".")
        call("umount2", b".", MNT_DETACH)  # the machine's root lies on top of ours at the same place
        os.chdir("/")
        # systemd does so itself where it is not in a container. Without it, what it mounts for a service (credentials) is not seen by that service.
        mount("none", Path("/"), flags=MS_REC | MS_SHARED)
        for fd in (0, 1, 2):
            os.dup2(terminal, fd)
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python's wish, not systemd's
            signal.signal(signum, signal.SIG_DFL)
        program = next(path for path in SYSTEMD if Path(path).exists())
        os.execve(program, [program, "--system", "--unit=multi-user.target"], {"container": "elasticd-tests", "LANG": "C.UTF-8"})

    def _mount_root(self) -> None:
        root, disk = self._root, self._disk
        self._overlay("root", Path("/"), root)
        for number, (path, place) in enumerate(self._shown):
            self._show(path, place, f"shown-{number}")
        mount("proc", root / "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        self._mount_sys()
        mount("tmpfs", root / "run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
        mount("tmpfs", root / "tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
        self._mount_dev()
        if not (disk / "furnished").exists():
            furnish(root, self._name, self._address)
            (disk / "furnished").touch()

    def _overlay(self, name: str, lower: Path, target: Path) -> None:
        """Show the directory `lower` at `target`, to be written to as well: by that only the host's disk is changed."""
        parts = {kind: self._disk / f"{kind}-{name}" for kind in ("lower", "upper", "work")}
        for part in parts.values():
            part.mkdir(exist_ok=True)  # there, if the host has been on before
        bind(lower, parts["lower"])  # its own path may have characters that mean something among mount options
        # index=off: the last boot's overlay may take a moment longer to let go of the same directories.
        mount("overlay", target, "overlay", data="".join(f"{kind}dir={part}," for kind, part in parts.items()) + "index=off")

    def _show(self, path: Path, place: Path, name: str) -> None:
        """Let every user of the host see `path` at `place`, also if it is not on the root file system."""
        target = self._root / place.relative_to("/")
        if place != path:
            target.mkdir(parents=True, exist_ok=True)
            self._overlay(name, path, target)
        elif path.stat().st_dev != Path("/").stat().st_dev:
            target.mkdir(parents=True, exist_ok=True)
            bind(path, target, read_only=True)
        for folder in target.parents:
            if folder == self._root:
                break
            mode = stat.S_IMODE(folder.stat().st_mode)
            if mode & 0o011 != 0o011:
                folder.chmod(mode | 0o011)

    def _mount_sys(self) -> None:
        root = self._root
        # A boot id of its own, as another machine has; the rest of /proc/sys is the machine's and not to be changed.
        boot_id = self._disk / "boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        sysctl = root / "proc/sys"
        bind(sysctl, sysctl)
        bind(boot_id, sysctl / "kernel/random/boot_id", read_only=True)
        mount(sysctl, sysctl, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)
        mount("sysfs", root / "sys", "sysfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
        mount("none", root / "sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC)

    def _mount_dev(self) -> None:
        dev = self._root / "dev"
        mount("tmpfs", dev, "tmpfs", MS_NOSUID, "mode=0755")
        gpus = [path.name for path in Path("/dev").glob("nvidia*") if path.is_char_device()]
        for name in (*DEVICES, *gpus):
            (dev / name).touch()
            bind(Path("/dev") / name, dev / name)
        for name, mode in (("pts", 0o755), ("shm", 0o1777), ("mqueue", 0o755)):
            (dev / name).mkdir()
            (dev / name).chmod(mode)
        mount("devpts", dev / "pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5")
        mount("tmpfs", dev / "shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
        (dev / "console").touch()
        bind(Path(os.ttyname(self._terminal)), dev / "console")
        for name, to in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1")):
            (dev / name).symlink_to(to)
        (dev / "stderr").symlink_to("/proc/self/fd/2")


def furnish(root: Path, name: str, address: str) -> None:
    """Make the copy of the machine's files a host of its own: a new name, and nothing of what the machine has enabled."""
    etc = root / "etc"
    units, generators = etc / "systemd/system", etc / "systemd/system-generators"
    for folder in (units, root / "var/lib/systemd/linger"):
        if folder.is_dir():
            shutil.rmtree(folder)
    units.mkdir(parents=True)
    generators.mkdir(exist_ok=True)
    found = [path.name for folder in GENERATORS if (root / folder).is_dir() for path in (root / folder).iterdir()]
    for mask in [units / unit for unit in MASKED] + [generators / generator for generator in {*found, *(path.name for path in generators.iterdir())}]:
        mask.unlink(missing_ok=True)
        mask.symlink_to("/dev/null")
    journald = etc / "systemd/journald.conf.d"
    journald.mkdir(exist_ok=True)
    for path, text in (
        (etc / "hostname", f"{name}\n"),
        (etc / "hosts", f"127.0.0.1 localhost\n{address} {name}\n"),
        (etc / "machine-id", f"{uuid.uuid4().hex}\n"),  # none at all would be a first boot, which enables every unit
        (etc / "fstab", ""),
        (journald / "elasticd-tests.conf", "[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\n"),
    ):
        path.unlink(missing_ok=True)
        path.write_text(text)


def main() -> None:
    """Run one host. Arguments: its name, its address, the folder, the cgroup's name, and directories that must be seen, each followed by its place."""
    name, address, folder, cgroup, *views = sys.argv[1:]
    os.umask(0o022)  # what is made here is the host's, whose users are not all root
    paths = [Path(view) for view in views]
    machine = Machine(name, address, Path(folder), cgroup, list(zip(paths[::2], paths[1::2], strict=True)))
    try:
        machine.serve()
    finally:
        machine.end()


if __name__ == "__main__":
    main()
