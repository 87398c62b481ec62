"""Renders `envoy.yaml.j2` to the files that Envoy starts from.

The template is Envoy's configuration. This module adds the values that follow from other modules: calls and their
paths, headers, errors. Envoy reads JSON as it reads YAML, so the files are JSON.
"""

from __future__ import annotations

import ipaddress
import json
import posixpath
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from contextcache.claim import SESSION_HEADER, TURN_PATHS
from contextcache.errors import ERRORS_BY_CODE, ContextCacheError, error_body
from contextcache.identity import IDENTITY_HEADER, UNROUTED_HEADER
from contextcache.names import MINTED_PREFIX
from gateway import fronts
from gateway.envoy.keys import watched_keys
from gateway.envoy.messages import ENGINES_METADATA
from gateway.envoy.settings import EnvoySettings
from gateway.flows import ROUTING_HEADERS
from gateway.paths import (
    COMPACTION_PATHS,
    CONSOLE_PATH,
    CONTEXT_CHANGES,
    CONTEXT_PATH,
    ENGINE_CALLS,
    OBJECT_PATHS,
    READ_PATHS,
)
from gateway.settings import split_address
from gateway.tenants.keys import KEY_HEADERS

BOOTSTRAP = "envoy.json"
FRONT_PATHS = ("/healthz", "/readyz", "/openapi.json", CONSOLE_PATH)
"""Paths that the HTTP front answers without a key. Its /metrics are only for clients that reach the process itself."""
SHOWN_BYTES_MAX = 1 << 20
"""Size from which request bodies pass through the gateways' HTTP fronts, as do bodies without a content-length.

Envoy holds smaller bodies whole for the plugin, which has counted their bytes by then. Larger bodies stream through
Envoy: the plugin holds a message three to four times while it reads it, on one event loop.
"""
CONTROL_TIMEOUT_S = 9.0
"""Deadline of a control call's answer, and limit of a silence in its upload. It covers the deadlines of the context
manager (2 s) and of the sidecars (5 s for a delete)."""
SILENCE_S = 5.0
"""Longest silence of a client of Envoy's probes and metrics."""
SEGMENT = r"(?:\.?\.?[A-Za-z0-9_~!$&'()*+,;=:@-][A-Za-z0-9_~!$&'()*+,;=:@.-]*|\.\.\.[A-Za-z0-9_~!$&'()*+,;=:@.-]*)"
"""A path segment in plain characters that is neither `.` nor `..`; RE2 has no look-ahead."""
_Call = tuple[str, str, str]
"""Name of the route, method, path."""
_OPEN = {"metadata": {"filter_metadata": {"envoy.lb": {"open": True}}}}
"""Mark of the members from which the load balancer chooses, in a cluster that also has others."""
_METHODS_WITH_BODY = ("POST", "PUT", "PATCH")
_FILES = ("tls_cert_file", "tls_key_file", "tls_ca_file", "listen_cert_file", "listen_key_file")


