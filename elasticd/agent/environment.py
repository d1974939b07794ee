"""What workers find in their environment: what torchrun would have put there, so that a torchrun script runs unchanged.

Owns: names and values. Must not: start anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from elasticd.rendezvous.records import GenerationRecord


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
) -> dict[str, str]:
    """The variables for one worker, to be laid over `base` (the agent's environment).

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
    if nproc > 1 and "OMP_NUM_THREADS" not in base:
        extra["OMP_NUM_THREADS"] = "1"  # as torchrun: else every worker takes all cores
    return extra
