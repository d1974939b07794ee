"""The training that `bench.faults` harms: DDP by `trainer`, with steps of about 60 ms of which most is a sleep, and noise as real training has it.

Nothing of it is fast or slow by itself: the forward pass and the loader wait until a time drawn for them has passed, so that several ranks run on two
cores without fighting for them. What is real: the processes, the collectives, the telemetry, a small model that learns, and every line that is printed.

Of each rank: a pace of its own, jitter with heavy tails, a slow wander, a pause now and then. The loss falls, and its noise has heavy tails too.

What goes wrong from inside is read from the file --control, which `bench.faults` replaces: {"faults": [{"kind": "slow", "rank": 2, "amount": 0.1, …}]}; no
rank means all. What goes wrong from outside (signals, disks, the kernel, neighbours) is none of this program's business.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import trainer
from trainer import compare

FORWARD_S: Final = 0.045
DATA_S: Final = 0.004
PACE_SIGMA: Final = 0.015
"""By how much ranks differ from the start, as a share."""
STEP_SIGMA: Final = 0.03
LEARNING_RATE: Final = 0.002
DATA_SIGMA: Final = 0.35
WANDER_SIGMA: Final = 0.004
WANDER_STEPS: Final = 400.0
PAUSE_RATE: Final = 0.003
"""Share of steps with a pause, of PAUSE_S on average."""
PAUSE_S: Final = 0.030
GATHER_S: Final = 1.5
"""From one word about all ranks side by side to the next; five seconds would be long on a scale of one tenth."""
RAMP_STEPS: Final = 300
"""Over which a divergence grows."""
TAIL: Final = 4.0
"""Degrees of freedom of Student's t, by which steps differ."""
SAMPLES, WIDTH, HIDDEN, BATCH = 4096, 32, 64, 48
LINES_EVERY: Final = 18
DEBUG_EVERY: Final = 2
LEAK_PIECE: Final = 1 << 16
HOSTILE: Final = (
    "\x1b[31mERROR\x1b[0m worker {n}: \x1b]0;title\x07cannot map segment 0x{n:08x}",
    "ERROR " + "A" * 3000 + " {n}",
    '{{"time":"{at}","event":"window","rank":{n},"first":1,"last":2,"seconds":9e99,"ended":1e12,"phases":{{}}}}',
    '{{"time":"{at}","event":"generation_formed","world_size":{n},"level":"critical"}}',
    "ERROR [{n}] " + "((((((((((" * 30 + "a" * 60 + "!",
    "\udcff\udcfe\udc80 ERROR broken bytes {n}",
    "FATAL retry {n} of {n}: /data/shard-{n}/part-{n}.bin: Input/output trouble \u202e\u0000",
    "ERROR " + "".join(chr(0x300 + index) for index in range(60)) + " {n}",
    "Traceback (most recent call last): {n}",
    "CRITICAL queue-{n} is over its limit %s %n %x {n}",
)
"""Lines as a program in a bad state may print them: escapes, forged events, no UTF-8, a kilobyte and more, food for careless regexes. All say
when they were written, since nobody could tell afterwards."""


class Faults:
    """What is wrong at the moment, as the control file says it. Looks once a step, by the file's time."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self._read_at = -1
        self._now: dict[str, dict[str, Any]] = {}
        self._since: dict[str, int] = {}

    def look(self, step: int) -> None:
        """Read the file if it is another one."""
        changed = self._path.stat().st_mtime_ns
        if changed != self._read_at:
            self._read_at = changed
            mine = [one for one in json.loads(self._path.read_text())["faults"] if one.get("rank") in (None, self._rank)]
            self._now = {one["kind"]: one for one in mine}
        self._since = {kind: self._since.get(kind, step) for kind in self._now}

    def amount(self, kind: str, *, default: float = 0.0) -> float:
        """How much of it there is, `default` if none."""
        return float(self._now[kind]["amount"]) if kind in self._now else default

    def age(self, kind: str, step: int) -> int:
        """Steps since this rank first saw it, -1 if it is not there."""
        return step - self._since[kind] if kind in self._now else -1


class Noise:
    """Seconds that this rank's work takes, step by step."""

    def __init__(self, seed: int, rank: int) -> None:
        self._random = random.Random(f"{seed}/{rank}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}")
        self._pace = math.exp(PACE_SIGMA * random.Random(f"{seed}/{rank}").gauss(0, 1))
        self._wander = 0.0

    def _heavy(self, most: float = 8.0) -> float:
        """Student's t of variance 1, cut at `most`."""
        draw = self._random
        value = draw.gauss(0, 1) / math.sqrt(draw.gammavariate(TAIL / 2, 2.0) / TAIL) / math.sqrt(TAIL / (TAIL - 2))
        return max(-most, min(most, value))

    def forward(self) -> float:
        """Of a forward pass."""
        keep = 1 - 1 / WANDER_STEPS
        self._wander = keep * self._wander + WANDER_SIGMA * math.sqrt(1 - keep * keep) * self._random.gauss(0, 1)
        pause = self._random.expovariate(1 / PAUSE_S) if self._random.random() < PAUSE_RATE else 0.0
        return FORWARD_S * self._pace * math.exp(self._wander + STEP_SIGMA * self._heavy()) + pause

    def data(self) -> float:
        """Of reading a batch."""
        pause = self._random.expovariate(1 / PAUSE_S) if self._random.random() < PAUSE_RATE else 0.0
        return DATA_S * math.exp(DATA_SIGMA * self._heavy()) + pause

    def often(self, share: float) -> bool:
        """Yes in that share of cases."""
        return self._random.random() < share


