"""How the settings of training look on a screen.

Owns: the table of a Config of docs/api.md. Must not: ask for it, or know a setting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from elasticd.cli.failures import one_line
from elasticd.cli.render import Document, plain, table_of

if TYPE_CHECKING:
    from rich.console import RenderableType


def config_screen(data: Document) -> RenderableType:
    """Every setting, a line each: its value, who said so, and who was overruled.

    Args:
        data: of a Config.
    """
    whose = f"job {data['job']}" if data["job"] else "a job that says nothing itself"
    table = table_of("setting", "value", "from", "overruled", fold=("value", "overruled"))
    for one in data["settings"]:
        overruled = ", ".join(f"{layer} {value_text(value)}" for layer, value in one["layers"].items() if layer != one["origin"])
        style = "" if one["origin"] == "default" else "bold"
        value = f"{value_text(one['value'])} {one['unit']}".strip()
        table.add_row(plain(one["name"]), Text(one_line(value), style=style), plain(one["origin"]), plain(overruled))
    problems = [Text(one_line(problem), style="red") for problem in data["problems"]]
    return Group(Text(one_line(f"{whose}, on node {data['node']}")), table, *problems)


def value_text(value: object) -> str:
    """A value as one would type it; "-" for none."""
    if value is None or value == "":
        return "-"
    return str(value).lower() if isinstance(value, bool) else f"{value:.15g}" if isinstance(value, float) else str(value)
