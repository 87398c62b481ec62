"""Check of a part that speaks only gRPC. Skipped if the package grpcio is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contextcache.doctor.finding import Finding, failed, ok, skipped
from contextcache.doctor.tls_check import CA_FILE, CERT_FILE, KEY_FILE

if TYPE_CHECKING:
    import grpc

_CHECK = "/grpc.health.v1.Health/Check"
_ALL_SERVICES = b""
"""Encoded HealthCheckRequest without a service: an empty message."""
_SERVING = b"\x08\x01"
"""Encoded HealthCheckResponse with status SERVING: field 1, value 1."""


def health(part: str, address: str, *, parts_dir: Path | None, server_name: str, timeout_s: float) -> Iterator[Finding]:
    """Ask the gRPC health service of a part. Raises OSError if a file of `parts_dir` cannot be read."""
    try:
        import grpc
    except ModuleNotFoundError:
        yield skipped(part, "needs the package grpcio: pip install 'context-cache[grpc]'")
        return
    try:
        with _channel(address, parts_dir, server_name) as channel:
            check: Any = channel.unary_unary(_CHECK)  # bytes to bytes, without generated code
            answer = check(_ALL_SERVICES, timeout=timeout_s)
    except grpc.RpcError as exc:
        hint = "Is the port right? Do its NetworkPolicy and, with tls.enabled, --tls-dir let this caller in?"
        yield failed(part, f"{address} does not answer: {exc.code().name}", hint)
        return
    if answer == _SERVING:
        yield ok(part, f"{address} serves")
    else:
        yield failed(part, f"{address} is draining or has not started", f"Read the log of {part}.")


def _channel(address: str, parts_dir: Path | None, server_name: str) -> grpc.Channel:
    import grpc

    # The doctor asks the part itself, without the proxies of the environment.
    options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    if parts_dir is None:
        return grpc.insecure_channel(address, options)
    ca, key, certificate = ((parts_dir / name).read_bytes() for name in (CA_FILE, KEY_FILE, CERT_FILE))
    options.append(("grpc.ssl_target_name_override", server_name))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options)
