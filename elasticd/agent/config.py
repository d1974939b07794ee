"""What one agent is told at its start, in one JSON file.

Owns: the schema, its defaults, and turning a bad file into one clear line. Must not: import torch or etcd3; whoever starts agents reads it too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from elasticd.errors import UsageError
from elasticd.kv.types import KVConfig, TLSFiles
from elasticd.observability.limits import LogLimits
from elasticd.policy.settings import Settings
from elasticd.rendezvous.keys import JobKeys
from elasticd.rendezvous.membership import Timing
from elasticd.rendezvous.nodelock import default_state_dir

Seconds = Annotated[float, Field(gt=0, le=86_400)]
SecondsOrZero = Annotated[float, Field(ge=0, le=86_400)]
Variable = Annotated[str, Field(pattern=r"^[^=\x00]+$")]
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
Device = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9/:-]*$")]


class AgentConfig(BaseModel):
    """One agent of one job. Times are seconds.

    Attributes:
        nproc: workers on this node.
        argv: the workers' command, complete; no shell.
        cwd: the workers' working directory.
        log_dir: root of agent and worker logs.
        ttl: lease; a silent node is missed after it. Etcd's floor is 2.
        settle: quiet time before forming or admitting with fewer nodes than desired.
        ready_timeout: how long a member may take to stop before the others go on without it.
        stop_grace: from SIGTERM to SIGKILL when the world changes and everybody is well.
        kill_grace: the same when somebody is gone and the workers hang in a collective.
        leave_timeout: how long a leaving agent waits for the others to go on without it.
        frozen_max: how long workers go on without etcd.
        state_dir: where the lock lies that proves this to be the node's only agent of the job.
        checkpoints: directory of checkpoints, where no setting names one; it must outlive a boot. None: `checkpoints` in state_dir.
        reopen: start a job again that has ended.
        user: who the workers are; None: who the agent is. The agent must be root or have the ambient capabilities that `identity` names.
        env: laid over the agent's own environment for the workers, below the variables that torch wants.
        devices: UUIDs of the GPUs that the workers may see, all of them to each worker, LOCAL_RANK being the index; () leaves them alone.
        cpus: for each local rank the CPUs that it may run on; () leaves one, or all of them, alone.
        trainer_file: the table [trainer] of the job's file: what `trainer.settings` calls the layer `file`.
        trainer_command: its layer `command`, as text.
        result_file: set by a daemon, which learns from it how the agent ended (`result`); SIGHUP then reloads certificates instead of leaving.
        report_file: set by a daemon, which reads there how the job goes (`observability.report`); None: nobody asks.
        logs: how much is kept of them on this node.
        policy: what is done about failures, by the names of `elasticd.policy.settings`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cluster: str = "default"
    job: str
    node: str
    address: str = "127.0.0.1"
    nproc: Annotated[int, Field(ge=1, le=1024)] = 1
    argv: Annotated[tuple[str, ...], Field(min_length=1)]
    cwd: Path
    log_dir: Path
    endpoints: Annotated[tuple[str, ...], Field(min_length=1)]
    cacert: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    min_nodes: Annotated[int, Field(ge=1)] = 1
    max_nodes: Annotated[int, Field(ge=1)]
    desired: Annotated[int, Field(ge=1)]
    max_restarts: Annotated[int, Field(ge=0)] = 10
    ttl: Annotated[float, Field(ge=2, le=3600)] = 10.0
    settle: SecondsOrZero = 1.0
    ready_timeout: Seconds = 15.0
    stop_grace: SecondsOrZero = 30.0
    kill_grace: SecondsOrZero = 1.0
    leave_timeout: Seconds = 45.0
    frozen_max: Seconds = 600.0
    probe_port: Annotated[int, Field(ge=0, le=65535)] = 0
    state_dir: Path = Field(default_factory=default_state_dir)
    checkpoints: Path | None = None
    reopen: bool = False
    user: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    env: dict[Variable, Text] = {}
    devices: tuple[Device, ...] = ()
    cpus: tuple[tuple[Annotated[int, Field(ge=0, le=65_535)], ...], ...] = ()
    trainer_file: dict[str, bool | int | float | str] = {}
    trainer_command: dict[str, str] = {}
    result_file: Path | None = None
    report_file: Path | None = None
    logs: LogLimits = LogLimits()
    policy: dict[Text, bool | int | float | str] = {}

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, values: dict[str, object]) -> dict[str, object]:
        try:
            Settings.from_dict(values)
        except UsageError as error:
            raise ValueError(error.message) from None
        return values

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if not self.min_nodes <= self.desired <= self.max_nodes:
            msg = f"min_nodes {self.min_nodes} <= desired {self.desired} <= max_nodes {self.max_nodes} does not hold"
            raise ValueError(msg)
        if self.frozen_max < self.ttl:
            msg = f"frozen_max {self.frozen_max:g} is shorter than the lease, ttl {self.ttl:g}"
            raise ValueError(msg)
        if self.cacert is None and (self.cert or self.key):
            msg = "cert and key need cacert"
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _ranks_fit(self) -> Self:
        if self.devices and len(self.devices) < self.nproc:
            msg = f"{self.nproc} workers need a device each, {len(self.devices)} were given"
            raise ValueError(msg)
        if len(set(self.devices)) != len(self.devices):
            msg = f"devices {', '.join(self.devices)} are not unique"
            raise ValueError(msg)
        if self.cpus and len(self.cpus) != self.nproc:
            msg = f"cpus are given for {len(self.cpus)} of {self.nproc} workers"
            raise ValueError(msg)
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            UsageError: it cannot be read, or a value is missing, unknown or out of range; the message names file and key.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            msg = f"cannot read {path}: {error.strerror}"
            raise UsageError(msg) from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "file"
            msg = f"{path}: {place}: {first['msg']}"
            raise UsageError(msg) from None

    @property
    def keys(self) -> JobKeys:
        """The job's keys in etcd."""
        return JobKeys(self.cluster, self.job)

    @property
    def kv(self) -> KVConfig:
        """How to reach etcd. A whole call (twice the timeout) must fit into a lease, or slowness alone would end it."""
        tls = TLSFiles(cacert=self.cacert, cert=self.cert, key=self.key) if self.cacert else None
        return KVConfig(endpoints=self.endpoints, tls=tls, call_timeout=min(2.0, self.ttl / 2))

    @property
    def timing(self) -> Timing:
        """The same times as the membership's decisions use them."""
        return Timing(
            settle=self.settle,
            settle_cap=10 * self.settle,
            ready_timeout=self.ready_timeout,
            drain_timeout=self.stop_grace + self.ready_timeout,
            ttl=self.ttl,
            frozen_max=self.frozen_max,
            judged=True,
        )
