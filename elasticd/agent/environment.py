"""What workers find in their environment: what torchrun would have put there, so that a torchrun script runs unchanged.

Owns: names and values. Must not: start anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elasticd.rendezvous.records import GenerationRecord

if TYPE_CHECKING:
    from elasticd.agent.identity import Identity

_OURS: Final = ("ELASTICD_", "ETCD")
_OF_A_SESSION: Final = ("XDG_", "SUDO_", "SSH_", "DBUS_SESSION_")


def inherited(environ: Mapping[str, str], identity: Identity | None = None) -> dict[str, str]:
    """What workers take over of the agent's environment `environ`: all but what configures elasticd and etcd's tools.

    As `identity` they also get none of what belongs to the agent's own login session, and their own HOME, USER, LOGNAME and SHELL.
    """
    dropped = _OURS if identity is None else _OURS + _OF_A_SESSION
    kept = {name: value for name, value in environ.items() if not name.startswith(dropped)}
    return kept if identity is None else {**kept, **identity.environment}


def torch_environment(
    base: Mapping[str, str],
    generation: GenerationRecord,
    *,
    job: str,
    node: str,
    node_rank: int,
    base_rank: int,
    local_rank: int,
    nproc: int,
    max_restarts: int,
    error_file: Path,
    devices: Sequence[str] = (),
    interface: str = "",
) -> dict[str, str]:
    """The variables for one worker, to be laid over `base` (`inherited`, and what the job file adds).

    `devices` are the GPUs that it may see: all of this node's, as LOCAL_RANK is their index in torchrun scripts; () leaves them as in `base`.

    `interface` bears this node's address: Gloo would else take the one that the host's name resolves to, on Debian a loopback address that no other
    node reaches.

    TORCHELASTIC_RESTART_COUNT counts the job's generations before this one: 0 at first, and alike on all nodes, as workers need that prefix the
    shared store by it.
    """
    rank, world = str(base_rank + local_rank), str(generation.world_size)
    extra = {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(node_rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_WORLD_SIZE": str(len(generation.members)),
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": generation.store.address,
        "MASTER_PORT": str(generation.store.port),
        "TORCHELASTIC_RESTART_COUNT": str(generation.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "ELASTICD_JOB": job,
        "ELASTICD_NODE": node,
        "ELASTICD_GENERATION": str(generation.number),
    }
    if devices:
        extra["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if interface and "GLOO_SOCKET_IFNAME" not in base:
        extra["GLOO_SOCKET_IFNAME"] = interface
    if nproc > 1 and "OMP_NUM_THREADS" not in base:
        extra["OMP_NUM_THREADS"] = "1"  # as torchrun: else every worker takes all cores
    return extra
