"""The person on call: types what a runbook says, line by line, at a machine from which hosts, Prometheus and Alertmanager can be reached.

Owns: that machine's programs and names, and the commands of a runbook with its placeholders filled in. Must not: know what went wrong.

Real are the shell, the hosts' commands, promtool, amtool, curl and ping. `ssh HOST words` is a stand-in that does what sshd would: it joins the words,
and root's shell on that host gets them. `elasticctl` is the installed one, on a host, by a user of the group elasticd-ops who is not root.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.etcd import etcdctl
from tests.cluster.places import MOVES, ROOT, placed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.cluster.hosts import Host

RUNBOOKS = ROOT / "docs" / "runbooks"
USER = "oncall"
GROUP = "elasticd-ops"
_ENTER = """\
pid=$(cat '{folder}/pids/'"$host")
[ -d /proc/"$pid" ] || {{ echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; }}
enter="nsenter -t $pid -m -p -i -u -n -C -r -w -- setpriv --pdeathsig KILL --"
environ="env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{tools} LANG=C.UTF-8 TERM=dumb"
"""
_SSH = '#!/bin/sh\nhost=$1; shift\n{enter}exec $enter $environ HOME=/root USER=root bash -c "$*" </dev/null\n'
_CTL = '#!/bin/sh\nhost={host}\n{enter}exec $enter runuser -u {user} -- $environ HOME=/ USER={user} elasticctl "$@"\n'
_TYPE = 'mount --bind "$0/hosts" /etc/hosts && mount --bind "$1" /etc/prometheus && exec bash -c "$2"'
"""In a mount namespace of its own: names of hosts are known there, and Prometheus's configuration is where its package has it."""


@dataclass(frozen=True, kw_only=True)
class Typed:
    """A line that was typed, and what came of it."""

    line: str
    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"$ {self.line}\n[{self.code}]\n{self.out}{self.err}"


def tools() -> Path:
    """Where etcdctl is: where etcd runs, its package has it on the PATH."""
    return Path(etcdctl() or "/nowhere").parent


def commands(alert: str) -> list[str]:
    """The lines of the code blocks of an alert's runbook, as they stand there."""
    text = (RUNBOOKS / f"{alert}.md").read_text()
    return [line for block in re.findall(r"^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL) for line in block.splitlines()]


def remedies(alert: str) -> list[str]:
    """What stands in backticks outside of the blocks."""
    text = re.sub(r"^```.*?^```$", "", (RUNBOOKS / f"{alert}.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def filled(line: str, names: Mapping[str, str]) -> str:
    """A line of a runbook with what its words in capitals stand for. A name with a port stands for both."""
    for name in names:
        line = line.replace(name, names[name]) if ":" in name else line
    return re.sub(r"(?<![A-Za-z_])[A-Z][A-Z_]*(?![A-Za-z_])", lambda word: names.get(word[0], word[0]), line)


class OnCall:
    """See the module.

    Args:
        folder: for the machine's programs.
        hosts: that it knows by name and address; `elasticctl` is typed on the first.
        prometheus: folder with the configuration of Prometheus.
        alertmanager: host:port of the one that `amtool` speaks to.
        names: what words in capitals stand for in all runbooks.
    """

    def __init__(self, folder: Path, hosts: Sequence[Host], *, prometheus: Path, alertmanager: str, names: Mapping[str, str]) -> None:
        self._folder = folder
        self._prometheus = prometheus
        self._hosts = list(hosts)
        self._names = dict(names)
        login = self._hosts[0]
        for part in ("bin", "pids"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        for place in ("home/.config/amtool/config.yml", "home/.config/prometheus/amtool.yml"):  # upstream's amtool, and Debian's
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_text(f"alertmanager.url: http://{alertmanager}\n")
        enter = _ENTER.format(folder=folder, tools=placed(tools(), MOVES))
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts))
        for name, text in (("ssh", _SSH.format(enter=enter)), ("elasticctl", _CTL.format(enter=enter, host=login.name, user=USER))):
            path = folder / "bin" / name
            path.write_text(text)
            path.chmod(0o755)
        for host in self._hosts:
            host.sh("systemd-sysusers", "-", input=f"u {USER} - - /\nm {USER} {GROUP}\n")

    def types(self, line: str, **names: str) -> Typed:
        """Type one line, and wait until it is done."""
        for host in self._hosts:
            for note in (self._folder / "pids" / host.name, self._folder / "pids" / host.address):
                note.write_text(str(host.pid) if host.on else "off")
        told = filled(line, {**self._names, **names})
        environment = {
            "PATH": f"{self._folder}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{tools()}",
            "HOME": str(self._folder / "home"),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
        }
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _TYPE, str(self._folder), str(self._prometheus), told]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=120, env=environment, cwd=ROOT)
        return Typed(line=told, code=done.returncode, out=done.stdout, err=done.stderr)

    def looks(self, alert: str, **names: str) -> list[Typed]:
        """Type all that a runbook says under "Look", in its order."""
        return [self.types(line, **names) for line in commands(alert)]

    def cures(self, alert: str, begin: str, *, on: Host | None = None, **names: str) -> Typed:
        """Type the one remedy of a runbook that begins so; on a host, if it is for the node itself."""
        found = {remedy for remedy in remedies(alert) if remedy.startswith(begin)}
        assert len(found) == 1, (alert, begin, found)
        (remedy,) = found
        return self.types(f"ssh {on.name} {shlex.quote(remedy)}" if on else remedy, **names)
