# ruff: noqa: PTH123, SIM115 - written as users write it; it is copied to hosts and run there
"""A job for hosts: every step is one all-reduce over gloo, logged as a JSON line in a file of the process. Argument: the directory."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
log = open(f"{sys.argv[1]}/{os.getpid()}.jsonl", "a", buffering=1)
step = 0
while True:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    step += 1
    record = {
        "at": time.time(),
        "step": step,
        "sum": ones.item(),
        "rank": rank,
        "world": world,
        "pid": os.getpid(),
        "uid": os.getuid(),
        "node": os.environ["ELASTICD_NODE"],
        "generation": int(os.environ["ELASTICD_GENERATION"]),
    }
    log.write(json.dumps(record) + "\n")
    time.sleep(0.05)
