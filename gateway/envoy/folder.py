"""The folder that Envoy is started from: its bootstrap, the SDS files of its certificates, what it checks keys with.

Written before Envoy starts, by a container of ours where Envoy runs from its own image. JSON, which Envoy reads as it
reads YAML.
"""

from __future__ import annotations

import json
from pathlib import Path

from gateway.envoy.bootstrap import bootstrap
from gateway.envoy.key_watch import KeyWatch
from gateway.envoy.settings import EnvoySettings
from gateway.envoy.tls import secrets

BOOTSTRAP = "envoy.json"
_CERTIFICATES = ("tls_cert_file", "tls_key_file", "tls_ca_file", "listen_cert_file", "listen_key_file")


def write_folder(settings: EnvoySettings) -> Path:
    """Write all that Envoy reads into `config_dir`; return the bootstrap's path.

    Raises OSError, or ValueError when the key file is broken or a certificate is missing, with which Envoy would be
    ready and reset each connection.
    """
    for name in _CERTIFICATES:
        path = getattr(settings, name)
        if path and not Path(path).is_file():
            raise ValueError(f"ENVOY_{name.upper()}: file {path} does not exist")
    folder = Path(settings.config_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if settings.api_keys_file:
        KeyWatch.of(settings)
    for name, made in {**secrets(settings), BOOTSTRAP: bootstrap(settings)}.items():
        (folder / name).write_text(json.dumps(made, indent=1) + "\n")
    return folder / BOOTSTRAP
