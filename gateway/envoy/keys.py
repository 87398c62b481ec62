"""The check of API keys in Envoy itself: a request that is served while no gateway answers has shown a key.

Envoy's own filters for keys compare keys in plain text, and our file holds hashes. This check is therefore a script of
Envoy's Lua filter with its own SHA-256. Envoy finds the filter by file discovery: a new file is in use within moments,
and requests in flight are not affected. See ADR 0023.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from contextcache.errors import ContextCacheError, Unauthorized, error_body
from contextcache.process.reloaded import Reloaded
from gateway.envoy.settings import EnvoySettings
from gateway.tenants.keys import AUTHENTICATE, KEY_BYTES_MAX, KEY_NEEDED, KEY_UNKNOWN, read_digests

log = logging.getLogger(__name__)

_LUA = "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua"


def discovered(digests: Iterable[str]) -> dict[str, Any]:
    """Return the content of `api_keys_filter_file` for keys with these SHA-256 in lower-case hex."""
    known = "".join(sorted(set(digests)))
    constants = {
        "DIGESTS": known,
        "AUTHENTICATE": AUTHENTICATE,
        "LONGEST": str(KEY_BYTES_MAX),
        "MISSING": error_body(Unauthorized(KEY_NEEDED)).decode(),
        "UNKNOWN": error_body(Unauthorized(KEY_UNKNOWN)).decode(),
        "FAILED": error_body(ContextCacheError("the API key could not be checked")).decode(),
    }
    head = "".join(f"local {name} = [=[{text}]=]\n" for name, text in constants.items())
    code = head + importlib.resources.files(__package__).joinpath("api_keys.lua").read_text()
    lua = {"@type": _LUA, "default_source_code": {"inline_string": code}}
    resource = {
        "@type": "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
        "name": "api-keys",
        "typed_config": lua,
    }
    return {"version_info": hashlib.sha256(known.encode()).hexdigest()[:16], "resources": [resource]}


def watched_keys(settings: EnvoySettings) -> Reloaded[None]:
    """Write `api_keys_filter_file` now, and whenever the key file has changed at a look.

    Envoy keeps the last good keys while the key file is broken. Raises OSError, or ValueError if it is broken now.
    """
    keys_file, filter_file = Path(settings.api_keys_file), Path(settings.api_keys_filter_file)
    filter_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write() -> None:
        digests = read_digests(keys_file)
        new = filter_file.with_suffix(".new")
        new.write_text(json.dumps(discovered(digests)))
        # Envoy reads the file when it is moved to its place.
        new.replace(filter_file)
        log.info("keys written for Envoy", extra={"num_keys": len(digests)})

    return Reloaded(keys_file, read=write, name="key file of envoy")
