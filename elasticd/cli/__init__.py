"""elasticctl: what people type.

Owns: the verbs, their options, and what they print. Must not: decide anything about a job (`rendezvous` does) or run workers (agents do).

Logic and looks are apart: `job` says what a view means, `render` how it is shown; `progress` keeps what a run has shown so far, `screen` draws it.
Nothing slow is imported before a verb needs it: `elasticctl --help` takes little more than `import typer`.
"""
