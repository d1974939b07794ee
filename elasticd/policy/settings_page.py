"""The table of settings in docs/detection.md: `python -m elasticd.policy.settings_page` writes it there; a test keeps it so.

Owns: how the table looks. Must not: say anything about a setting that its definition does not.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from elasticd.policy.settings import Settings

BEGIN: Final = "<!-- settings -->\n"
END: Final = "\n## When the detectors see nothing"


def table() -> str:
    """The settings, one a line."""
    rows = [f"| `{name}` | {_shown(default)} | {why} |" for name, default, why in Settings.explain()]
    return "\n".join(["| setting | default | why |", "|---|---|---|", *rows, ""])


def within(text: str) -> str:
    """The page with the table as it is now.

    Raises:
        ValueError: the page has no place for it.
    """
    head, tail = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:head] + table() + text[tail:]


def _shown(default: object) -> str:
    return f'`"{default}"`' if isinstance(default, str) else f"{default:g}" if isinstance(default, float) else str(default)


if __name__ == "__main__":
    page = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/detection.md")
    page.write_text(within(page.read_text(encoding="utf-8")), encoding="utf-8")
