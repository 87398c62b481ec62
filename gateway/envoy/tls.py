"""Certificates of Envoy: what it shows to gateways, pods and clients, whom it believes, and how new files arrive.

Envoy reads the files itself, in its own file system. Files named in the bootstrap are read once, whatever
`watched_directory` says (seen on 1.40); only those of a secret that came by SDS are read again. So each secret has an
SDS file, one a file because Envoy refuses two in one, and is read again when a file is moved into the folder of its
certificate: that is how the kubelet publishes a changed Secret.
"""

from __future__ import annotations

import posixpath
from typing import Any

from gateway.envoy.routes import TYPE
from gateway.envoy.settings import EnvoySettings

_TLS = f"{TYPE}extensions.transport_sockets.tls.v3."
_OWN = "own-certificate"
_CA = "trusted-ca"
_LISTEN = "listen-certificate"


def secrets(settings: EnvoySettings) -> dict[str, dict[str, Any]]:
    """Return the SDS files by name: what has to lie in `config_dir`. They name key files and hold no key."""
    found = {}
    if settings.tls_cert_file:
        found[_OWN] = _certificate(settings.tls_cert_file, settings.tls_key_file)
        found[_CA] = {
            "validation_context": {
                "trusted_ca": {"filename": settings.tls_ca_file},
                "watched_directory": _folder_of(settings.tls_ca_file),
                # A cluster's CA signs for others too: the name says that it is one of ours.
                "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": settings.tls_server_name}}],
            }
        }
    if settings.listen_cert_file:
        found[_LISTEN] = _certificate(settings.listen_cert_file, settings.listen_key_file)
    return {
        f"{name}.json": {"resources": [{"@type": f"{_TLS}Secret", "name": name, **secret}]}
        for name, secret in found.items()
    }


def upstream_tls(settings: EnvoySettings, protocol: str) -> dict[str, Any]:
    """Return a cluster's transport socket, or nothing without TLS. `protocol`: `h2` or `http/1.1`."""
    if not settings.tls_cert_file:
        return {}
    return _socket(
        "UpstreamTlsContext",
        {
            # Whatever address it has: every part's certificate carries this name.
            "sni": settings.tls_server_name,
            "common_tls_context": {
                "alpn_protocols": [protocol],
                "tls_certificate_sds_secret_configs": [_by_sds(settings, _OWN)],
                "validation_context_sds_secret_config": _by_sds(settings, _CA),
            },
        },
    )


def public_tls(host: str, ca_file: str) -> dict[str, Any]:
    """Return the transport socket towards a server outside, which is believed by its own name; read once."""
    name = [{"san_type": "DNS", "matcher": {"exact": host}}]
    return _socket(
        "UpstreamTlsContext",
        {
            "sni": host,
            "common_tls_context": {
                "alpn_protocols": ["h2"],
                "validation_context": {
                    "trusted_ca": {"filename": ca_file},
                    "match_typed_subject_alt_names": name,
                },
            },
        },
    )


def downstream_tls(settings: EnvoySettings) -> dict[str, Any]:
    """Return what a filter chain needs for HTTPS, or nothing without it."""
    if not settings.listen_cert_file:
        return {}
    context = {
        "common_tls_context": {
            "alpn_protocols": ["h2", "http/1.1"],
            "tls_certificate_sds_secret_configs": [_by_sds(settings, _LISTEN)],
        }
    }
    # Half a handshake holds a connection no longer than that.
    return {**_socket("DownstreamTlsContext", context), "transport_socket_connect_timeout": "10s"}


def _certificate(cert_file: str, key_file: str) -> dict[str, Any]:
    return {
        "tls_certificate": {
            "certificate_chain": {"filename": cert_file},
            "private_key": {"filename": key_file},
            "watched_directory": _folder_of(cert_file),
        }
    }


def _folder_of(path: str) -> dict[str, str]:
    return {"path": posixpath.dirname(path)}


def _by_sds(settings: EnvoySettings, name: str) -> dict[str, Any]:
    path = posixpath.join(settings.config_dir, f"{name}.json")
    return {"name": name, "sds_config": {"path_config_source": {"path": path}, "resource_api_version": "V3"}}


def _socket(kind: str, context: dict[str, Any]) -> dict[str, Any]:
    typed = {"@type": f"{_TLS}{kind}", **context}
    return {"transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": typed}}
