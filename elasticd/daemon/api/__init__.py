"""The node API over HTTP: docs/api.md.

Owns: who may ask, what a request may hold, how an answer looks, and three listeners. Must not: decide (`operations`) or interpret (`cluster`).
"""
