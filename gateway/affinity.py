"""What requests have in common that should meet on one pod: the beginning of a prompt, or a label. Pure.

Only names a pod: the text goes into a hash at once and is kept nowhere.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from contextcache.model import TenantId

_PREFIX_CHARS = 1024
"""Characters of a prompt that decide: a system prompt's worth. Longer ones would keep near-equal prompts apart."""
_PREFIX_IDS = 256
_DIGEST_BYTES = 16


def prompt_affinity(tenant: TenantId, parsed: dict[str, Any]) -> bytes:
    """Return what a body's prompt or messages begin with, the tenant and model with it; empty when there is neither."""
    beginning = _beginning(parsed)
    return _digest(tenant, f"{parsed.get('model')}\0{beginning}") if beginning else b""


def label_affinity(tenant: TenantId, label: str) -> bytes:
    """Return what requests with the same `X-Session-ID` have in common; empty without one."""
    return _digest(tenant, label) if label else b""


def _digest(tenant: TenantId, text: str) -> bytes:
    data = f"{tenant}\0{text}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _beginning(parsed: dict[str, Any]) -> str:
    prompt, messages = parsed.get("prompt"), parsed.get("messages")
    if isinstance(prompt, str):
        return prompt[:_PREFIX_CHARS]
    if isinstance(prompt, list):
        return json.dumps(prompt[:_PREFIX_IDS])[:_PREFIX_CHARS]
    if isinstance(messages, list) and messages:
        # The first message only: in a conversation sent whole each time, what follows is new every time.
        return json.dumps(messages[0], sort_keys=True)[:_PREFIX_CHARS]
    return ""
