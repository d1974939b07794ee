"""What an agent of this node is told: a job file, the wanted parameters and the node's slots as one agent's configuration.

Owns: that translation, pure. Must not: write the file or start anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from elasticd.agent.config import AgentConfig
from elasticd.agent.settings import OwnLayers, merged, resolve
from elasticd.daemon.config import Supervision
from elasticd.daemon.jobs import check_parameters, command, digest
from elasticd.daemon.slots import Slot
from elasticd.errors import UsageError
from elasticd.rendezvous.nodelock import default_state_dir
from elasticd.rendezvous.records import TargetRecord

if TYPE_CHECKING:
    from elasticd.daemon.config import DaemonConfig
    from elasticd.daemon.jobs import JobSpec

LEAVE_SLACK = 10.0
"""Seconds beyond the workers' grace that the others have to go on without a leaver."""


def agent_config(  # what goes into it comes from five places
    config: DaemonConfig,
    spec: JobSpec,
    target: TargetRecord,
    slots: Sequence[Slot],
    *,
    node: str,
    address: str,
    result_file: Path,
    report_file: Path | None = None,
    own: OwnLayers | None = None,
) -> AgentConfig:
    """The configuration of one agent.

    Args:
        slots: what it was granted, one worker each.
        node: this node's name.
        address: where peers reach this node.
        result_file: where it leaves its last word.
        report_file: where it says how the job goes; None: nowhere.
        own: settings of training that this daemon adds to those of the job file.

    Raises:
        UsageError: the parameters do not fit the job file, or the values do not fit each other; the message names them.
    """
    parameters = check_parameters(spec, target.parameters)
    stop_grace = _either(spec.stop_grace, config.agent.stop_grace)
    own = own or OwnLayers()
    try:
        told = AgentConfig(
            cluster=config.cluster,
            job=spec.name,
            node=node,
            address=address,
            nproc=len(slots),
            argv=command(spec, parameters),
            cwd=spec.cwd,
            log_dir=config.paths.log_dir,
            endpoints=config.etcd.endpoints,
            cacert=config.etcd.cacert,
            cert=config.etcd.cert,
            key=config.etcd.key,
            min_nodes=target.min_nodes,
            max_nodes=target.max_nodes,
            desired=target.desired,
            max_restarts=target.max_restarts,
            ttl=_either(spec.ttl, config.agent.ttl),
            settle=_either(spec.settle, config.agent.settle),
            stop_grace=stop_grace,
            leave_timeout=stop_grace + LEAVE_SLACK,
            frozen_max=_either(spec.frozen_max, config.agent.frozen_max),
            state_dir=agents_state_dir(config),
            checkpoints=_checkpoints_dir(config),
            user=spec.user,
            env=spec.env,
            devices=tuple(slot.gpu_uuid for slot in slots if slot.gpu_uuid),
            cpus=tuple(slot.cpus for slot in slots) if all(slot.cpus for slot in slots) else (),
            trainer_file=dict(spec.trainer),
            trainer_command=dict(own.command),
            result_file=result_file,
            report_file=report_file,
            logs=config.logs,
            policy=dict(config.policy),
        )
        resolve(told, None, None, own.environ)  # what etcd adds is the agent's to judge, in each generation
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"job {spec.name}: {place + ': ' if place else ''}{first['msg'].removeprefix('Value error, ')}") from None
    except UsageError as error:
        raise UsageError(f"job {spec.name}: {error.message}", remedy=error.remedy) from None
    return told


def agents_state_dir(config: DaemonConfig) -> Path:
    """Where agents have what outlives them. Runs of one user share it, and the lock in it, so that two of them are not the same node of the same job."""
    return default_state_dir() if config.agents is Supervision.CHILDREN else config.paths.run_dir


def checkpoints_of(config: DaemonConfig, spec: JobSpec, own: OwnLayers) -> Path:
    """The directory below which this node writes the checkpoints of a job. No layer of etcd may name one, so the node's own layers say it all."""
    try:
        settings, _ = merged(OwnLayers(file=spec.trainer, environ=own.environ, command=own.command), None, None)
        named = settings.checkpoint_dir
    except UsageError:  # a variable of the environment that names nothing; no agent is started then
        named = None
    return named or _checkpoints_dir(config)


def _checkpoints_dir(config: DaemonConfig) -> Path:
    """Of all jobs. Not where the lock is, which is meant to go with a boot: checkpoints are not, and /run is memory."""
    return (default_state_dir() if config.agents is Supervision.CHILDREN else config.paths.state_dir) / "checkpoints"


def check_fit(config: DaemonConfig, spec: JobSpec, own: OwnLayers | None = None) -> None:
    """See whether an agent could be told this, for one slot and default sizes.

    Args:
        config: the daemon's.
        spec: the job.
        own: as in `agent_config`.

    Raises:
        UsageError: values do not fit each other; the message names them.
    """
    target = TargetRecord(scope=config.keys.scope, min_nodes=spec.min_nodes, max_nodes=spec.max_nodes, desired=spec.nodes or spec.max_nodes)
    node, address = config.node or "node", config.address or "host"
    agent_config(config, spec, target, [Slot(id="slot-0")], node=node, address=address, result_file=Path("/result"), own=own)


def digest_of(spec: JobSpec, target: TargetRecord | None) -> str:
    """Tells two agents apart that would be told different things; "" where the parameters do not fit."""
    try:
        return digest(spec, check_parameters(spec, target.parameters if target else {}))
    except UsageError:
        return ""


def leave_budget(config: DaemonConfig, specs: Mapping[str, JobSpec]) -> float:
    """Seconds that all agents together may take to leave in order: they do so at the same time."""
    graces = [_either(spec.stop_grace, config.agent.stop_grace) for spec in specs.values()] or [config.agent.stop_grace]
    return 2 * max(graces) + LEAVE_SLACK + 5.0


def _either(own: float | None, common: float) -> float:
    return common if own is None else own
