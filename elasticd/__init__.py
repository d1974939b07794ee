"""elasticd keeps PyTorch DDP jobs training while nodes come, go, slow down and fail.

The package is cut by what it decides: `kv` (etcd behind a narrow surface), `rendezvous` (who trains, in which order),
`agent` (one job on one node), `cli` (what people type). ARCHITECTURE.md draws the map.
"""

__version__ = "0.1.0"
