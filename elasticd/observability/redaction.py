"""Keeping secrets out of what is written.

Owns: which names are those of secrets, what a secret looks like in a text, and which values this process knows to be secret. Must not: write anything.

A secret is known by its name (`password`, `HF_TOKEN`, `--api-key`), by its value (what a variable with such a name holds in the environment of the
agent or of its job), or by its looks (a private key, a URL with a password, tokens of well-known makers). Names that only speak of secrets
(`token_count`, `tokens_per_s`, `password_file`) hide nothing.

Whatever is done to a text takes time in proportion to its length; callers bound that (`hidden`).
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

from elasticd.observability.harmless import CUT, harmless

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

HIDDEN: Final = "[redacted]"
"""What stands for a secret."""
VALUE_LEAST: Final = 8
"""Characters of a value that is looked for wherever it appears: shorter ones are words."""
VALUE_MOST: Final = 2048
"""Characters of such a value that are looked for."""
VALUES_MOST: Final = 256
NAME_MOST: Final = 128


class Secrecy(IntEnum):
    """What a name says of the value that bears it."""

    NONE = 0
    LIKELY = 1  # a word that has other uses too: numbers stay
    SURE = 2


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# --- names ---------------------------------------------------------------------------------------------------------------

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SURE: Final = ("password", "passwd", "passphrase", "secret", "secrets", "apikey", "secretkey", "accesskey", "privatekey", "sshpass")
_FILLERS: Final = _set("value string text old new raw plain hex base b current")
_ABOUT: Final = _set(
    "file files path paths dir directory folder count counts len length size name names id ids type kind age ttl at expiry expires expired seconds s ms"
    " bytes limit max min policy env var variable set present ok valid required host port user username rotated field error problem sock prompt"
)
_KEYS: Final = _set("api access secret private signing encryption auth master ssh account storage")
_PASSES: Final = _set("db smtp user mysql pg postgres redis ldap mail ftp root admin login http proxy")
_AUTHS: Final = _set("basic http proxy redis rediscli docker registry npm")


@lru_cache(maxsize=4096)
def secrecy(name: str) -> Secrecy:
    """What the name of a field, a variable or an option says: that its value is a secret, may be one, or is none."""
    words = [word.lower() for word in _WORD.findall(name[-NAME_MOST:])]
    while words and (words[-1].isdigit() or words[-1] in _FILLERS):
        words.pop()
    if not words or words[-1] in _ABOUT:
        return Secrecy.NONE
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if any(word.endswith(_SURE) for word in words) or last in {"authorization", "cookie"}:
        return Secrecy.SURE
    pairs = {"key": _KEYS, "pass": _PASSES, "auth": _AUTHS}
    if before in pairs.get(last, ()) or (last == "pwd" and before not in {"", "old"}):
        return Secrecy.SURE
    return Secrecy.LIKELY if last.endswith("token") or last in {"credential", "credentials", "bearer"} else Secrecy.NONE


def is_secret(name: str, value: object) -> bool:
    """Whether a value is to be hidden for its name. Nothing, yes and no are none; numbers only where the name leaves no doubt."""
    sure = secrecy(name)
    if sure is Secrecy.NONE or value is None or isinstance(value, bool):
        return False
    if sure is Secrecy.SURE:
        return value not in ("", b"")
    return not isinstance(value, int | float) and (not isinstance(value, str) or not _is_plain(value))


_PLAIN: Final = re.compile(r"[+-]?[0-9]{0,7}(?:\.[0-9]{1,7})?[,;)\]}]{0,3}|none|null|true|false", re.IGNORECASE)


def _is_plain(text: str) -> bool:
    return len(text) < 20 and _PLAIN.fullmatch(text) is not None


# --- looks ---------------------------------------------------------------------------------------------------------------

_SIGNS: Final = (
    *(
        "pass",
        "pwd",
        "secret",
        "token",
        "key",
        "auth",
        "cred",
        "cookie",
        "bearer",
        "basic",
        "://",
        "ghp_",
        "gho_",
        "ghu_",
        "ghs_",
        "ghr_",
        "github_pat_",
        "glpat-",
        "hf_",
        "sk-",
        "sk_",
        "rk_",
        "xox",
    ),
    *("akia", "asia", "aiza", "ya29.", "npm_", "pypi-", "eyj", "nvapi-", "hvs.", "hooks.slack", "dop_v1_"),
)
"""At least one of them is in every text that holds a secret which is known by name or looks."""

_PEM: Final = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)", re.DOTALL)
_USERINFO: Final = re.compile(r"://(?P<user>[^\s/@:?#\"'<>]{0,256}+)(?P<password>:[^\s/@?#\"'<>]{0,1024}+)?@")
_SCHEME: Final = re.compile(r"\b(?P<scheme>Bearer|Basic|Negotiate)(?P<gap>\s{1,3})(?P<value>[A-Za-z0-9._~+/-]{8,4096}+=*)", re.IGNORECASE)
_MAKERS: Final = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"gh[opsur]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{20,}"
    r"|sk-(?=[A-Za-z_-]{0,64}[0-9])[A-Za-z0-9_-]{20,}|[sr]k_(?:live|test)_[A-Za-z0-9]{16,}|xox[abeprs]-[A-Za-z0-9-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])|AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,}|npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{32,}"
    r"|nvapi-[A-Za-z0-9_-]{20,}|hvs\.[A-Za-z0-9_-]{20,}|dop_v1_[a-f0-9]{32,}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
    r"|(?<=hooks\.slack\.com/)services/[A-Za-z0-9/]{20,})"
)
_NAMED: Final = re.compile(r"(?<![A-Za-z0-9_])(?P<name>[A-Za-z_][A-Za-z0-9_.-]{0,127}+)(?P<link>(?:\\{0,3}[\"'])?\s{0,3}(?:=>|:=|=|:)\s{0,3})")
_OPTION: Final = re.compile(r"(?<![A-Za-z0-9_-])--?(?P<name>[A-Za-z][A-Za-z0-9_-]{0,127}+)(?P<link>[\"']?,?\s{1,3})(?!-)")
_VALUE: Final = re.compile(
    r"(?P<quote>\\{0,3}[\"'])(?P<inner>(?:(?!(?P=quote)).)*+)(?P=quote)?"
    r"|(?P<bare>(?:(?:Bearer|Basic|Digest|Token|Negotiate)\s{1,3}+)?[^\s&\"'`]++)",
    re.IGNORECASE | re.DOTALL,
)


def _by_name(text: str, heads: re.Pattern[str]) -> str:
    """`text` with the values hidden that follow a secret's name."""
    parts: list[str] = []
    done = 0
    for head in heads.finditer(text):
        if head.start() < done or secrecy(head["name"]) is Secrecy.NONE:
            continue
        value = _VALUE.match(text, head.end())
        if value is None or not _tells(head, value):
            continue
        quoted = value["quote"] or ""
        parts += [text[done : head.end()], quoted, HIDDEN, quoted]
        done = value.end()
    return "".join([*parts, text[done:]]) if parts else text


