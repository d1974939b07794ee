"""A cluster that trains, who watches it, and who is called: what the tests of runbooks play on.

Owns: the installed service on three hosts, a job that goes wrong as it is told, a Prometheus, and the person on call. Must not: know a fault or its cure.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import monitoring
from tests.cluster.monitoring import Monitoring, rehearsed
from tests.cluster.oncall import OnCall, Typed
from tests.cluster.places import PROJECT, PYTHON
from tests.cluster.site import CONFIG, USER, Site
from tests.support.etcd import await_

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.hosts import Host

JOB = "steered"
OUT = "/srv/steered"
PORT = 9464
CHECKPOINTS = "/var/lib/elasticd/checkpoints"
LOGS = "/var/log/elasticd"
JOB_FILE = f"""\
argv = ["{PYTHON}", "-u", "/srv/steered.py"]
user = "{USER}"
min_nodes = 2
max_nodes = 3
[env]
OMP_NUM_THREADS = "1"
OUT = "{OUT}"
PYTHONPATH = "{PROJECT}"
"""
OFTEN = "checkpoint_every_s=3"
"""In etcd, where a rehearsal can change it while the job runs; its file would be above that."""


class Rehearsal:
    """A cluster that trains, who watches it, and who is called."""

    def __init__(self, site: Site, watch: Monitoring, oncall: OnCall) -> None:
        self.site = site
        self.watch = watch
        self.oncall = oncall

    # --- faults --------------------------------------------------------------------------------------------------------

    def say(self, word: str, *hosts: Host) -> None:
        """Tell the job's script to go wrong on these hosts; on all if none is named."""
        for host in hosts or self.site.hosts:
            host.sh("touch", f"{OUT}/{word}")

    def hush(self) -> None:
        """The script is to go right again."""
        for host in self.site.hosts:
            host.sh("sh", "-c", f"rm -f {OUT}/*")

    def kill_worker(self, host: Host) -> None:
        """SIGKILL to the job's workers on a host that has one."""
        await_(lambda: host.sh("pkill", "-9", "-u", USER, "-f", "steered.py", check=False).returncode == 0, within=20, what=f"a worker on {host.name}")

    # --- what is seen --------------------------------------------------------------------------------------------------

    def job(self) -> dict[str, Any]:
        """As the first host's daemon tells of it."""
        jobs: dict[str, dict[str, Any]] = {one["job"]: one for one in self.site.get(self.site.hosts[0], "/v1/status")["jobs"]}
        return jobs.get(JOB, {"state": "not known", "nodes_training": 0, "generation": 0})  # while etcd is away

    def trains(self, nodes: int = 3) -> bool:
        """Whether the job does, on so many nodes."""
        job = self.job()
        return bool(job["state"] == "training" and job["nodes_training"] == nodes)

    def mend(self) -> None:
        """Take back whatever a test that failed has left."""
        self.site.heal()
        first = self.site.hosts[0]
        for host in self.site.hosts:
            self.site.ctl(first, "uncordon", host.name, check=False)
        for words in (("resume", JOB), ("scale", JOB, "3", "--min", "2", "--detach"), ("start", JOB, "--again", "--max-restarts", "50", "--detach")):
            self.site.ctl(first, *words, check=False)

    def await_training(self, nodes: int = 3, within: float = 60) -> None:
        """Wait until the job trains on so many nodes, and makes steps that Prometheus sees."""

        await_(lambda: self.trains(nodes), within=within, what=f"training on {nodes} nodes")
        await_(lambda: self.watch.query(f'time() - max(elasticd_job_last_step_timestamp_seconds{{job_name="{JOB}"}}) < 3'), within=within, what="steps")

    def fires(self, alert: str, within: float = 60, **labels: str) -> dict[str, str]:
        """Wait until an alert with these labels fires by Prometheus."""

        def seen() -> dict[str, str] | None:
            return next((one for one in self.watch.firing(alert) if labels.items() <= one.items()), None)

        try:
            found = await_(seen, within=within, what=f"{alert} firing {labels}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.watch.query('ALERTS')}\n{self.job()}") from None
        assert found is not None
        return found

    def ends(self, alert: str, within: float = 60) -> None:
        """Wait until an alert neither fires nor is pending."""
        try:
            await_(lambda: not self.watch.query(f'ALERTS{{alertname="{alert}"}}'), within=within, what=f"the end of {alert}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.watch.query('ALERTS')}\n{self.job()}") from None

    # --- what is typed -------------------------------------------------------------------------------------------------

    def follows(self, alert: str, host: Host | None = None, *, member: Host | None = None, fails: dict[str, int] | None = None, **names: str) -> str:
        """Type what the runbook says under "Look"; what it all said.

        Args:
            host: NODE.
            member: MEMBER; the address, by which the certificates of these hosts name it.
            fails: part of a line -> exit code by which that line tells of the fault.
        """
        host, member = host or self.site.hosts[0], member or self.site.hosts[0]
        typed = self.oncall.looks(alert, NODE=host.name, ADDRESS=host.address, MEMBER=member.address, **names)
        for one in typed:
            expected = next((code for part, code in (fails or {}).items() if part in one.line), 0)
            if "nvidia-smi" in one.line:
                assert one.code in {0, 127}, one  # there is none without a driver; that it exists is all that can be said
            else:
                assert one.code == expected, one
        return "\n".join(map(str, typed))

    def cures(self, alert: str, begin: str, on: Host | None = None, **names: str) -> Typed:
        """Type a remedy of the runbook, which works."""
        done = self.oncall.cures(alert, begin, on=on, **names)
        assert done.code == 0, done
        return done

    def types(self, line: str, **names: str) -> Typed:
        """Type a line, which works."""
        done = self.oncall.types(line, **names)
        assert done.code == 0, done
        return done


