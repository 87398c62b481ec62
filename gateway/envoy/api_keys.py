"""The check of API keys in Envoy itself, so that what passes while no gateway answers has shown a key. Pure.

Envoy's own filters for keys compare them in plain text, and our file holds hashes. So this is Envoy's Lua filter with
a SHA-256 of its own. It comes by file discovery: written anew with other digests, it is in use within moments, and
a request that runs is not touched. See ADR 0023.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Iterable
from typing import Any

from contextcache.errors import ContextCacheError, Unauthorized, error_body
from gateway.envoy.routes import API_KEYS, LUA, TYPE
from gateway.envoy.settings import EnvoySettings
from gateway.tenants.keys import AUTHENTICATE, KEY_BYTES_MAX, KEY_NEEDED, KEY_UNKNOWN

_REFUSED = "response.code_details == 'lua_response'"


def key_filter(settings: EnvoySettings) -> list[dict[str, Any]]:
    """Return the filter, whose configuration `key_watch` writes; nothing where there are no keys."""
    if not settings.api_keys_file:
        return []
    source = {"path_config_source": {"path": settings.api_keys_filter_file}, "resource_api_version": "V3"}
    return [{"name": API_KEYS, "config_discovery": {"config_source": source, "type_urls": [f"{LUA}.Lua"]}}]


def refusal_counter(settings: EnvoySettings) -> list[dict[str, Any]]:
    """Return the access log that counts who had no key: `envoy_api_keys_refused`."""
    if not settings.api_keys_file:
        return []
    refused = {"@type": f"{TYPE}extensions.access_loggers.filters.cel.v3.ExpressionFilter", "expression": _REFUSED}
    counter = {"stat": {"name": "refused"}, "value_fixed": 1}
    counted = {"@type": f"{TYPE}extensions.access_loggers.stats.v3.Config", "stat_prefix": "api_keys"}
    extension = {"name": "envoy.access_loggers.extension_filters.cel", "typed_config": refused}
    return [
        {
            "name": "envoy.access_loggers.stats",
            "filter": {"extension_filter": extension},
            "typed_config": {**counted, "counters": [counter]},
        }
    ]


def discovered(digests: Iterable[str]) -> dict[str, Any]:
    """Return what `api_keys_filter_file` holds for keys of these SHA-256 in lower case hex."""
    known = "".join(sorted(set(digests)))
    told = {
        "DIGESTS": known,
        "AUTHENTICATE": AUTHENTICATE,
        "LONGEST": str(KEY_BYTES_MAX),
        "MISSING": error_body(Unauthorized(KEY_NEEDED)).decode(),
        "UNKNOWN": error_body(Unauthorized(KEY_UNKNOWN)).decode(),
        "FAILED": error_body(ContextCacheError("the API key could not be checked")).decode(),
    }
    head = "".join(f"local {name} = [=[{text}]=]\n" for name, text in told.items())
    code = head + importlib.resources.files("gateway.envoy").joinpath("api_keys.lua").read_text()
    lua = {"@type": f"{LUA}.Lua", "default_source_code": {"inline_string": code}}
    resource = {"@type": f"{TYPE}config.core.v3.TypedExtensionConfig", "name": API_KEYS, "typed_config": lua}
    return {"version_info": hashlib.sha256(known.encode()).hexdigest()[:16], "resources": [resource]}