def _tells(head: re.Match[str], value: re.Match[str]) -> bool:
    """Whether what follows a secret's name is its value, and no prose ("invalid token: expected 5")."""
    inner = value["inner"] if value["quote"] else value["bare"]
    if not is_secret(head["name"], inner) or inner.startswith(HIDDEN):
        return False
    link = head["link"]
    if secrecy(head["name"]) is Secrecy.SURE or value["quote"] or ":" not in link or "=" in link or link[0] in "\"'\\":
        return True
    return link != ":" and _looks_random(inner)


def _looks_random(text: str) -> bool:
    return len(text) >= VALUE_LEAST and any(char.isdigit() for char in text)


def _without_userinfo(found: re.Match[str]) -> str:
    if found["password"]:
        return f"://{found['user']}:{HIDDEN}@"
    return f"://{HIDDEN}@" if len(found["user"]) >= 16 else found[0]


def _without_scheme(found: re.Match[str]) -> str:
    told = found["value"]
    return f"{found['scheme']}{found['gap']}{HIDDEN}" if _looks_random(told) or told.endswith("=") or len(told) >= 24 else found[0]


# --- values --------------------------------------------------------------------------------------------------------------


def _values(environ: Mapping[str, str]) -> Iterator[str]:
    """What is secret in an environment, in every form in which it may appear."""
    for name, value in environ.items():
        if "://" in value:
            yield from (_password_of(found) for found in _USERINFO.finditer(value[: 4 * VALUE_MOST]) if found["password"])
        sure = secrecy(name)
        # GOOGLE_APPLICATION_CREDENTIALS and the like name a file.
        if sure is Secrecy.NONE or (sure is Secrecy.LIKELY and value.startswith(("/", "~", "./"))) or _is_plain(value):
            continue
        yield value
        if "\n" in value:
            yield from (line for line in value.splitlines() if len(line) >= 2 * VALUE_LEAST)


