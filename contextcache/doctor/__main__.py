"""`context-cache doctor --url URL`: exit 0 when all works, 1 when a check failed, 2 when nothing could be checked."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import SecretStr

from contextcache.cli.place import NotConfigured, find_place
from contextcache.doctor.examination import Plan, examine
from contextcache.doctor.finding import Finding
from contextcache.doctor.report import as_json, exit_status, lines_of, summary

_PARTS_DIR = Path("/etc/context-cache/tls")
"""Where the chart mounts the certificate of the release's parts."""


def main() -> None:
    """Examine a deployment and print what was found."""
    parser = _parser()
    parsed = parser.parse_args()
    known_key = None
    if parsed.url is None:
        try:
            parsed.url, known_key = find_place(None, None)
        except NotConfigured as exc:
            parser.error(str(exc))
    try:
        plan = _plan(parsed, known_key)
        findings = _examine(plan, as_lines=not parsed.json)
    except (OSError, ValueError) as exc:
        print(f"cannot check {parsed.url}: {exc}", file=sys.stderr)
        sys.exit(2)
    print(as_json(parsed.url, findings) if parsed.json else f"\n{summary(findings)}")
    sys.exit(exit_status(findings))


def _examine(plan: Plan, *, as_lines: bool) -> list[Finding]:
    findings = []
    for finding in examine(plan):
        findings.append(finding)
        if as_lines:
            print(*lines_of(finding), sep="\n", flush=True)
    return findings


def _plan(parsed: argparse.Namespace, known_key: str | None) -> Plan:
    key = None if known_key is None else SecretStr(known_key)
    if parsed.api_key_file is not None:
        key = SecretStr(parsed.api_key_file.read_text().strip())
        if not key.get_secret_value():
            raise ValueError(f"{parsed.api_key_file} is empty")
    parts_dir = parsed.tls_dir or (_PARTS_DIR if _PARTS_DIR.is_dir() else None)
    return Plan(
        url=parsed.url,
        version=_own_version(),
        key=key,
        model=parsed.model,
        with_story=parsed.story,
        wait_s=parsed.wait_s,
        timeout_s=parsed.timeout_s,
        metrics_url=parsed.gateway_metrics,
        injector_url=parsed.injector_metrics,
        manager_url=parsed.manager_metrics,
        manager=parsed.manager,
        sidecar=parsed.sidecar,
        ca_file=parsed.ca_file,
        parts_dir=parts_dir,
        server_name=parsed.server_name,
    )


def _own_version() -> str:
    try:
        return version("context-cache")
    except PackageNotFoundError:
        return "unknown"


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError("must begin with http:// or https://")
    if "@" in text.partition("://")[2].partition("/")[0]:
        # It is printed, and a password is not.
        raise argparse.ArgumentTypeError("must not hold a user or a password; API keys go into --api-key-file")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="context-cache doctor", description=__doc__)
    parser.add_argument(
        "--url", type=_url, help="where clients reach it, https://llm.example.org; default: what `login` wrote"
    )
    parser.add_argument("--api-key-file", type=Path, help="file with an API key in plain text; it is never printed")
    parser.add_argument("--story", action="store_true", help="create a context, ask it, delete it")
    parser.add_argument("--model", default="", help="model to ask; default: the first that is served")
    parser.add_argument("--wait-s", type=float, default=0, help="seconds the deployment may take to become ready")
    parser.add_argument("--timeout-s", type=float, default=60, help="seconds for one answer")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ca-file", type=Path, help="PEM certificates of who signed the front's, beside the system's")
    parser.add_argument("--server-name", default="", help="name in the front's certificate if it is not the host")
    parser.add_argument(
        "--tls-dir",
        type=Path,
        help=f"tls.crt, tls.key, ca.crt of the release's parts; default {_PARTS_DIR} if there",
    )
    parser.add_argument("--gateway-metrics", default="", help="URL of a gateway's metrics port, http://10.0.0.7:9090")
    parser.add_argument(
        "--injector-metrics", default="", help="URL of an injector's: which pods were left alone, and why"
    )
    parser.add_argument(
        "--manager-metrics", default="", help="URL of a context-manager's metrics port: how its Redis is set"
    )
    parser.add_argument("--manager", default="", help="host:port of a context-manager")
    parser.add_argument("--sidecar", default="", help="host:port of a kv-sidecar")
    return parser


if __name__ == "__main__":
    main()
