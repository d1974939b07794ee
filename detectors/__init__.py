"""Evidence from logs and metrics in, verdicts with their reasons out.

Owns: the detectors and the pipeline that merges them. Must not: import anything of `elasticd` or `trainer`, act on a verdict, or read a clock;
what is seen and when is handed in.
"""