@contextmanager
def rehearse(site: Site, folders: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    """Have the job train on the hosts of a site, the second of which can read the kernel's log, and Prometheus watch."""
    reason = monitoring.missing()
    if reason:
        pytest.skip(f"no Prometheus on this machine: {reason}")
    for host in site.hosts:
        host.write(CONFIG, f'{host.read(CONFIG)}\n[metrics]\nlisten = "0.0.0.0:{PORT}"\n')
        host.write("/srv/steered.py", Path(__file__).with_name("steered.py").read_text())
        host.sh("install", "-d", "-o", USER, OUT)
    site.hosts[1].sh("mknod", "-m", "644", "/dev/kmsg", "c", "1", "11")
    site.hosts[1].sh("systemctl", "restart", "systemd-journald")
    site.job(JOB, JOB_FILE)
    site.start()
    site.ctl(site.hosts[0], "config", "set", OFTEN, "--job", JOB)
    site.ctl(site.hosts[0], "start", JOB, "--timeout", "90", timeout=100)
    folder = folders.mktemp("monitoring")
    with Monitoring(folder, [f"{host.address}:{PORT}" for host in site.hosts], rules=rehearsed) as watch:
        names = {
            "JOB": JOB,
            "CLUSTER": site.etcd.cluster,
            "MEMBERS": " ".join(host.address for host in site.hosts),
            "CHECKPOINT_DIR": CHECKPOINTS,
            "CERTS": str(site.etcd.certificates.folder),
            "PROMETHEUS:9090": watch.prometheus,
            "R": "0",
            "N": "0",
            "WHY": "rehearsal",
        }
        oncall = OnCall(folders.mktemp("oncall"), site.hosts, prometheus=watch.folder, alertmanager=watch.alertmanager, names=names)
        yield Rehearsal(site, watch, oncall)


def says(host: Host, line: str) -> None:
    """Write as the kernel does."""
    host.sh("sh", "-c", 'echo "$1" >/dev/kmsg', "sh", line)
