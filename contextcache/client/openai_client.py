"""Options of an `openai` client whose calls continue a context."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from contextcache.client.retries import Place


def openai_options(place: Place, session_id: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments; the caller's `options` win.

    The header carries ids that begin with `ctx_`. Another id goes into the body of each call:
    `extra_body={"session_id": …}`. Raises ValueError for such an id, ImportError without the package `openai`.
    """
    if find_spec("openai") is None:
        raise ImportError("`openai()` needs the package openai: pip install 'context-cache[openai]'", name="openai")
    if not session_id.startswith("ctx_"):
        raise ValueError(
            f"a header cannot carry session_id {session_id!r}; pass extra_body={{'session_id': …}} with each call"
        )
    headers = {"X-Session-ID": session_id, **options.get("default_headers", {})}
    known = {"base_url": f"{place.base_url}/v1", "api_key": place.api_key}
    return {**known, **options, "default_headers": headers}
