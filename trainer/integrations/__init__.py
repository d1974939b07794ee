"""Other people's training loops, with the same guarantees: `lightning` for Lightning's Trainer, `huggingface` for that of transformers.

Owns: where each of these loops meets a session. Must not: import either library, or each other; whoever uses one imports its module here.
"""
