"""The daemon: one on each node, all the time.

Owns: which agents run on this node, the node's key in etcd, the node API. Must not: import torch or scikit-learn, or decide who trains (that is
`elasticd.rendezvous`).
"""
