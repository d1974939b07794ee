"""A hash of a state's content, to see whether replicas hold the same bits.

Owns: the hash. Must not: be used where somebody might want to deceive: it is fast, not cryptographic.

Order counts: a permuted tensor hashes otherwise (torch.hash_tensor is an XOR, so that range(10) and its reverse agree). Tensors on a device are
hashed there, and 8 bytes each come back; they are hashed otherwise than on the CPU, so only replicas on the same kind of device can be compared.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch
import xxhash

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK: Final = 1 << 24
"""Words hashed at a time on a device: 128 MiB, and twice that for what is computed on the way."""
# Odd 64-bit constants as signed numbers: those of splitmix64 (Steele, Lea, Flood 2014).
_GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2: Final = 0x94D049BB133111EB - (1 << 64)


def state_hash(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, dtypes, shapes and values, 32 hexadecimal digits; the same for the same tensors in another order of the mapping.

    Values count bit by bit: 0.0 and -0.0 differ, a NaN equals itself.
    """
    total = xxhash.xxh3_128()
    on_device: list[Tensor] = []
    with torch.no_grad():
        for name in sorted(tensors):
            tensor = tensors[name].detach().resolve_conj().resolve_neg().contiguous()
            total.update(f"{name}\0{tensor.dtype}{list(tensor.shape)}{tensor.device.type}\0".encode())
            if tensor.device.type == "cpu":
                _update(total, tensor)
            else:
                on_device.append(words_hash(tensor))
        for device in dict.fromkeys(one.device for one in on_device):
            total.update(repr(torch.stack([one for one in on_device if one.device == device]).tolist()).encode())
    return total.hexdigest()


def _update(total: xxhash.xxh3_128, tensor: Tensor) -> None:
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes:
        total.update(memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())))


def words_hash(tensor: Tensor) -> Tensor:
    """Hash a contiguous tensor where it is: a 0-d int64 on its device, the same whatever the order of summation.

    The sum, over all words of 8 bytes, of a mix of the word and its place.
    """
    data = tensor.reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    if data.numel() > whole:
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[: data.numel() - whole] = data[whole:]
        total += _mix(tail.view(torch.int64), whole // 8)
    if data[:whole].storage_offset() % 8:
        data = data.clone()
    words = data[:whole].view(torch.int64)
    for begin in range(0, words.numel(), _CHUNK):
        total += _mix(words[begin : begin + _CHUNK], begin)
    return total


def _mix(words: Tensor, begin: int) -> Tensor:
    mixed = torch.arange(begin + 1, begin + 1 + words.numel(), dtype=torch.int64, device=words.device).mul_(_GOLDEN).bitwise_xor_(words)
    for factor in (_MIX_1, _MIX_2):
        mixed.bitwise_xor_(mixed >> 29).mul_(factor)
    return mixed.bitwise_xor_(mixed >> 32).sum()
