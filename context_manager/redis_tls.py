"""The certificate files of the connection to Redis: checked at the start, followed afterwards."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from context_manager.settings import ManagerSettings
from contextcache.file_version import file_version

log = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0
_RETRY_INTERVAL_S = 10.0


class RedisTls:
    """Whom to believe, and what to show, when Redis speaks TLS."""

    def __init__(
        self,
        *,
        ca_file: Path | None,
        cert_file: Path | None,
        key_file: Path | None,
        on_failure: Callable[[], None] = lambda: None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ca_file` None: the system's CAs. Raises OSError or ValueError when the files cannot serve.

        `on_failure` is called when changed files cannot serve; new connections fail until they can.
        """
        if (cert_file is None) != (key_file is None):
            raise ValueError("the certificate and the key for Redis belong together: set both or none")
        self._ca_file, self._cert_file, self._key_file = ca_file, cert_file, key_file
        self._on_failure = on_failure
        self._monotonic_s = monotonic_s
        self._version = self._versions()
        self._look_at_s = 0.0
        self._check()

    def options(self) -> dict[str, Any]:
        """Return what redis-py takes."""
        named = {"ssl_ca_certs": self._ca_file, "ssl_certfile": self._cert_file, "ssl_keyfile": self._key_file}
        return {name: str(path) for name, path in named.items() if path is not None}

    def has_changed(self) -> bool:
        """Return whether the files are others than at the last call, and good. Looks at most once a second."""
        now_s = self._monotonic_s()
        if now_s < self._look_at_s:
            return False
        self._look_at_s = now_s + _LOOK_INTERVAL_S
        version = self._versions()
        if version == self._version:
            return False
        try:
            self._check()
        except (OSError, ValueError) as exc:
            # The version stays, so that the files are tried again even when nobody touches them.
            self._look_at_s = now_s + _RETRY_INTERVAL_S
            self._on_failure()
            log.warning("certificate for redis not reloaded", extra={"error": str(exc)})
            return False
        self._version = version
        log.info("certificate for redis reloaded")
        return True

    def _versions(self) -> tuple[object, ...]:
        files = (self._ca_file, self._cert_file, self._key_file)
        return tuple(None if path is None else file_version(path) for path in files)

    def _check(self) -> None:
        for path in (self._ca_file, self._cert_file, self._key_file):
            if path is not None:
                # Here, because OpenSSL does not say which file it misses.
                path.read_bytes()
        try:
            context = ssl.create_default_context(cafile=None if self._ca_file is None else str(self._ca_file))
        except ssl.SSLError as exc:
            raise ValueError(f"{self._ca_file} holds no PEM certificate: {exc.reason or exc}") from exc
        if self._cert_file is None:
            return
        try:
            context.load_cert_chain(self._cert_file, self._key_file, password="")
        except ssl.SSLError as exc:
            files = f"{self._cert_file} and {self._key_file}"
            raise ValueError(f"{files} are not a PEM certificate and its key: {exc.reason or exc}") from exc


def redis_tls(settings: ManagerSettings, *, on_failure: Callable[[], None]) -> RedisTls | None:
    """Return the files that the settings name, None when they name none. Raises as RedisTls."""
    ca, cert, key = settings.redis_ca_file, settings.redis_cert_file, settings.redis_key_file
    if ca is None and cert is None and key is None:
        return None
    return RedisTls(ca_file=ca, cert_file=cert, key_file=key, on_failure=on_failure)
