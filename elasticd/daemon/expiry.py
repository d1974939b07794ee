"""When certificates end.

Owns: reading that from PEM files. Must not: judge it, or check anything else of a certificate (`kv.certificates` does).

The standard library shows the dates of a peer's certificate and of authorities, and of no other file; so the few bytes of X.509 (RFC 5280, 4.1) up to
its dates are walked here.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

FILE_MAX: Final = 1 << 20
"""Bytes of a file that are read."""
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERAL_TIME = 0x30, 0xA0, 0x17, 0x18


def end_of(path: Path) -> float | None:
    """When the first certificate of a file ends that ends at all, in seconds since the epoch; None if the file holds none that can be read."""
    try:
        with path.open("rb") as file:
            text = file.read(FILE_MAX).decode("ascii", "replace")
        ends = [not_after(ssl.PEM_cert_to_DER_cert(found[0])) for found in _PEM.finditer(text)]
    except (OSError, ValueError):
        return None
    return min(ends, default=None)


def not_after(der: bytes) -> float:
    """The end of one certificate, in seconds since the epoch.

    Raises:
        ValueError: it is no certificate.
    """
    _, certificate, _ = _item(der)
    _, signed, _ = _item(certificate)
    tag, _, rest = _item(signed)
    if tag == _VERSION:  # left out by the oldest
        _, _, rest = _item(rest)
    for _ in range(2):  # after the serial number: algorithm, issuer
        _, _, rest = _item(rest)
    tag, validity, _ = _item(rest)
    if tag != _SEQUENCE:
        raise ValueError("it holds no dates")
    _, _, rest = _item(validity)
    tag, date, _ = _item(rest)
    return _time(tag, date.decode("ascii", "replace"))


def _item(data: bytes) -> tuple[int, bytes, bytes]:
    """The first element of DER: tag, content, and what follows it."""
    if len(data) < 2:
        raise ValueError("it ends too early")
    tag, length, start = data[0], data[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start], "big")
    if start + length > len(data):
        raise ValueError("it ends too early")
    return tag, data[start : start + length], data[start + length :]


def _time(tag: int, text: str) -> float:
    if tag == _UTC_TIME:  # two digits of a year: 50 to 99 are of the last century
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != _GENERAL_TIME:
        raise ValueError("it holds no dates")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
