"""What is done about failures that happened and about those that may come: pure functions of what is seen and the time.

Owns: classes of failures, budgets, the cost model, and `decide`. Must not: read a clock, draw a random number, talk to etcd, know a process; or import
detectors: their incidents come as plain values (`evidence`).

`settings` has every number and its reason, `failures` says what went wrong, `budgets` what was done and what may be done yet, `costs` what it is worth,
`recovery` and `prevention` decide for what happened and for what may come, `report` tells what came of it. Begin at `decide`.
"""
