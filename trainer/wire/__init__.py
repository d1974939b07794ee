"""What a node's agent and its workers share: messages, the control page, the layout of a state in memory.

Owns: the forms, and nothing that acts on them. Must not: import torch, or anything of `elasticd`; the agent imports it too.
"""
