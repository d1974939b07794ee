"""The agent: one job on one node. It holds the node's place in the rendezvous and runs its workers.

Owns: starting, watching and stopping worker processes, and where their logs lie. Must not: decide who trains (`rendezvous`), or speak to etcd
other than through `kv`.
"""
