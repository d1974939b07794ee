"""What a daemon is told at its start: `/etc/elasticd/elasticd.toml`.

Owns: the schema, its defaults, and which files it names. Must not: look at the machine beyond those files (`machine` does that).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from elasticd.daemon.values import Endpoint, Listen, ListenOrOff, Name, PemFile, Seconds, Section, SharedPemFile, explain, one_line
from elasticd.errors import UsageError
from elasticd.kv.types import KVConfig, TLSFiles
from elasticd.observability.limits import LogLimits
from elasticd.policy.settings import Settings
from elasticd.rendezvous.keys import ClusterKeys

DEFAULT_PATH = Path("/etc/elasticd/elasticd.toml")


class EtcdSection(Section):
    """How to reach etcd.

    Attributes:
        endpoints: host:port each.
        cacert: turns TLS on.
        cert: this node's certificate, whose Common Name is its user in etcd.
        operator_cert: the certificate with which the API changes what is operators' to change; this node's own if it is not given.
    """

    endpoints: Annotated[tuple[Endpoint, ...], Field(min_length=1)]
    cacert: SharedPemFile | None = None
    cert: SharedPemFile | None = None
    key: SharedPemFile | None = None
    operator_cert: PemFile | None = None
    operator_key: PemFile | None = None

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        for cert, key, name in ((self.cert, self.key, "cert and key"), (self.operator_cert, self.operator_key, "operator_cert and operator_key")):
            if (cert is None) != (key is None):
                raise ValueError(f"{name} come together or not at all")
            if cert is not None and self.cacert is None:
                raise ValueError(f"{name} need cacert")
        return self


class TimingSection(Section):
    """Times of the daemon, in seconds. loop_wait + 2 x retry_timeout <= ttl: one slow round must not cost the node its lease.

    Attributes:
        ttl: the lease of the node's key.
        loop_wait: the longest time between two looks at everything.
        retry_timeout: how long one operation in etcd may be tried.
    """

    ttl: Annotated[float, Field(ge=2, le=3600)] = 30.0
    loop_wait: Annotated[float, Field(ge=0.2, le=600)] = 10.0
    retry_timeout: Annotated[float, Field(ge=0.2, le=600)] = 10.0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.loop_wait + 2 * self.retry_timeout > self.ttl:
            raise ValueError(
                f"loop_wait {self.loop_wait:g} + 2 x retry_timeout {self.retry_timeout:g} <= ttl {self.ttl:g} does not hold:"
                " a slow round would cost the node its lease"
            )
        return self


class PathsSection(Section):
    """Directories."""

    jobs_dir: Path = Path("/etc/elasticd/jobs.d")
    run_dir: Path = Path("/run/elasticd")
    state_dir: Path = Path("/var/lib/elasticd")
    log_dir: Path = Path("/var/log/elasticd")


class ApiSection(Section):
    """The node API on its unix socket.

    Attributes:
        socket: `api.sock` in run_dir if it is not given.
        readers: group whose members may read.
        operators: group whose members may also change.
    """

    socket: Path | None = None
    readers: str = "elasticd"
    operators: str = "elasticd-ops"


class MetricsSection(Section):
    """The plain listener: /metrics and health, nothing else. "" turns it off."""

    listen: ListenOrOff = "127.0.0.1:9464"


class PeerSection(Section):
    """The listener with TLS for other nodes and for operators on other machines. Off unless `listen` is given.

    Attributes:
        clients_ca: CA of the certificates that may connect.
    """

    listen: Listen | None = None
    cert: PemFile | None = None
    key: PemFile | None = None
    clients_ca: PemFile | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.listen is not None and None in (self.cert, self.key, self.clients_ca):
            raise ValueError("listen needs cert, key and clients_ca")
        return self


class AgentTimes(Section):
    """Times of the agents, where a job file does not say otherwise; as in `elasticctl run`, in seconds."""

    ttl: Annotated[float, Field(ge=2, le=3600)] = 10.0
    settle: Annotated[float, Field(ge=0, le=86_400)] = 1.0
    stop_grace: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    frozen_max: Seconds = 600.0


class HealthSection(Section):
    """Checks before a node joins, and again while it waits.

    Attributes:
        disk_free_min: bytes that the log directory's file system must have free.
        clock_skew_max: seconds by which this clock may differ from etcd's peers', where the kernel says whether it is synchronised.
        timeout: seconds for a job's own check, where its file does not say otherwise.
    """

    disk_free_min: Annotated[int, Field(ge=0)] = 1 << 30
    clock_skew_max: Annotated[float, Field(ge=0)] = 5.0
    timeout: Seconds = 60.0


class DetectorsSection(Section):
    """The process that looks for failures and drifts in logs and numbers (docs/detection.md).

    Attributes:
        run: there is one on this node.
        forest: with the isolation forest.
        signatures: TOML files that change the built-in table, in this order.
        width: seconds of the windows that ranks are compared in.
    """

    run: bool = True
    forest: bool = True
    width: Annotated[float, Field(ge=0.1, le=3600)] = 10.0
    signatures: Annotated[tuple[Path, ...], Field(max_length=16)] = ()


class Supervision(StrEnum):
    """What the agents are."""

    AUTO = "auto"  # units where systemd is the init of this machine and our own supervisor, else processes
    SYSTEMD = "systemd"  # elasticd-agent@JOB.service
    PROCESSES = "processes"  # process groups of ours, which outlive us
    CHILDREN = "children"  # process groups of ours, which do not: `elasticctl run`


class DaemonConfig(Section):
    """A daemon's whole configuration.

    Attributes:
        node: this node's name; None is the host's.
        address: where peers reach this node; None is the address on the way to etcd.
        slots: workers it may run at most; None is one for each GPU, and one where there is none.
        policy: what is done about failures and drifts, by the names of `elasticd.policy.settings`; docs/detection.md has them all.
    """

    cluster: Name = "default"
    node: Name | None = None
    address: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    slots: Annotated[int, Field(ge=1, le=1024)] | None = None
    labels: dict[Name, Annotated[str, Field(max_length=128)]] = Field(default_factory=dict, max_length=64)
    agents: Supervision = Supervision.AUTO
    etcd: EtcdSection
    timing: TimingSection = TimingSection()
    paths: PathsSection = PathsSection()
    api: ApiSection = ApiSection()
    metrics: MetricsSection = MetricsSection()
    peer: PeerSection = PeerSection()
    agent: AgentTimes = AgentTimes()
    health: HealthSection = HealthSection()
    logs: LogLimits = LogLimits()
    detectors: DetectorsSection = DetectorsSection()
    policy: dict[Name, bool | int | float | str] = Field(default_factory=dict, max_length=128)

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, values: dict[str, object]) -> dict[str, object]:
        try:
            Settings.from_dict(values)
        except UsageError as error:
            raise ValueError(str(error)) from None
        return values

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            UsageError: it cannot be read, or a value is missing, unknown or out of range; the message names file and key.
        """
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
            # By way of JSON: a file that says "10" where a number belongs is refused, and paths and lists still come from what TOML has for them.
            return cls.model_validate_json(json.dumps(document, default=str), strict=True)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        except ValidationError as error:
            raise UsageError(f"{path}: {explain(cls, error)}") from None
        except RecursionError:
            raise UsageError(f"{path}: nested too deeply") from None
        except ValueError as error:  # not UTF-8, not TOML, a number of thousands of digits
            raise UsageError(f"{path}: {one_line(str(error))}") from None

    def check_files(self) -> None:
        """Look whether every certificate and key can be read.

        Raises:
            UsageError: one cannot; the message names it and the key that names it.
        """
        for place, path in self._pem_files():
            if path is None:
                continue
            try:
                with path.open("rb") as file:
                    file.read(1)
            except OSError as error:
                raise UsageError(f"{place}: cannot read {path}: {error.strerror}", remedy="check the path, and that the daemon's user may read it") from None

    def _pem_files(self) -> Iterator[tuple[str, Path | None]]:
        for name in ("cacert", "cert", "key", "operator_cert", "operator_key"):
            yield f"etcd.{name}", getattr(self.etcd, name)
        for name in ("cert", "key", "clients_ca"):
            yield f"peer.{name}", getattr(self.peer, name)

    @property
    def keys(self) -> ClusterKeys:
        """The cluster's keys in etcd."""
        return ClusterKeys(self.cluster)

    @property
    def socket(self) -> Path:
        """Where the API is."""
        return self.api.socket or self.paths.run_dir / "api.sock"

    @property
    def kv(self) -> KVConfig:
        """How this node reaches etcd."""
        return self._kv(self.etcd.cert, self.etcd.key)

    @property
    def operator_kv(self) -> KVConfig:
        """How the API does, for what only operators may change."""
        if self.etcd.operator_cert is None:
            return self.kv
        return self._kv(self.etcd.operator_cert, self.etcd.operator_key)

    def _kv(self, cert: Path | None, key: Path | None) -> KVConfig:
        tls = TLSFiles(cacert=self.etcd.cacert, cert=cert, key=key) if self.etcd.cacert else None
        # A whole call gives up after twice the timeout of one attempt.
        return KVConfig(endpoints=self.etcd.endpoints, tls=tls, call_timeout=min(2.0, self.timing.retry_timeout / 2))
