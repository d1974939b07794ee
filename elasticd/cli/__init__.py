"""elasticctl: what people type.

Owns: the verbs, their options, and what they print. Must not: decide anything about a job (`rendezvous` does) or run workers (agents do).

- What can be typed: `main` and the `commands_*` beside it; `grammar` says what is wrong with a line that cannot be parsed.
- What it does: `jobs`, `nodes` and `watching` ask the daemon's node API through `asking`; `waiting` follows what comes of a change and `talk` says so.
  `status` and `store` read etcd itself; `run` and its kin run a job on this machine.
- How it looks: `render` (jobs), `render_cluster` (nodes, events), `screen` (a run), `failures` (errors). `rendezvous.status` says what a view means,
  `progress` keeps what a run has shown so far.

Nothing slow is imported before a verb needs it: `elasticctl --help` takes little more than `import typer`.
"""
