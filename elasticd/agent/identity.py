"""Who a job's workers are, where that is not who the agent is.

Owns: looking a user up, whether this agent may start processes as them, and what of the file system it hands to them or they may enter. Must not:
start anything, or change who this process is (`_exec_child` does that, in the worker).

An agent that is not root needs four ambient capabilities: ambient, because the shim that becomes the user is a program of its own, and only these
outlive exec. CAP_KILL is for the kernel as much as for us: PDEATHSIG is sent with the rights of the agent that ends.
"""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elasticd.errors import UsageError

CAPABILITIES: Final = {"CAP_SETUID": 7, "CAP_SETGID": 6, "CAP_KILL": 5, "CAP_CHOWN": 0}
"""What an agent that is not root needs, by number (<linux/capability.h>)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """A user as the kernel and programs know them.

    Attributes:
        gid: primary group.
        groups: all groups, the primary one among them.
        umask: of the user's processes.
    """

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str
    umask: int = 0o022

    @classmethod
    def find(cls, user: str) -> Identity:
        """Look a user up, by name or by number.

        Raises:
            UsageError: this machine does not know it.
        """
        try:
            entry = pwd.getpwuid(int(user)) if user.isascii() and user.isdigit() else pwd.getpwnam(user)
        except (KeyError, OverflowError):
            raise UsageError(f"job file asks for user {user}, whom this machine does not know") from None
        groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
        return cls(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid, groups=groups, home=entry.pw_dir, shell=entry.pw_shell or "/bin/sh")

    @property
    def foreign(self) -> bool:
        """Whether it is somebody else than this process."""
        return self.uid != os.geteuid()

    @property
    def environment(self) -> dict[str, str]:
        """What login would tell the user's programs of themselves."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}

    def check(self) -> None:
        """See that this process may start others as this user.

        Raises:
            UsageError: it may not; the message says what is missing.
        """
        if not self.foreign:
            return
        if self.uid == 0:
            raise UsageError("job file asks for user root, but this agent is not root", remedy="name another user, or run the agent as root")
        held = capabilities()
        missing = [name for name, number in CAPABILITIES.items() if not held >> number & 1]
        if missing:
            raise UsageError(
                f"job file asks for user {self.name}, but this agent may not change users",
                remedy=f"run it as root, or give it the ambient capabilities that it lacks: {', '.join(missing)}",
            )

    def give(self, directory: Path) -> None:
        """Let the user write in `directory`, which is ours and empty of what they could have put there; our group may read it, and what they make in it.

        Raises:
            OSError: it cannot be given away.
        """
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(fd, 0o2750)  # before the owner changes: afterwards it is not ours to change
            os.fchown(fd, self.uid, -1)
        finally:
            os.close(fd)

    def kept_out_of(self, directory: Path) -> Path | None:
        """The first directory on the way to `directory`, itself included, that the user may not enter; access control lists are not looked at."""
        if self.uid == 0:
            return None
        for step in (*reversed(directory.absolute().parents), directory.absolute()):
            try:
                status = step.stat()
            except OSError:
                return step
            shift = 6 if status.st_uid == self.uid else 3 if status.st_gid in self.groups else 0
            if not status.st_mode >> shift & 1:
                return step
        return None


def capabilities() -> int:
    """Those that this process has and that a program it starts has too."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    # Root's programs get all that the bounding set allows, others what is ambient.
    outlives = fields["CapBnd"] if os.geteuid() == 0 else fields["CapAmb"]
    return int(fields["CapEff"], 16) & int(outlives, 16)
