"""`context-cache doctor`: exit 0 when all works, 1 when a check failed, 2 when nothing could be checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from contextcache.cli import output
from contextcache.cli.place import find_place
from contextcache.cli.release import own_version
from contextcache.doctor.examination import Plan, examine
from contextcache.doctor.finding import Finding
from contextcache.doctor.front import ApiKey
from contextcache.doctor.report import as_json, exit_status, lines_of, summary
from contextcache.doctor.would_inject import NotJudged, patch_of
from contextcache.doctor.would_inject import would_inject as previewed

_PARTS_DIR = Path("/etc/context-cache/tls")
"""Directory where the chart mounts the certificate of the release's parts."""
_NOT_CHECKED = 2


def front_url(text: str) -> str:
    """Return a URL that may be printed. Raises BadParameter."""
    if not text.startswith(("http://", "https://")):
        raise typer.BadParameter("must begin with http:// or https://")
    if "@" in text.partition("://")[2].partition("/")[0]:
        # The report prints the URL, and a password must not be printed.
        raise typer.BadParameter("must not contain a user or password; pass API keys with --api-key-file")
    return text


_MANIFESTS = "Manifests"
_PREVIEW: Any = {"show_default": False, "rich_help_panel": _MANIFESTS}
_URL: Any = {"parser": front_url, "metavar": "URL", "show_default": False}


def doctor(  # noqa: PLR0913  # its options
    url: Annotated[
        str | None,
        typer.Option(
            help="URL of the deployment, such as https://llm.example.org. Default: the server that `login` stored.",
            **_URL,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with an API key in plain text. It is never printed.", show_default=False)
    ] = None,
    story: Annotated[bool, typer.Option("--story", help="Create a context, ask it and delete it.")] = False,  # noqa: FBT002  # a flag
    model: Annotated[str, typer.Option(help="Model to ask. Default: the first served model.", show_default=False)] = "",
    wait_s: Annotated[float, typer.Option(min=0, help="Seconds to wait until the deployment is ready.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=0, help="Seconds to wait for one answer.")] = 60,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,  # noqa: FBT002
    ca_file: Annotated[
        Path | None,
        typer.Option(help="PEM certificates of more CAs for the front's certificate.", show_default=False),
    ] = None,
    server_name: Annotated[
        str, typer.Option(help="Name in the front's certificate if it differs from the host.", show_default=False)
    ] = "",
    tls_dir: Annotated[
        Path | None,
        typer.Option(
            help=f"Directory with tls.crt, tls.key and ca.crt of the release. Default: {_PARTS_DIR} if it exists.",
            show_default=False,
        ),
    ] = None,
    gateway_metrics: Annotated[
        str, typer.Option(help="URL of a gateway's metrics port, such as http://10.0.0.7:9090.", show_default=False)
    ] = "",
    injector_metrics: Annotated[
        str,
        typer.Option(
            help="URL of a pod injector's metrics port. Shows the skipped pods and the reasons.", show_default=False
        ),
    ] = "",
    manager_metrics: Annotated[
        str,
        typer.Option(
            help="URL of a context manager's metrics port. Shows the settings of its Redis.", show_default=False
        ),
    ] = "",
    manager: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="gRPC address of a context manager.", show_default=False)
    ] = "",
    sidecar: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="gRPC address of a kv-sidecar.", show_default=False)
    ] = "",
    would_inject: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Judge the pods of a manifest as the injector would. - reads stdin.", **_PREVIEW
        ),
    ] = "",
    injector_parts: Annotated[
        Path | None,
        typer.Option(help="parts.json of the release, for --would-inject. Default: the chart's defaults.", **_PREVIEW),
    ] = None,
    release_namespace: Annotated[
        str, typer.Option(help="Namespace of the release, for --would-inject. Default: any.", **_PREVIEW)
    ] = "",
    show_patch: Annotated[bool, typer.Option("--show-patch", help="Print JSON patches too.", **_PREVIEW)] = False,  # noqa: FBT002
) -> None:
    """Examine a running deployment from outside: list its faults and their cures."""
    if would_inject:
        options = {"parts_file": injector_parts, "namespace": release_namespace, "with_patch": show_patch}
        raise typer.Exit(_preview(would_inject, as_lines=not json, **options))
    key = None
    if url is None:
        url, known_key = find_place(None, None)
        key = ApiKey(known_key)
    try:
        if api_key_file is not None:
            key = _key_of(api_key_file)
        plan = Plan(
            url=url,
            version=own_version(),
            key=key,
            model=model,
            with_story=story,
            wait_s=wait_s,
            timeout_s=timeout_s,
            metrics_url=gateway_metrics,
            injector_url=injector_metrics,
            manager_url=manager_metrics,
            manager=manager,
            sidecar=sidecar,
            ca_file=ca_file,
            parts_dir=tls_dir or (_PARTS_DIR if _PARTS_DIR.is_dir() else None),
            server_name=server_name,
        )
        findings = _examine(plan, as_lines=not json)
    except (OSError, ValueError) as exc:
        output.say(f"cannot check {url}: {exc}")
        raise typer.Exit(_NOT_CHECKED) from exc
    typer.echo(as_json(url, findings) if json else f"\n{summary(findings)}")
    raise typer.Exit(exit_status(findings))


def _preview(manifest: str, *, as_lines: bool, **options: Any) -> int:
    """Print whether the injector would take the pods of a manifest; return the exit code."""
    try:
        findings = [*previewed(manifest, **options)]
    except NotJudged as exc:
        output.say(f"cannot judge {manifest}: {exc}")
        return _NOT_CHECKED
    if not as_lines:
        typer.echo(as_json(manifest, findings, kind="manifest"))
        return exit_status(findings)
    for finding in findings:
        for line in [*lines_of(finding), *filter(None, [patch_of(finding)])]:
            typer.echo(line)
    typer.echo(f"\n{summary(findings)}")
    return exit_status(findings)


def _key_of(file: Path) -> ApiKey:
    key = file.read_text().strip()
    if not key:
        raise ValueError(f"{file} is empty")
    return ApiKey(key)


def _examine(plan: Plan, *, as_lines: bool) -> list[Finding]:
    findings = []
    for finding in examine(plan):
        findings.append(finding)
        if as_lines:
            for line in lines_of(finding):
                typer.echo(line)
    return findings
