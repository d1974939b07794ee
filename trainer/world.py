"""This process among the others: ranks, device, process group, and the few small collectives that a session needs.

Owns: starting and ending the process group, and seeing beforehand that its settings make sense. Must not: know agents, states or data. Nothing is
pickled: what ranks tell each other are bytes and numbers.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import SetupError
from trainer.settings import Settings

_CHUNK: Final = 16 * 1024 * 1024
"""Bytes of one broadcast of a large state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where torchrun, or an agent, put this process.

    Attributes:
        rank, world_size: among all.
        local_rank, local_world_size: on this node.
        alone: nobody put it anywhere; it is the only one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    alone: bool = True

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self:
        """From torchrun's variables.

        Raises:
            SetupError: some of them are missing, or no numbers that fit each other.
        """
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in environ]
        if len(missing) == len(names):
            return cls()
        if missing:
            raise SetupError(f"{', '.join(missing)} is not set, though other variables of torchrun are", remedy="start the script with torchrun or elasticctl")
        try:
            rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
            local_rank, local_world = int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", "1"))
        except ValueError as error:
            raise SetupError(f"a variable of torchrun is no number: {error}") from None
        if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
            raise SetupError(f"RANK {rank} of WORLD_SIZE {world}, LOCAL_RANK {local_rank} of LOCAL_WORLD_SIZE {local_world} cannot be")
        return cls(rank=rank, world_size=world, local_rank=local_rank, local_world_size=local_world, alone=False)


def choose_device(wanted: torch.device | str | None, place: Place) -> torch.device:
    """The device to train on: what was asked for, else this local rank's GPU, else the CPU.

    Raises:
        SetupError: there is no such device.
    """
    device = torch.device(wanted) if wanted is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda":
        return device
    index = place.local_rank if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise SetupError(
            f"local rank {place.local_rank} wants GPU {index}, and this process sees {torch.cuda.device_count()}",
            remedy="start as many processes a node as it has GPUs, or pass device='cpu' to trainer.join",
        )
    return torch.device("cuda", index)


def choose_backend(settings: Settings, device: torch.device) -> str:
    """What gradients travel by.

    Raises:
        SetupError: it cannot carry what lies on that device.
    """
    backend = settings.backend.value
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise SetupError(
            f"the setting backend is nccl, which carries what lies on GPUs alone, and this process trains on {device}", remedy="set backend to auto"
        )
    return backend


def complaint(settings: Settings, environ: Mapping[str, str], backend: str) -> str:
    """What about the environment would let a lost peer hang everybody, or "" if nothing."""
    if backend != "nccl":
        return ""
    handling = environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if handling == "0":
        return "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: a lost peer would never be noticed; unset it"
    heartbeat = environ.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "")
    if heartbeat.isdigit() and int(heartbeat) < settings.process_group_timeout_s < 60:
        return f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={heartbeat} is below process_group_timeout_s {settings.process_group_timeout_s:g}: set it above"
    if environ.get("NCCL_COMM_BLOCKING") == "1" and environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING") == "1":
        return "NCCL_COMM_BLOCKING=1 and TORCH_NCCL_USE_COMM_NONBLOCKING=1 contradict each other; unset one"
    return ""


def prepare_environment(settings: Settings, environ: MutableMapping[str, str]) -> None:
    """Set what torch reads from the environment when it begins to communicate or allocate, where nobody has set it already."""
    if settings.gloo_interface:
        environ.setdefault("GLOO_SOCKET_IFNAME", settings.gloo_interface)
    if settings.nccl_interface:
        environ.setdefault("NCCL_SOCKET_IFNAME", settings.nccl_interface)
    if settings.expandable_segments and "PYTORCH_ALLOC_CONF" not in environ:
        environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


class World:
    """All processes that train together.

    Args:
        place: where this one is.
        device: that it trains on.
        owned: we made the process group.
    """

    def __init__(self, place: Place, device: torch.device, *, owned: bool) -> None:
        self.place: Final = place
        self.device: Final = device
        self.rank: Final = place.rank
        self.size: Final = place.world_size
        # Gloo carries host memory too, and without a device there is none to wait for.
        self._carrier: Final = device if dist.get_backend() == "nccl" else torch.device("cpu")
        self._owned = owned

    @classmethod
    def connect(cls, place: Place, device: torch.device, settings: Settings, environ: Mapping[str, str] = os.environ) -> Self:
        """Make the process group, or take the one that the script has made.

        Raises:
            SetupError: the settings make no sense here.
        """
        backend = choose_backend(settings, device)
        if problem := complaint(settings, environ, backend):
            raise SetupError(problem)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if dist.is_initialized():
            same = Place(
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                local_rank=place.local_rank,
                local_world_size=place.local_world_size,
                alone=place.alone,
            )
            return cls(same, device, owned=False)
        timeout = dt.timedelta(seconds=settings.process_group_timeout_s)
        if place.alone:
            store = dist.HashStore()  # type: ignore[attr-defined]  # it is public, the stub lacks it
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
        return cls(place, device, owned=True)

    def close(self) -> None:
        """End the process group, if it is ours and still there."""
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()
        self._owned = False

    def gather(self, data: bytes) -> list[bytes]:
        """What each rank gave, by rank. Collective."""
        if self.size == 1:
            return [data]
        lengths = self._all(torch.tensor([len(data)], dtype=torch.int64))
        longest = max(int(length) for length in lengths)
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8) if longest else torch.empty(0, dtype=torch.uint8)
        return [bytes(one[: int(length)].cpu().numpy()) for one, length in zip(self._all(padded), lengths, strict=True)]

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over all ranks. Collective."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int32, device=self._carrier)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [int(value) for value in tensor.tolist()]

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all ranks, in float64. Collective."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._carrier)
        if self.size > 1:
            dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def spread(self, image: Tensor, *, source: int) -> None:
        """Give all ranks what `source` has: bytes in host memory, 1-d uint8, of the same length everywhere. Collective."""
        if self.size == 1:
            return
        for begin in range(0, image.numel(), _CHUNK):
            part = image[begin : begin + _CHUNK]
            carried = part.to(self._carrier)
            dist.broadcast(carried, source)
            if self.rank != source and carried.data_ptr() != part.data_ptr():
                part.copy_(carried)

    def alike(self, tensors: Sequence[Tensor]) -> None:
        """Give all ranks what rank 0 has in these tensors, in place: one broadcast for each dtype. Collective."""
        if self.size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        with torch.no_grad():
            for some in by_dtype.values():
                flat = torch.cat([tensor.reshape(-1) for tensor in some])
                carried = flat.to(self._carrier)
                dist.broadcast(carried, 0)
                if self.rank:
                    for tensor, part in zip(some, carried.to(flat.device).split([tensor.numel() for tensor in some]), strict=True):
                        tensor.copy_(part.view(tensor.shape))

    def _all(self, tensor: Tensor) -> list[Tensor]:
        mine = tensor.to(self._carrier)
        others = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(others, mine)
        return others
