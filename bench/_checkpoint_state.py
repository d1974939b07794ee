"""The states that bench.checkpoint keeps: fp32 parameters of a transformer and what Adam holds for each.

Owns: names and shapes. Must not: import torch.
"""

from __future__ import annotations

from typing import Final

SIZES: Final = {"300mb": (512, 6, 12_000), "1200mb": (768, 12, 19_500)}
"""Width, layers, vocabulary: 25 and 100 million parameters."""


def parameters(size: str) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter."""
    width, layers, words = SIZES[size]
    found: dict[str, tuple[int, ...]] = {"embedding": (words, width), "norm.weight": (width,), "norm.bias": (width,)}
    for layer in range(layers):
        for name, rows, columns in (("qkv", 3 * width, width), ("out", width, width), ("up", 4 * width, width), ("down", width, 4 * width)):
            found[f"layer.{layer}.{name}.weight"] = (rows, columns)
            found[f"layer.{layer}.{name}.bias"] = (rows,)
        for name in ("norm1", "norm2"):
            found[f"layer.{layer}.{name}.weight"] = found[f"layer.{layer}.{name}.bias"] = (width,)
    return found


def shapes(size: str) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the state: parameters, and Adam's two moments and step of each."""
    model = parameters(size)
    state = {f"adam.{name}.{what}": shape for name, shape in model.items() for what in ("exp_avg", "exp_avg_sq")}
    return {**model, **state, **{f"adam.{name}.step": () for name in model}}
