"""docs/configuration.md, made of the model: `python -m trainer.settings_page > docs/configuration.md`.

Owns: the words around the table. Must not: say anything about a setting that the model does not.
"""

from __future__ import annotations

import sys
from typing import Final

from trainer.settings import ALIKE, ORDERED, SAFE, Settings, Value, allowed, plain

HEAD: Final = """\
# Settings of training

Made of `trainer/settings.py` by `python -m trainer.settings_page`; a test keeps it so.

Every setting has one value in a generation, and it comes from the highest of these layers that says something:

| layer, low to high | what it is | who writes it |
|---|---|---|
| `default` | the table below | |
| `etcd:cluster` | key `config/cluster` | operators: `elasticctl config set NAME=VALUE` |
| `etcd:job` | key `config/job/JOB` | operators: `elasticctl config set NAME=VALUE --job JOB` |
| `file` | the table `[trainer]` of the job's file, or of `elasticctl run --config FILE` | root of the node, or who starts the run |
| `environment` | `ELASTICD_TRAINER_NAME` in the agent's environment (a drop-in of `elasticd-agent@.service`, or the shell of `elasticctl run`) | the same |
| `command` | `elasticctl run --trainer NAME=VALUE` | who starts the run |

`elasticctl config show --job JOB` tells what counts on a node, which layer it is from, and which layers were overruled. An agent reads etcd when it
starts and for each generation: what an operator sets counts from the next generation on, and `elasticctl restart JOB` brings that about. An unknown
name, a value of the wrong type or out of range, and values that do not fit each other are refused, in one line that names layer, name and value.

**Etcd holds numbers, yes or no, and words of a list, and nothing else.** Whoever writes there must not thereby choose what runs, or where it reads
and writes: settings marked "no" below are refused in etcd, and are for the node's own layers.

**Nodes of one job must not differ** in the settings marked "alike", as far as their own layers (file, environment, command) fix them: a node that
does is kept out, with a line that names the difference. Keep the job's file the same on all nodes.

| name | default | takes | etcd | alike | what it is |
|---|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    rows = [
        (f"`{name}`", _shown(plain(field.default)), allowed(name), _yes(name in SAFE), _yes(name in ALIKE), field.description or "")
        for name, field in Settings.model_fields.items()
    ]
    return HEAD + "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows) + "\n\n" + _orders()


def _orders() -> str:
    lines = ["These must hold as well:", ""]
    lines += [f"- `{lower}` < `{upper}`: else {why}" for lower, upper, why in ORDERED]
    lines += [
        "- `stop_step_timeout_s` < the agent's `stop_grace`: else workers would be killed on their way to a common stop",
        "- the agent's `ttl` < `process_group_timeout_s`: else workers would fail before the loss of a node is known",
        "- `checkpoint_shared` needs `checkpoint_dir`",
    ]
    return "\n".join(lines) + "\n"


def _shown(value: Value | None) -> str:
    if value is None or value == "":
        return "not set"
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value:.15g}`" if isinstance(value, float) else f"`{value}`"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
