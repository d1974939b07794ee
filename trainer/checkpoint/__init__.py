"""Checkpoint files: written so that a crash leaves the old one or the new one, read so that no damaged bit is believed.

Owns: everything below a checkpoint directory, and copies of it on other storage. Must not: import torch or anything of `elasticd`, know a job or
its members, or decide when to write. The agent writes with it (`elasticd.agent.persist`), scripts that run alone do too. Never pickle.
"""

from trainer.checkpoint.disk import tidy
from trainer.checkpoint.keep import Best, Keep, make_room, retain
from trainer.checkpoint.load import Loaded, load_into, load_newest, newest_valid, opened, read_header, read_manifest, scan, set_aside, verify
from trainer.checkpoint.manifest import CHUNK, Found, Info, Manifest, digest_image, digest_of, name_of, parse_name
from trainer.checkpoint.remote import Remote, download, list_remote, upload
from trainer.checkpoint.write import write

__all__ = [
    "CHUNK",
    "Best",
    "Found",
    "Info",
    "Keep",
    "Loaded",
    "Manifest",
    "Remote",
    "digest_image",
    "digest_of",
    "download",
    "list_remote",
    "load_into",
    "load_newest",
    "make_room",
    "name_of",
    "newest_valid",
    "opened",
    "parse_name",
    "read_header",
    "read_manifest",
    "retain",
    "scan",
    "set_aside",
    "tidy",
    "upload",
    "verify",
    "write",
]
