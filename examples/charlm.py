"""Train a small transformer on the source code of Python's standard library, written with `trainer`: every node may come, go or die meanwhile.

    python examples/charlm.py --out runs/charlm                                one process, which resumes where it was stopped
    torchrun --nproc-per-node 2 examples/charlm.py --out runs/charlm
    elasticctl run --nodes 2 -- examples/charlm.py --out runs/charlm           and kill what you like

The text is on any machine that has Python. One file in twenty is kept for the test: what the model has to beat there is a trigram model, the best
that one gets by counting which byte follows which two.

Writes under --out: result.json ({"loss", "trigram_loss", "steps", "world_size"}, losses in nats a byte).
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import Dataset

import trainer

if TYPE_CHECKING:
    from numpy.typing import NDArray

VOCABULARY = 128  # ASCII; what is not is left out


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a byte-level transformer on the standard library's sources.")
    parser.add_argument("--out", type=Path, default=Path("runs/charlm"), help="directory for the result")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=32, help="sequences a step, over all ranks together")
    parser.add_argument("--microbatch", type=int, default=8, help="sequences at once; a rank takes as many such parts as fall to it")
    parser.add_argument("--length", type=int, default=128, help="bytes a sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=4.0, help="of text")
    parser.add_argument("--report-every", type=int, default=50, help="steps between lines of progress")
    return parser.parse_args()


def read_text(megabytes: float) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the text to learn and the text to test on, as bytes below 128: every twentieth file is for the test."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if not {"site-packages", "dist-packages", "test", "tests"}.intersection(path.parts)]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    left = int(megabytes * 1e6)
    for number, path in enumerate(files):
        content = bytes(byte for byte in path.read_bytes() if byte < VOCABULARY)
        parts[number % 20 == 0].append(content)
        left -= len(content)
        if left < 0:
            break
    train, test = (np.frombuffer(b"".join(part), dtype=np.uint8) for part in parts)
    return train, test


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Every sequence of `length` bytes that begins at a multiple of it, and the byte that follows each of its bytes."""

    def __init__(self, text: NDArray[np.uint8], length: int) -> None:
        self._text, self._length = text, length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self._length
        piece = torch.from_numpy(self._text[start : start + self._length + 1].astype(np.int64))
        return piece[:-1], piece[1:]


def trigram_loss(train: NDArray[np.uint8], test: NDArray[np.uint8]) -> float:
    """Mean loss in nats a byte of the best counting model: trigrams, bigrams and single bytes mixed in the proportions that suit `test` best."""

    def pairs(text: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        wide = text.astype(np.int64)
        return wide[:-2] * VOCABULARY + wide[1:-1], wide[2:]

    before, after = pairs(train)
    triples = np.bincount(before * VOCABULARY + after, minlength=VOCABULARY**3).reshape(VOCABULARY, VOCABULARY, VOCABULARY).astype(np.float64)
    doubles, singles = triples.sum(axis=0), triples.sum(axis=(0, 1))
    context, target = pairs(test)
    first, second = np.divmod(context, VOCABULARY)
    one = (singles[target] + 1) / (singles.sum() + VOCABULARY)
    two = (doubles[second, target] + 1e-9) / (doubles[second].sum(axis=1) + 1e-9 * VOCABULARY)
    three = (triples[first, second, target] + 1e-9) / (triples[first, second].sum(axis=1) + 1e-9 * VOCABULARY)
    weights = [(a, b) for a in (0.6, 0.7, 0.8, 0.85, 0.9, 0.95) for b in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3) if a + b < 1]
    return min(float(-np.log(a * three + b * two + (1 - a - b) * one).mean()) for a, b in weights)


class Block(nn.Module):
    """One layer: causal attention over four heads, then a network of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.before_network = nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.05))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) in and out."""
        batch, length, width = x.shape
        parts = self.queries_keys_values(self.before_attention(x)).view(batch, length, 3, 4, width // 4)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.network(self.before_network(x))  # type: ignore[no-any-return]  # a module's call is untyped


class Transformer(nn.Module):
    """Bytes in, the logits of the byte that follows each out."""

    def __init__(self, *, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.last = nn.LayerNorm(width)
        self.logits = nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length) of bytes -> (batch, length, VOCABULARY)."""
        hidden = self.blocks(self.bytes(x) + self.places[: x.shape[1]])
        return self.logits(self.last(hidden))  # type: ignore[no-any-return]  # a module's call is untyped


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Mean loss of a batch, in nats a byte."""
    inputs, targets = (part.to(device) for part in batch)
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(run: trainer.Session, model: nn.Module, test: Windows) -> float:
    """Mean loss over the whole test text: every rank takes a part, none is counted twice."""
    model.eval()
    total = count = 0.0
    for start in range(run.rank * 16, len(test), run.world_size * 16):
        items = [test[index] for index in range(start, min(start + 16, len(test)))]
        batch = torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])
        total += float(loss_of(model, batch, run.device)) * len(items)
        count += len(items)
    total, count = run.total(total, count)
    return total / count


def main() -> None:
    """Train to the last step, whatever happens meanwhile, then test."""
    args = parse_args()
    run = trainer.join(seed=0)
    text, held_out = read_text(args.megabytes)
    torch.manual_seed(0)
    model = run.wrap(Transformer(length=args.length, width=args.width, layers=args.layers).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=args.steps, pct_start=0.1)
    loader = run.loader(Windows(text, args.length), batch_size=args.batch_size, microbatch=args.microbatch)
    if (resumed := run.register(model=model, optimizer=optimizer, scheduler=scheduler)) and run.is_main:
        print(f"goes on from step {resumed}", flush=True)

    for step in run.accumulate(loader, max_steps=args.steps):
        optimizer.zero_grad()
        for part in step:
            loss = loss_of(model, part.batch, run.device)
            run.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if run.is_main and (run.step + 1) % args.report_every == 0:
            print(f"step {run.step + 1} loss {loss.item():.3f}", flush=True)

    tested = held_out_loss(run, model.module, Windows(held_out, args.length))
    if run.is_main:
        trigram = trigram_loss(text, held_out)
        result = {"loss": round(tested, 4), "trigram_loss": round(trigram, 4), "steps": run.step, "world_size": run.world_size}
        print(f"held-out loss {tested:.4f} nats a byte, a trigram model's is {trigram:.4f}", flush=True)
        args.out.mkdir(parents=True, exist_ok=True)
        partial = args.out / "result.json.partial"
        partial.write_text(json.dumps(result) + "\n")
        partial.replace(args.out / "result.json")


if __name__ == "__main__":
    main()
