"""Names of the keys in etcd.

Owns: the layout below one prefix. Must not: read or write anything.

::

    /elasticd/v1/<cluster>/
        nodes/<node>            a daemon, under its lease
        nodes-policy/<node>     operators' word about a node: cordoned, drained
        audit/<slot>            ring of what operators changed
        config/cluster          settings of training for all jobs, operators' word
        config/job/<job>        their word for one job
        incidents/<job>/<node>  what the detectors of a node say of a job
        jobs/<job>/
            target              wanted size and limits
            proposal            the coordinator's next world, pending
            generation          the world that trains, or how the job ended
            budget              restarts used
            checkpoint          newest committed checkpoint
            policy              what was done about failures and incidents, and what may be
            members/<node>      one agent each, under its lease
            requests/<kind>     what operators ask of the generation that trains
            events/<slot>-<what>  ring of what happened
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from elasticd.errors import UsageError

ROOT = "/elasticd/v1"
EVENT_SLOTS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def checked_name(kind: str, name: str) -> str:
    """Return `name` if it can be part of a key and of a file name.

    Raises:
        UsageError: it is empty, too long, or holds anything but letters, digits, "_", "." and "-".
    """
    if not _NAME.fullmatch(name):
        msg = f"{kind} {name!r} is not a usable name"
        raise UsageError(msg, remedy='use letters, digits, "_", "." and "-", at most 128, beginning with a letter or digit')
    return name


def node_name(host: str) -> str:
    """A host's name, as far as it can be a node's."""
    name = "".join(char if char.isascii() and (char.isalnum() or char in "_.-") else "-" for char in host)
    return name.lstrip("_.-")[:128] or "node"


@dataclass(frozen=True, slots=True)
class JobKeys:
    """The keys of one job in one cluster."""

    cluster: str
    job: str

    def __post_init__(self) -> None:
        """Refuse names that would escape the prefix."""
        checked_name("cluster", self.cluster)
        checked_name("job", self.job)

    @property
    def scope(self) -> str:
        """What every record of this job repeats, so that a record copied from elsewhere is refused."""
        return f"{self.cluster}/{self.job}"

    @property
    def prefix(self) -> str:
        """Prefix of everything below."""
        return f"{ROOT}/{self.cluster}/jobs/{self.job}/"

    @property
    def target(self) -> str:
        """Wanted size and limits."""
        return self.prefix + "target"

    @property
    def proposal(self) -> str:
        """The pending next world."""
        return self.prefix + "proposal"

    @property
    def generation(self) -> str:
        """The world that trains, or how the job ended."""
        return self.prefix + "generation"

    @property
    def budget(self) -> str:
        """Restarts used."""
        return self.prefix + "budget"

    @property
    def checkpoint(self) -> str:
        """Newest committed checkpoint."""
        return self.prefix + "checkpoint"

    @property
    def policy(self) -> str:
        """What was done about failures and incidents, and what may be."""
        return self.prefix + "policy"

    @property
    def members(self) -> str:
        """Prefix of the members."""
        return self.prefix + "members/"

    @property
    def events(self) -> str:
        """Prefix of the ring of events."""
        return self.prefix + "events/"

    @property
    def requests(self) -> str:
        """Prefix of what is asked of the generation that trains."""
        return self.prefix + "requests/"

    def request(self, kind: str) -> str:
        """The request of one kind; a newer one takes its place."""
        return self.requests + checked_name("request", kind)

    def member(self, node: str) -> str:
        """One node's member key."""
        return self.members + checked_name("node", node)

    def event(self, number: int, what: str) -> str:
        """Slot of what happened to generation `number`; the ring forgets after EVENT_SLOTS generations."""
        return f"{self.events}{number % EVENT_SLOTS:02d}-{what}"


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """The keys of one cluster that belong to no job."""

    cluster: str

    def __post_init__(self) -> None:
        """Refuse a name that would escape the prefix."""
        checked_name("cluster", self.cluster)

    @property
    def scope(self) -> str:
        """What every record of this cluster repeats."""
        return self.cluster

    @property
    def prefix(self) -> str:
        """Prefix of everything below."""
        return f"{ROOT}/{self.cluster}/"

    @property
    def nodes(self) -> str:
        """Prefix of the daemons."""
        return self.prefix + "nodes/"

    @property
    def policies(self) -> str:
        """Prefix of operators' words about nodes."""
        return self.prefix + "nodes-policy/"

    @property
    def jobs(self) -> str:
        """Prefix of all jobs."""
        return self.prefix + "jobs/"

    @property
    def audit(self) -> str:
        """Prefix of the ring of operators' changes."""
        return self.prefix + "audit/"

    @property
    def config(self) -> str:
        """Prefix of the settings of training that operators have set."""
        return self.prefix + "config/"

    @property
    def config_of_cluster(self) -> str:
        """Those for all jobs."""
        return self.config + "cluster"

    @property
    def config_of_jobs(self) -> str:
        """Prefix of those for one job each: a job may be called "cluster"."""
        return self.config + "job/"

    def config_of_job(self, job: str) -> str:
        """Those for one job."""
        return self.config_of_jobs + checked_name("job", job)

    @property
    def incidents(self) -> str:
        """Prefix of what detectors say."""
        return self.prefix + "incidents/"

    def incidents_of_job(self, job: str) -> str:
        """Prefix of what they say of one job."""
        return f"{self.incidents}{checked_name('job', job)}/"

    def incidents_of(self, job: str, node: str) -> str:
        """What those of one node say of one job."""
        return self.incidents_of_job(job) + checked_name("node", node)

    def node(self, name: str) -> str:
        """One daemon's key."""
        return self.nodes + checked_name("node", name)

    def policy(self, name: str) -> str:
        """Operators' word about one node."""
        return self.policies + checked_name("node", name)

    def job(self, name: str) -> JobKeys:
        """The keys of one job."""
        return JobKeys(self.cluster, name)


def jobs_prefix(cluster: str) -> str:
    """Prefix of all jobs of a cluster."""
    return ClusterKeys(cluster).jobs