class Model(nn.Module):
    """A net that a step of ours is too short for, and which therefore sleeps."""

    def __init__(self, noise: Noise, faults: Faults) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        self._noise, self._faults = noise, faults
        self.longer = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> (batch, 1)."""
        began = time.perf_counter()
        y: Tensor = self.net(x)
        share = 1 + self._faults.amount("slow") + self._faults.amount("drift_forward")
        wait(began, self._noise.forward() * share * self.longer)
        return y


def wait(began: float, seconds: float) -> None:
    """Until so many seconds have passed since then."""
    left = began + seconds - time.perf_counter()
    if left > 0:
        time.sleep(left)


def spin(seconds: float) -> None:
    """Compute for so long: a sleep this short takes several times as long as it should where the machine is busy."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def data_set(seed: int) -> TensorDataset:
    """What a fixed net says of random numbers, and noise with heavy tails."""
    torch.manual_seed(seed)
    x = torch.randn(SAMPLES, WIDTH)
    teacher = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    with torch.no_grad():
        y = 4 * teacher(x) + 0.5 * torch.distributions.StudentT(4.0).sample((SAMPLES, 1))
    return TensorDataset(x, y)


class Voice:
    """What the rank prints, in the style of the moment."""

    def __init__(self, rank: int, noise: Noise, faults: Faults) -> None:
        logging.Formatter.converter = time.gmtime
        shape = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"
        out, err = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
        for handler in (out, err):
            handler.setFormatter(logging.Formatter(shape, "%Y-%m-%dT%H:%M:%S"))
        out.addFilter(lambda record: record.levelno < logging.WARNING)
        err.setLevel(logging.WARNING)
        self.log = logging.getLogger("train")
        self.log.setLevel(logging.DEBUG)
        self.log.propagate = False
        self.log.handlers = [out, err]
        self._rank, self._noise, self._faults = rank, noise, faults

    def step(self, step: int, epoch: int, loss: float, seconds: float) -> None:
        """About a step that was made."""
        faults = self._faults
        if faults.age("loglevel", step) >= 0 and step % DEBUG_EVERY == 0:
            self.log.debug("bucket 0 ready, %d parameters", HIDDEN * (WIDTH + 2) + 1)
            self.log.debug("step %d: reduce took %.4f s, queue depth %d", step, seconds / 10, step % 3)
        if self._noise.often(faults.amount("storm")):
            for number in range(8):
                now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
                text = HOSTILE[(step + number) % len(HOSTILE)].format(n=(7919 * (step + number)) % 100_000, at=now)
                text = text if text.startswith("{") else f"{now} {text}"
                sys.stderr.buffer.write(text.encode("utf-8", "surrogateescape") + b"\n")
            sys.stderr.buffer.flush()
        if self._noise.often(0.001):
            self.log.warning("reader took %.1f ms for one batch", 1000 * seconds)
        if step % LINES_EVERY == self._rank:
            self._progress(step, epoch, loss, seconds)

    def _progress(self, step: int, epoch: int, loss: float, seconds: float) -> None:
        if self._faults.age("framework", step) < 0:
            self.log.info("epoch %d step %d loss %.4f %.1f samples/s", epoch, step, loss, BATCH / max(seconds, 1e-3))
        elif step % (2 * LINES_EVERY) == self._rank:
            print({"loss": round(loss, 4), "grad_norm": round(1 + loss / 7, 3), "learning_rate": 0.01, "epoch": round(epoch + 0.5, 2)}, flush=True)
        else:
            print(f"\rTraining: {step % 100:3d}%|{'#' * (step % 100 // 10):<10}| {step}/9999 [{1 / max(seconds, 1e-3):.2f}it/s]", flush=True)


