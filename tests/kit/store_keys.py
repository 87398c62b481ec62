"""Key files of the shared store, made up from the keys' ids: the same id is the same key."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_store_keys(path: Path, ids: Mapping[str, Sequence[str]]) -> Path:
    """Write a file with these keys of each tenant, the one that writes first; return its path."""
    keys = {tenant: [{"id": each, "key": _key(f"{tenant}/{each}")} for each in of] for tenant, of in ids.items()}
    path.write_text(json.dumps(keys))
    return path


def _key(seed: str) -> str:
    return base64.b64encode(hashlib.sha256(seed.encode()).digest()).decode()
