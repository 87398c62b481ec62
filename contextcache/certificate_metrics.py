"""What every part tells Prometheus about its certificate."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from contextcache.tls import TlsFiles, WatchedTls, open_tls


class CertificateMetrics:
    """One gauge and one counter; without TLS the gauge has no sample, so that no alert takes 0 for a date."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        self._expiry = Gauge(
            f"{prefix}_certificate_expiry_timestamp_seconds",
            "Unix time at which the certificate in use ends.",
            ["certificate"],
            registry=registry,
        )
        self.reload_failures = Counter(
            f"{prefix}_certificate_reload_failures_total",
            "Tries to read changed certificate files that failed; the last good ones stay.",
            registry=registry,
        )

    def open_tls(self, files: TlsFiles | None) -> WatchedTls | None:
        """Return the watched files of this part's own certificate, None when TLS is off. Raises as WatchedTls."""
        tls = open_tls(files, on_failure=self.reload_failures.inc)
        if tls is not None:
            # Asked at each scrape, so that the files are looked at where nobody connects as well.
            self._expiry.labels("parts").set_function(lambda: tls.current().expires_at_s)
        return tls