def _password_of(found: re.Match[str]) -> str:
    return str(found["password"][1:])


def _forms(value: str) -> Iterator[str]:
    """A value as it is, as Python shows it, and as it stands in a URL, in both directions."""
    value = value.strip()[:VALUE_MOST]
    yield from {value, repr(value)[1:-1], quote(value, safe=""), unquote(value)}


class Redactor:
    """Hides secrets in texts.

    Args:
        values: that are secret wherever they appear.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._known = frozenset(values)
        forms = {form for value in self._known for form in _forms(value) if len(form) >= VALUE_LEAST}
        self._values = tuple(sorted(forms, key=len, reverse=True)[:VALUES_MOST])
        self._pattern = re.compile("|".join(map(re.escape, self._values))) if self._values else None

    def knowing(self, environ: Mapping[str, str]) -> Redactor:
        """One that knows the secrets of an environment too."""
        return Redactor([*self._known, *_values(environ)])

    def __call__(self, text: str) -> str:
        """`text` with HIDDEN in place of each secret."""
        if self._pattern is not None and any(value in text for value in self._values):
            text = self._pattern.sub(HIDDEN, text)
        low = text.lower()
        if not any(sign in low for sign in _SIGNS):
            return text
        if "-----BEGIN" in text:
            text = _PEM.sub(HIDDEN, text)
        text = _MAKERS.sub(HIDDEN, text)
        text = _by_name(_by_name(text, _NAMED), _OPTION)
        text = _USERINFO.sub(_without_userinfo, text) if "://" in text else text
        return _SCHEME.sub(_without_scheme, text)


_redactor = Redactor()


def know(environ: Mapping[str, str]) -> None:
    """Hide from now on, in all that this process writes, what is secret in an environment."""
    global _redactor  # noqa: PLW0603  (of the process, as its logs are)
    _redactor = _redactor.knowing(environ)


def forget() -> None:
    """Know no values any more."""
    global _redactor  # noqa: PLW0603
    _redactor = Redactor()


def redacted(text: str) -> str:
    """`text` without what this process knows, or sees, to be secret."""
    return _redactor(text)


def hidden(text: str | bytes, limit: int, *, keep: str = "") -> str:
    """`text` without secrets, harmless, and in `limit` characters (`harmless`). The cost is bounded by `limit`.

    A secret that lies across the cut is not told in part.
    """
    window = limit + VALUE_MOST
    if isinstance(text, bytes):
        text = text[: 4 * window + 4].decode("utf-8", "replace")
    shown = _redactor(text[:window])
    if len(text) > window:
        shown = shown[: max(0, len(shown) - VALUE_MOST)] + CUT
    return harmless(shown, limit, keep=keep)
