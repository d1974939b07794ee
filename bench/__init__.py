"""Measurements of elasticd beside its peers, each run as `python -m bench.NAME [--quick] [--json FILE]`."""
