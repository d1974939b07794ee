"""What a training script imports to lose nothing when the world around it changes.

Owns: the script's side of elastic training (session, data order, state, the channel to the agent). Must not: import anything of `elasticd`,
so that it works under plain torchrun too.
"""
