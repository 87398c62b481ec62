"""All checks in their order: the later ones make sense only where the earlier ones went well. Read this first."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from contextcache.doctor import access_checks, engine_checks, grpc_check, part_checks, tls_check
from contextcache.doctor.finding import Finding, Level, failed, skipped
from contextcache.doctor.front import ApiKey, Front, Unreachable
from contextcache.doctor.story import story

_POLL_S = 2.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to examine."""

    url: str
    version: str
    """The doctor's own."""
    key: ApiKey | None = None
    model: str = ""
    """Empty: the first that is served."""
    with_story: bool = False
    """Create, ask and delete a context."""
    wait_s: float = 0
    """How long the deployment may take to become ready."""
    timeout_s: float = 60
    """For one answer."""
    metrics_url: str = ""
    """Of a gateway."""
    injector_url: str = ""
    """Of an injector's metrics."""
    manager_url: str = ""
    """URL of a context-manager's metrics."""
    manager: str = ""
    sidecar: str = ""
    ca_file: Path | None = None
    parts_dir: Path | None = None
    """Directory with tls.crt, tls.key and ca.crt of the release's parts."""
    server_name: str = ""


def examine(plan: Plan, *, sleep: Callable[[float], None] = time.sleep) -> Iterator[Finding]:
    """Yield findings as they are made. Raises OSError when a file of the plan cannot be read."""
    context = tls_check.client_context(ca_file=plan.ca_file, parts_dir=plan.parts_dir)
    front = Front(plan.url, key=plan.key, timeout_s=plan.timeout_s, tls=context)
    try:
        server_name = yield from _certificate(plan, front, context)
        if server_name is None:
            return
        front.close()
        front = Front(plan.url, key=plan.key, timeout_s=plan.timeout_s, tls=context, server_name=server_name)
        _wait(plan, front, sleep)
        yield from _checks(plan, front)
    except Unreachable as exc:
        yield failed("reach", exc.reason, exc.hint)
    finally:
        front.close()
    yield from _parts(plan, context)


def _certificate(plan: Plan, front: Front, context: ssl.SSLContext) -> Generator[Finding, None, str | None]:
    """Yield findings; return the name the certificate is for ("": the URL's host), None when it is not believed."""
    host = front.url.host
    if front.url.scheme != "https":
        yield from tls_check.plain(host)
        return ""
    names = [plan.server_name] if plan.server_name else [host, *(["context-cache"] if plan.parts_dir else [])]
    try:
        outcome = tls_check.shake_hands(
            host, front.url.port or 443, context=context, names=names, timeout_s=plan.timeout_s
        )
    except OSError:
        # Who cannot connect at all learns why by the first request.
        return ""
    yield from tls_check.certificate(outcome, host)
    return None if isinstance(outcome, ssl.SSLError) else outcome.server_name


def _wait(plan: Plan, front: Front, sleep: Callable[[float], None]) -> None:
    """Return when the front is ready, or the plan's patience is at an end: the checks will say what is missing."""
    tries = int(plan.wait_s / _POLL_S)
    for _ in range(tries):
        try:
            if front.call("GET", "/readyz", with_key=False).status == 200:
                return
        except Unreachable:
            pass
        sleep(_POLL_S)


def _checks(plan: Plan, front: Front) -> Iterator[Finding]:
    reached = True
    for finding in access_checks.reach(front):
        reached &= finding.level is Level.OK
        yield finding
    if not reached:
        yield skipped("everything else", "skipped: an earlier check failed")
        return
    yield from _understood("clock", access_checks.clock(front))
    yield from _understood("ready", access_checks.ready(front))
    admitted = False
    for finding in _understood("key", access_checks.keys(front)):
        admitted |= finding.admits
        yield finding
    if not admitted:
        yield skipped("everything else", "needs an API key")
        return
    yield from _understood("isolation", access_checks.isolation(front))
    yield from _understood("versions", engine_checks.versions(front, plan.version))
    yield from _understood("models", engine_checks.models(front, plan.model))
    names = engine_checks.model_names(front)
    model = plan.model or (names[0] if names else "")
    if model not in names:
        yield skipped("turns", "skipped: no model is served")
        return
    yield from _understood("forged headers", access_checks.forged_headers(front, model))
    yield from _understood("streaming", engine_checks.streaming(front, model))
    if plan.with_story:
        yield from _understood("story", story(front, model))


def _understood(check: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield findings; an answer of a shape that no gateway sends is one more of them, not the examination's end."""
    try:
        yield from findings
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
        hint = "The answer is not from context-cache, or a proxy in front changes answers."
        yield failed(check, f"the answer is not from context-cache ({type(exc).__name__})", hint)


def _parts(plan: Plan, context: ssl.SSLContext) -> Iterator[Finding]:
    if plan.metrics_url:
        front = Front(plan.metrics_url, key=None, timeout_s=plan.timeout_s, tls=context)
        yield from part_checks.metrics(front)
        with suppress(Unreachable):  # told by the check before
            yield from _understood("details", access_checks.details(front))
        front.close()
    if plan.injector_url:
        front = Front(plan.injector_url, key=None, timeout_s=plan.timeout_s, tls=context)
        yield from part_checks.injector(front)
        front.close()
    if plan.manager_url:
        front = Front(plan.manager_url, key=None, timeout_s=plan.timeout_s, tls=context)
        yield from part_checks.manager(front)
        front.close()
    name = plan.server_name or "context-cache"
    for part, address in (("context-manager", plan.manager), ("kv-sidecar", plan.sidecar)):
        if address:
            yield from grpc_check.health(
                part, address, parts_dir=plan.parts_dir, server_name=name, timeout_s=plan.timeout_s
            )