def write_folder(settings: EnvoySettings) -> Path:
    """Write all files that Envoy reads into `config_dir`; return the bootstrap's path.

    Raises OSError, or ValueError if the key file is broken or a certificate is missing: without a certificate Envoy
    would be ready and reset each connection.
    """
    for name in _FILES:
        path = getattr(settings, name)
        if path and not Path(path).is_file():
            raise ValueError(f"ENVOY_{name.upper()}: file {path} does not exist")
    folder = Path(settings.config_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if settings.api_keys_file:
        watched_keys(settings)
    for name, content in rendered(settings).items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    return folder / BOOTSTRAP


def rendered(settings: EnvoySettings) -> dict[str, Any]:
    """Return the files by name: the bootstrap, and an SDS file for each secret."""
    bootstrap, *secrets = yaml.load_all(_TEMPLATE.render(_context(settings)), Loader=yaml.CSafeLoader)
    del bootstrap["x-shared"]
    return {BOOTSTRAP: bootstrap} | {f"{found['resources'][0]['name']}.json": found for found in secrets}


def _context(settings: EnvoySettings) -> dict[str, Any]:
    """Return the variables of the template."""
    with_body, without_body = _calls(settings.engine_paths)
    return {
        "settings": settings,
        "collector": urlsplit(settings.traces_endpoint),
        "control_timeout_s": CONTROL_TIMEOUT_S,
        "silence_s": SILENCE_S,
        "collected_bytes": min(SHOWN_BYTES_MAX, settings.max_body_bytes),
        "steering_headers": sorted({*ROUTING_HEADERS, IDENTITY_HEADER} - {UNROUTED_HEADER}),
        "unrouted_header": UNROUTED_HEADER,
        "key_headers": sorted(KEY_HEADERS),
        "engines_metadata": ENGINES_METADATA,
        "session_header": SESSION_HEADER,
        "session_prefix": MINTED_PREFIX,
        "cors": fronts,
        "segment": SEGMENT,
        "calls_with_body": with_body,
        "calls_without_body": without_body,
        "control_paths": _with_slashes((CONTEXT_PATH, *sorted(READ_PATHS))),
        "public_paths": _with_slashes(FRONT_PATHS),
        "context_changes": CONTEXT_CHANGES,
        "object_paths": [path for path in OBJECT_PATHS if path not in COMPACTION_PATHS],
        "compaction_paths": COMPACTION_PATHS,
        "errors": ERRORS_BY_CODE,
    }


def _calls(engine_paths: Iterable[str]) -> tuple[list[_Call], list[_Call]]:
    """Return the calls that pods answer, with and without a body."""
    completions = sorted(TURN_PATHS)
    known = sorted(ENGINE_CALLS - {f"POST {path}" for path in TURN_PATHS})
    known.sort(key=lambda call: not call.startswith("POST "))
    split = (call.partition(" ") for call in (*known, *engine_paths))
    plain = [("stateless", method, path) for method, _, path in split]
    with_body = [
        *(("turn", "POST", path) for path in completions),
        *(("create", "POST", path) for path in _with_slashes((CONTEXT_PATH,))),
        *(("completion", "POST", path) for path in completions),
        *(call for call in plain if call[1] in _METHODS_WITH_BODY),
    ]
    return with_body, [call for call in plain if call[1] not in _METHODS_WITH_BODY]


def _with_slashes(paths: Iterable[str]) -> list[str]:
    """Return each path without and with a slash at its end."""
    return [f"{path}{end}" for path in paths for end in ("", "/")]


def _inserted(value: object) -> str:
    """Return a value as YAML in quotes, so that it stays one value. The text of a macro is YAML already."""
    if isinstance(value, Markup):
        return value
    quoted = yaml.dump(value, Dumper=yaml.CSafeDumper, default_style='"', default_flow_style=True, width=1 << 30)
    return Markup(quoted)  # noqa: S704  # not HTML: Jinja2 inserts it as it is


def duration(seconds: float) -> str:
    """Return a duration in Envoy's notation, to the millisecond."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def _socket_address(address: str) -> dict[str, Any]:
    host, port = split_address(address)
    return {"socket_address": {"address": host, "port_value": port}}


def _members(addresses: Iterable[str], *, only_chosen: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return addresses as endpoints of a cluster. `only_chosen`: more of them, which no load balancer chooses."""
    members = [{"endpoint": {"address": _socket_address(address)}} for address in addresses]
    unchosen = _members(only_chosen) if only_chosen else []
    return [*(member | _OPEN for member in members), *unchosen] if unchosen else members


def _are_ips(addresses: Iterable[str]) -> bool:
    try:
        for address in addresses:
            ipaddress.ip_address(split_address(address)[0])
    except ValueError:
        return False
    return True


def _body_format(error: ContextCacheError) -> str:
    """Return the body of an error as a format string of Envoy."""
    return error_body(error).decode().replace("%", "%%")


def _details(*details: str) -> str:
    """Return a CEL expression for local replies with one of these details; a star at the end stands for any text."""
    equals = [f"response.code_details == '{found}'" for found in details if not found.endswith("*")]
    begins = [f"response.code_details.startsWith('{found[:-1]}')" for found in details if found.endswith("*")]
    return f"({' || '.join([*equals, *begins])})"


_ENVIRONMENT = Environment(
    loader=PackageLoader(__package__, ""),
    autoescape=True,
    finalize=_inserted,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_ENVIRONMENT.filters |= {
    "body_format": _body_format,
    "dirname": posixpath.dirname,
    "duration": duration,
    "exactly": lambda texts: [{"exact": text} for text in texts],
    "members": _members,
    "socket_address": _socket_address,
}
_ENVIRONMENT.globals |= {"are_ips": _are_ips, "details": _details}
_TEMPLATE = _ENVIRONMENT.get_template("envoy.yaml.j2")
