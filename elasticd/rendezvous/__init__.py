"""Who trains, in which generation and in which order.

Owns: the records in etcd (`records`), what they mean together (`view`), what to do about it (`membership`, pure), how it is written
(`transitions`, pure), and the thread that does it for one agent (`member`). `handler` puts torch's RendezvousHandler around that.
Must not: start or stop workers; that is the agent's. Importing this package imports neither torch nor etcd3.
"""
