"""Data that is read exactly once an epoch, whatever happens to the world that reads it.

Owns: the loader that a training script iterates. Must not: know why a world changes, or talk to anybody.

`loader` and `steps` have what users see; `fetch` reads map-style datasets, `stream` iterable ones, `evaluation` deals a test set, `fingerprint` tells
datasets apart, `workers` are the processes that read ahead. What is read when is arithmetic and lies in `trainer.order`.
"""

from trainer.data.evaluation import Evaluation
from trainer.data.fingerprint import fingerprint
from trainer.data.loader import ElasticLoader
from trainer.data.steps import Microbatch, Step

__all__ = ["ElasticLoader", "Evaluation", "Microbatch", "Step", "fingerprint"]
