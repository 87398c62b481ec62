"""What an `openai` client is made with so that its calls carry a context. The package itself is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from contextcache.client.retries import Place


def openai_options(place: Place, session_id: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments; `options` of the caller's win.

    The header names contexts whose ids begin with `ctx_`. One that you named yourself goes in the body, which only a
    call can say: `extra_body={"session_id": …}`. Raises ValueError for such a name.
    """
    if not session_id.startswith("ctx_"):
        raise ValueError(
            f"a header cannot carry session_id {session_id!r}; pass extra_body={{'session_id': …}} with each call"
        )
    headers = {"X-Session-ID": session_id, **options.get("default_headers", {})}
    known = {"base_url": f"{place.base_url}/v1", "api_key": place.api_key}
    return {**known, **options, "default_headers": headers}


def require_openai() -> None:
    """Raise ImportError with the extra to install unless the package `openai` is there."""
    if find_spec("openai") is None:
        raise ImportError("`openai()` needs the package openai: pip install 'context-cache[openai]'", name="openai")
