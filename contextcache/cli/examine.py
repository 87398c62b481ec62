"""`context-cache doctor`: exit 0 without a fault, 1 if a check failed, 2 if nothing could be checked."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from contextcache.cli import output
from contextcache.cli.options import Option, front_url, key_in
from contextcache.cli.place import find_place
from contextcache.cli.release import own_version
from contextcache.doctor.examination import Plan, examine
from contextcache.doctor.finding import Finding, as_json, exit_status, lines_of, summary
from contextcache.doctor.front import ApiKey
from contextcache.doctor.would_inject import patch_of
from contextcache.doctor.would_inject import would_inject as previewed

_PARTS_DIR = Path("/etc/context-cache/tls")
"""Directory where the chart mounts the certificate of the release's parts."""
_NOT_CHECKED = 2
_OfManifest = partial(Option, rich_help_panel="Manifests")


def doctor(  # noqa: PLR0913  # its options
    url: Annotated[
        str | None,
        Option(
            parser=front_url,
            metavar="URL",
            help="URL of the deployment, such as https://llm.example.org. Default: the server that `login` stored.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, Option(help="File with an API key in plain text. It is never printed.")
    ] = None,
    story: Annotated[bool, Option("--story", help="Create a context, ask it and delete it.")] = False,
    model: Annotated[str, Option(help="Model to ask. Default: the first served model.")] = "",
    wait_s: Annotated[float, typer.Option(min=0, help="Seconds to wait until the deployment is ready.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=0, help="Seconds to wait for one answer.")] = 60,
    json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
    ca_file: Annotated[Path | None, Option(help="PEM certificates of more CAs for the front's certificate.")] = None,
    server_name: Annotated[str, Option(help="Name in the front's certificate if it differs from the host.")] = "",
    tls_dir: Annotated[
        Path | None,
        Option(help=f"Directory with tls.crt, tls.key and ca.crt of the release. Default: {_PARTS_DIR} if it exists."),
    ] = None,
    gateway_metrics: Annotated[str, Option(help="URL of a gateway's metrics port, such as http://10.0.0.7:9090.")] = "",
    injector_metrics: Annotated[
        str, Option(help="URL of a pod injector's metrics port. Shows the skipped pods and the reasons.")
    ] = "",
    manager_metrics: Annotated[
        str, Option(help="URL of a context manager's metrics port. Shows the settings of its Redis.")
    ] = "",
    manager: Annotated[str, Option(metavar="HOST:PORT", help="gRPC address of a context manager.")] = "",
    sidecar: Annotated[str, Option(metavar="HOST:PORT", help="gRPC address of a kv-sidecar.")] = "",
    would_inject: Annotated[
        str, _OfManifest(metavar="FILE", help="Judge the pods of a manifest as the injector would. - reads stdin.")
    ] = "",
    injector_parts: Annotated[
        Path | None,
        _OfManifest(help="parts.json of the release, for --would-inject. Default: the chart's defaults."),
    ] = None,
    release_namespace: Annotated[
        str, _OfManifest(help="Namespace of the release, for --would-inject. Default: any.")
    ] = "",
    show_patch: Annotated[bool, _OfManifest("--show-patch", help="Print JSON patches too.")] = False,
) -> None:
    """Examine a running deployment from outside: list its faults and their cures."""
    try:
        if would_inject:
            kind, examined = "manifest", would_inject
            findings = _printed(
                previewed(would_inject, parts_file=injector_parts, namespace=release_namespace, with_patch=show_patch),
                as_lines=not json,
            )
        else:
            kind, key = "url", key_in(api_key_file) if api_key_file else None
            if url is None:
                url, stored_key = find_place(None, None)
                key = key or stored_key
            examined = url
            plan = Plan(
                url=url,
                version=own_version(),
                key=None if key is None else ApiKey(key),
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
            findings = _printed(examine(plan), as_lines=not json)
    except (OSError, ValueError) as exc:
        output.say(f"cannot {f'judge {would_inject}' if would_inject else f'check {url}'}: {exc}")
        raise typer.Exit(_NOT_CHECKED) from exc
    typer.echo(as_json(examined, findings, kind=kind) if json else f"\n{summary(findings)}")
    raise typer.Exit(exit_status(findings))


def _printed(findings: Iterable[Finding], *, as_lines: bool) -> list[Finding]:
    """Print each finding as it arrives, and return them all."""
    found = []
    for finding in findings:
        found.append(finding)
        for line in [*lines_of(finding), *filter(None, [patch_of(finding)])] if as_lines else ():
            typer.echo(line)
    return found