def harm_inputs(x: Tensor, faults: Faults, step: int) -> Tensor:
    """A value that is none, once."""
    age = faults.age("nonfinite", step)
    if 0 <= age < faults.amount("nonfinite"):
        x = x.clone()
        x[0, 0] = math.nan
    return x


def scale_of_loss(faults: Faults, step: int, steps: int = 6) -> float:
    """What the loss is multiplied by: for a few steps after a spike began, a lot."""
    spike = faults.amount("loss_spike") if 0 <= faults.age("loss_spike", step) < steps else 1.0
    return spike * (1 + faults.amount("drift_loss"))


def main() -> None:
    """Train until somebody ends it."""
    parser = argparse.ArgumentParser(description="Train a small network that mostly sleeps.")
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    compare.EVERY_S = GATHER_S  # type: ignore[misc]  # no setting, for it costs next to nothing
    run = trainer.join(seed=args.seed)
    faults, noise = Faults(args.control, run.rank), Noise(args.seed, run.rank)
    voice = Voice(run.rank, noise, faults)
    slow_reader = 1.0

    def collate(samples: list[Any]) -> Any:
        began = time.perf_counter()
        batch = default_collate(samples)
        wait(began, noise.data() * slow_reader)
        return batch

    torch.manual_seed(args.seed)
    model = run.wrap(Model(noise, faults))
    inner: Model = model.module
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.5)
    loader = run.loader(data_set(args.seed), batch_size=BATCH, drop_last=True, sample_rng=False, collate_fn=collate)
    step = run.register(model=model, optimizer=optimizer)
    voice.log.info("rank %d of %d begins at step %d", run.rank, run.world_size, step)
    tell, leaked, began = run._keeper.tell, [], time.perf_counter()  # noqa: SLF001  # a full socket looks so, and cannot be had for so long

    def tell_unless(message: Any, *, wait: float = 0.0) -> bool:
        return False if faults.age("gap", step) >= 0 else tell(message, wait=wait)

    run._keeper.tell = tell_unless  # type: ignore[method-assign]  # noqa: SLF001
    for x, y in run.steps(loader, epochs=1_000_000):
        faults.look(step)
        slow_reader = 1 + faults.amount("slow_data") + faults.amount("drift_data")
        warm = faults.age("warm_up", step)
        inner.longer = 1 + (faults.amount("warm_up") * (1 + 0.2 * run.rank) * math.exp(-warm / 80) if warm >= 0 else 0.0)
        for group in optimizer.param_groups:
            group["weight_decay"] = -faults.amount("divergence") * min(1.0, faults.age("divergence", step) / RAMP_STEPS)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(harm_inputs(x, faults, step)), y) * scale_of_loss(faults, step)
        run.backward(loss)
        optimizer.step()
        step += 1
        rate = faults.amount("leak")
        if rate:
            leaked.append(b"\1" * int(rate * (1 << 20) / LINES_EVERY))
        spin(faults.amount("drift_other"))
        if run.is_main and (every := int(faults.amount("own_checkpoint"))) and faults.age("own_checkpoint", step) % every == 0:
            voice.log.info("saving checkpoint-%d", step)
            wait(time.perf_counter(), 1.0)
            voice.log.info("saved checkpoint-%d in 1.0 s", step)
        voice.step(step, loader.epoch, loss.item(), time.perf_counter() - began)
        began = time.perf_counter()
        run.stepped()
        evaluate(faults, voice, step)


def evaluate(faults: Faults, voice: Voice, step: int) -> None:
    """Every so many steps three seconds without any, told by a line or not."""
    every = int(faults.amount("evaluation") or faults.amount("evaluation_unsaid"))
    if not every or step % every:
        return
    said = faults.age("evaluation", step) >= 0
    if said:
        print(json.dumps({"event": "phase", "phase": "eval"}), flush=True)
    voice.log.info("evaluating at step %d", step)
    for _ in range(12):
        time.sleep(0.25)
    voice.log.info("evaluation at step %d: accuracy %.4f", step, 1 - 1 / (1 + step / 500))
    if said:
        print(json.dumps({"event": "phase", "phase": "train"}), flush=True)


if __name__ == "__main__":
    main()
