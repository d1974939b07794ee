# ruff: noqa: PTH110, PTH105, PTH123, SIM115 - written as users write it
"""A plain DDP script as torchrun users write it, for tests: logs every step as a JSON line, saves every 10 steps, resumes.

Environment: OUT (directory), STEPS (default: for ever), STEP_SECONDS (default 0.02).
"""

import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn

out = os.environ["OUT"]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
log = open(f"{out}/steps-{os.getpid()}.jsonl", "a", buffering=1)
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpoint, step = f"{out}/checkpoint.pt", 0
if os.path.exists(checkpoint):
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    step = saved["step"]
while step < int(os.environ.get("STEPS", "1000000")):
    model(torch.randn(16, 64)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    time.sleep(float(os.environ.get("STEP_SECONDS", "0.02")))
    record = {
        "at": time.time(),
        "step": step,
        "rank": rank,
        "world": world,
        "pid": os.getpid(),
        "node": os.environ.get("ELASTICD_NODE", ""),
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    }
    log.write(json.dumps(record) + "\n")
    if rank == 0 and step % 10 == 0:
        torch.save({"model": model.state_dict(), "step": step}, f"{checkpoint}.tmp")
        os.replace(f"{checkpoint}.tmp", checkpoint)
dist.destroy_process_group()
