# ruff: noqa: E402, PTH123, SIM115 - written as users write it, and timed between its imports
"""The DDP script that every peer of bench.recovery runs, unchanged: a tiny model, a step of 20 ms, each step logged as a JSON line.

Environment: OUT, a directory; the lines go to OUT/worker-PID.jsonl. A line: what, at (seconds since the epoch), pid, ppid, rank, world. What, in
this order: "process" (the kernel's start time of this process, in steps of 10 ms), "imported" (torch), "group" (init_process_group is done), "ddp"
(the model is wrapped), and "step" for every step when it is done.
"""

import json
import os
import time

PID, STEP_SECONDS = os.getpid(), 0.02
log = open(f"{os.environ['OUT']}/worker-{PID}.jsonl", "a", buffering=1)


def tell(what: str, at: float) -> None:
    log.write(json.dumps({"what": what, "at": at, "pid": PID, "ppid": PPID, "rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"])}) + "\n")


PPID = os.getppid()
stat = open("/proc/self/stat").read().rpartition(")")[2].split()
age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) / os.sysconf("SC_CLK_TCK")
tell("process", time.time() - age)

import torch
import torch.distributed as dist
from torch import nn

tell("imported", time.time())
dist.init_process_group("gloo")
tell("group", time.time())
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
tell("ddp", time.time())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    time.sleep(STEP_SECONDS)  # what a real model would compute
    model(torch.randn(16, 64)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    tell("step", time.time())
