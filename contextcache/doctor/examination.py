"""All checks in their order. Later checks need the success of earlier ones. Read this file first."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from contextcache.doctor import access_checks, engine_checks, grpc_check, part_checks, tls_check
from contextcache.doctor.finding import Finding, Level, failed, skipped
from contextcache.doctor.front import ApiKey, Front, Unreachable
from contextcache.doctor.story import story

_POLL_S = 2.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Deployment to examine, and the way to reach it. An empty address skips the checks of that part."""

    url: str
    version: str
    """Version of the doctor."""
    key: ApiKey | None = None
    model: str = ""
    """Empty: the first served model."""
    with_story: bool = False
    """Create, ask and delete a context."""
    wait_s: float = 0
    """Seconds to wait until the deployment is ready."""
    timeout_s: float = 60
    """Seconds to wait for one answer."""
    metrics_url: str = ""
    """URL of a gateway's metrics port."""
    injector_url: str = ""
    """URL of an injector's metrics port."""
    manager_url: str = ""
    """URL of a context manager's metrics port."""
    manager: str = ""
    sidecar: str = ""
    ca_file: Path | None = None
    parts_dir: Path | None = None
    """Directory with tls.crt, tls.key and ca.crt of the release's parts."""
    server_name: str = ""


def examine(plan: Plan, *, sleep: Callable[[float], None] = time.sleep) -> Iterator[Finding]:
    """Yield findings as the checks run. Raises OSError if a file of the plan cannot be read."""
    tls = tls_check.client_context(ca_file=plan.ca_file, parts_dir=plan.parts_dir)
    server_name = yield from _certificate(plan, tls)
    if server_name is None:
        return
    with closing(Front(plan.url, key=plan.key, timeout_s=plan.timeout_s, tls=tls, server_name=server_name)) as front:
        yield from _reached("reach", _front(plan, front, sleep))
    yield from _parts(plan, tls)


def _certificate(plan: Plan, tls: ssl.SSLContext) -> Generator[Finding, None, str | None]:
    """Yield findings. Return the name in the certificate ("": the URL's host), None if it is not trusted."""
    url = urlsplit(plan.url)
    host = url.hostname or ""
    if url.scheme != "https":
        yield from tls_check.plain(host)
        return ""
    names = [plan.server_name] if plan.server_name else [host, *(["context-cache"] if plan.parts_dir else [])]
    try:
        outcome = tls_check.shake_hands(host, url.port or 443, context=tls, names=names, timeout_s=plan.timeout_s)
    except OSError:
        return ""  # the first request explains why there is no connection
    yield from tls_check.certificate(outcome, host)
    return None if isinstance(outcome, ssl.SSLError) else outcome.server_name


def _reached(check: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield findings. No answer is the last one."""
    try:
        yield from findings
    except Unreachable as exc:
        yield failed(check, exc.reason, exc.hint)


def _wait(plan: Plan, front: Front, sleep: Callable[[float], None]) -> None:
    """Return when the front is ready or `wait_s` has passed: the checks then report the fault."""
    for _ in range(int(plan.wait_s / _POLL_S)):
        try:
            if front.with_key(None).call("GET", "/readyz").status == 200:
                return
        except Unreachable:
            pass
        sleep(_POLL_S)


def _front(plan: Plan, front: Front, sleep: Callable[[float], None]) -> Iterator[Finding]:
    _wait(plan, front, sleep)
    reached = yield from _told("reach", access_checks.reach(front))
    if any(finding.level is not Level.OK for finding in reached):
        yield skipped("everything else", "skipped: an earlier check failed")
        return
    yield from _told("clock", access_checks.clock(front))
    yield from _told("ready", access_checks.ready(front))
    keys = yield from _told("key", access_checks.keys(front))
    if not any(finding.admits for finding in keys):
        yield skipped("everything else", "needs an API key")
        return
    yield from _told("isolation", access_checks.isolation(front))
    yield from _told("versions", engine_checks.versions(front, plan.version))
    yield from _told("models", engine_checks.models(front, plan.model))
    names = engine_checks.model_names(front)
    model = plan.model or next(iter(names), "")
    if model not in names:
        yield skipped("turns", "skipped: no model is served")
        return
    yield from _told("forged headers", access_checks.forged_headers(front, model))
    yield from _told("streaming", engine_checks.streaming(front, model))
    if plan.with_story:
        yield from _told("story", story(front, model))


def _told(check: str, findings: Iterator[Finding]) -> Generator[Finding, None, list[Finding]]:
    """Yield the findings of a check and return them. A malformed answer is one more finding."""
    found = []
    try:
        for finding in findings:
            found.append(finding)
            yield finding
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
        hint = "The answer is not from context-cache, or a proxy in front changes answers."
        found.append(failed(check, f"the answer is not from context-cache ({type(exc).__name__})", hint))
        yield found[-1]
    return found


def _parts(plan: Plan, tls: ssl.SSLContext) -> Iterator[Finding]:
    for check, url, examine_part in (
        ("metrics", plan.metrics_url, part_checks.gateway),
        ("injector", plan.injector_url, part_checks.injector),
        ("redis", plan.manager_url, part_checks.manager),
    ):
        if url:
            with closing(Front(url, timeout_s=plan.timeout_s, tls=tls)) as front:
                yield from _reached(check, _told(check, examine_part(front)))
    name = plan.server_name or "context-cache"
    for part, address in (("context-manager", plan.manager), ("kv-sidecar", plan.sidecar)):
        if address:
            yield from grpc_check.health(
                part, address, parts_dir=plan.parts_dir, server_name=name, timeout_s=plan.timeout_s
            )
