"""Fingerprints: KV made under one is garbage under any other. Pure.

The engine computes them (hex SHA-256 of canonical JSON); here they are compared, and differences named for people.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from contextcache.errors import FingerprintMismatch, InvalidRequest

MAX_FINGERPRINT_CHARS = 128


def check_fingerprint(fingerprint: str, fingerprint_json: str) -> None:
    """Raise InvalidRequest unless `fingerprint` is the hex SHA-256 of `fingerprint_json` (not checked when empty)."""
    check_fingerprint_text(fingerprint)
    if fingerprint_json and hashlib.sha256(fingerprint_json.encode()).hexdigest() != fingerprint:
        raise InvalidRequest("the fingerprint is not the SHA-256 of its JSON", param="fingerprint")


def check_fingerprint_text(fingerprint: str) -> None:
    """Raise InvalidRequest for a fingerprint that is empty or too long."""
    if not 0 < len(fingerprint) <= MAX_FINGERPRINT_CHARS:
        raise InvalidRequest("a fingerprint has 1 to 128 characters", param="fingerprint")


def require_fingerprint(asked: str, stored: str) -> None:
    """Raise FingerprintMismatch unless KV stored under `stored` may be injected by who asks with `asked`."""
    if asked != stored:
        raise FingerprintMismatch("the KV was made under another fingerprint")


def differences(before_json: str, after_json: str) -> list[str]:
    """Return the top-level keys whose values differ, sorted; `["?"]` when either text is no JSON object."""
    before, after = _document(before_json), _document(after_json)
    if before is None or after is None:
        return ["?"]
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def _document(text: str) -> dict[str, Any] | None:
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None
