"""files/envoy.yaml of the chart and the defaults of its values: what `deploy.envoy` writes, with holes in it.

The bootstrap is made from settings that are marks: a number or a name that occurs nowhere else, and after dumping each
mark becomes a template expression. What is there only with an option (TLS, traces, an access log) is found by making
the bootstrap with and without it; the difference goes into an `if`. tests/chart renders the file for many values and
compares it with what `deploy.envoy` itself makes of the same settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic.alias_generators import to_camel

from deploy.chart.chart_settings import CHART_SETTINGS
from deploy.envoy.bootstrap import bootstrap
from deploy.envoy.settings import EnvoySettings, GatewayAddress
from deploy.envoy.tls import secrets
from gateway.paths import ENGINE_CALLS

FOLDER = "/etc/context-cache/envoy"
"""Where the ConfigMap is mounted: the bootstrap and the SDS files beside it."""
TLS_FOLDER = "/etc/context-cache/tls"
LISTEN_TLS_FOLDER = "/etc/context-cache/listen-tls"
METRICS_PORT = 9090
KEYS = {
    "api_keys_file": "/etc/context-cache/keys/api-keys.json",
    # Where the keeper may write.
    "api_keys_filter_file": "/tmp/envoy-keys/filter.json",
}
"""A release always has API keys."""

_GATEWAY_HOST, _PODS_HOST, _TRACES_HOST = "gateway.mark.", "pods.mark.", "traces.mark"
_PODS_PORT, _TRACES_PORT, _LISTEN_PORT = 64901, 64902, 64903
_RATIO = 0.654321
_METHOD, _PATH = "MARK", "/mark/engine-path"
_ORIGIN = "https://origin.mark"
_INFERENCE_PATHS = sorted(path for path in (call.split()[1] for call in ENGINE_CALLS) if not path.startswith("/v1/"))
"""Routes that know prefixes need these named."""
_STRINGS = {
    _GATEWAY_HOST: "gatewayHost",
    _PODS_HOST: "podsHost",
    _TRACES_HOST: "tracesHost",
    "server-name.mark": "tlsServerName",
    "/mark/access-log": "accessLog",
    "/mark/traces-ca": "tracesCaFile",
}
_PORTS = {"podsPort": _PODS_PORT, "tracesPort": _TRACES_PORT, "listenPort": _LISTEN_PORT}
_HEAD = """\
{{/* Generated from deploy/envoy by `python -m deploy.chart`; not to be edited. The data of Envoy's ConfigMap. */}}
{{- $settings := .settings }}
"""

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Optional:
    """A part of the bootstrap that is there when a condition holds."""

    condition: str
    value: Any


@dataclass(frozen=True)
class Option:
    """A condition in the chart, the settings that it stands for, and the condition that it needs."""

    condition: str
    settings: Settings
    needs: Settings


def envoy_template() -> str:
    """Return the template: one key a file of the ConfigMap. Its context is a dict with `settings`, see _envoy.tpl."""
    text = _HEAD
    for name, tree in _files().items():
        body = "".join(f"  {line}\n" for line in _dumped(_unwrapped(tree)).splitlines())
        block = f"{name}: |\n{body}"
        if isinstance(tree, Optional):
            block = f"{{{{- if {tree.condition} }}}}\n{block}{{{{- end }}}}\n"
        text += block
    return text


def envoy_defaults() -> str:
    """Return what counts where no value says otherwise, as JSON: the defaults of the settings left to the user."""
    elsewhere = {"engine_paths", "cors_origins", "max_body_bytes"}
    defaults = {
        to_camel(name): field.get_default()
        for name, field in EnvoySettings.model_fields.items()
        if name not in CHART_SETTINGS["ENVOY_"] or name in elsewhere
    }
    return json.dumps({**defaults, "inferencePaths": _INFERENCE_PATHS}, indent=2) + "\n"


def _files() -> dict[str, Any]:
    """Return every file as a tree, in which what is optional is marked so."""
    files: dict[str, Any] = {}
    for option in [Option("", {}, {}), *_options()]:
        without = _made(_settings(option.needs))
        made = _made(_settings({**option.needs, **option.settings})) if option.condition else without
        files = _merged(files or without, without, made, option.condition)
    return files


def _options() -> list[Option]:
    traces = {"traces_endpoint": f"http://{_TRACES_HOST}:{_TRACES_PORT}", "traces_sample_ratio": _RATIO}
    tls = {f"tls_{key}_file": f"{TLS_FOLDER}/{name}" for key, name in _PEM_FILES.items()}
    listen = {f"listen_{key}_file": f"{LISTEN_TLS_FOLDER}/{name}" for key, name in _PEM_FILES.items() if key != "ca"}
    return [
        Option("$settings.tls", {**tls, "tls_server_name": "server-name.mark"}, {}),
        Option("$settings.listenTls", listen, {}),
        Option("$settings.accessLog", {"access_log": "/mark/access-log"}, {}),
        Option("$settings.failOpenStateless", {"fail_open_stateless": True}, {}),
        Option("$settings.corsOrigins", {"cors_origins": (_ORIGIN,)}, {}),
        Option("$settings.tracesHost", traces, {}),
        Option("$settings.tracesTls", {"traces_endpoint": f"https://{_TRACES_HOST}:{_TRACES_PORT}"}, traces),
    ]


_PEM_FILES = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}


def _made(settings: EnvoySettings) -> dict[str, Any]:
    return {"envoy.yaml": bootstrap(settings), **secrets(settings)}


def _settings(more: Settings) -> EnvoySettings:
    """Return settings of marks, all options off but those in `more`."""
    return EnvoySettings(
        **{
            "gateways": (GatewayAddress(http=f"{_GATEWAY_HOST}:8000", ext_proc=f"{_GATEWAY_HOST}:9002"),),
            "pods": (f"{_PODS_HOST}:{_PODS_PORT}",),
            "listen_host": "0.0.0.0",
            "listen_port": _LISTEN_PORT,
            "metrics_listen": f"0.0.0.0:{METRICS_PORT}",
            "engine_paths": (f"{_METHOD} {_PATH}",),
            "access_log": "",
            "fail_open_stateless": False,
            "traces_ca_file": "/mark/traces-ca",
            "sds_dir": FOLDER,
            **KEYS,
            **_number_marks(),
            **more,
        }
    )


def _number_marks() -> dict[str, int]:
    """Return a number for every setting that is one; large enough for each bound, and in no bootstrap otherwise."""
    chosen = {"admin_port", "listen_port", "traces_sample_ratio"}
    names = [
        name
        for name, field in EnvoySettings.model_fields.items()
        if field.annotation in (int, float) and name not in chosen
    ]
    return {name: (1 << 28) + 64_001 + number for number, name in enumerate(names)}


def _merged(tree: Any, without: Any, made: Any, condition: str) -> Any:
    """Return `tree` with what `made` has and `without` has not, under a condition."""
    if isinstance(tree, Optional):
        return Optional(tree.condition, _merged(tree.value, without, made, condition))
    if without == made:
        return tree
    if isinstance(made, dict):
        assert without.keys() <= made.keys(), "an option takes something away"
        changed = {key: _merged(tree[key], without[key], made[key], condition) for key in without}
        added = {key: Optional(condition, made[key]) for key in made.keys() - without.keys()}
        return {**tree, **changed, **{key: added[key] for key in made if key in added}}
    if isinstance(made, list):
        return _merged_list(tree, without, made, condition)
    assert (made, without) == (True, False), "an option changes a value that is no switch"
    return f"@switch {condition}@"


def _merged_list(tree: list[Any], without: list[Any], made: list[Any], condition: str) -> list[Any]:
    """Merge a list that an option leaves as long as it is, item by item, or makes longer at its end."""
    if len(made) == len(without):
        merged = [_merged(*items, condition) for items in zip(tree, without, made, strict=False)]
        return [*merged, *tree[len(made) :]]
    assert made[: len(without)] == without, "an option changes a list elsewhere than at its end"
    return [*tree, *(Optional(condition, item) for item in made[len(without) :])]


def _unwrapped(tree: Any) -> Any:
    return tree.value if isinstance(tree, Optional) else tree


def _dumped(tree: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(_with_markers(tree, iter(range(1 << 20))), sort_keys=False, width=1 << 20)
    assert "{{" not in text
    return _without_marks(text)


def _with_markers(tree: Any, numbers: Iterator[int]) -> Any:
    """Return plain data in which markers stand before and after what is optional or repeated."""
    if isinstance(tree, dict):
        found: dict[str, Any] = {}
        for key, value in tree.items():
            inner = _with_markers(_unwrapped(value), numbers)
            if isinstance(value, Optional):
                assert found, "a marker must not be the first key"
                found |= {f"@{next(numbers)} if {value.condition}@": None, key: inner, f"@{next(numbers)} end@": None}
            else:
                found[key] = inner
        return found
    if isinstance(tree, list):
        return [item for value in tree for item in _list_item(value, numbers)]
    return tree


def _list_item(value: Any, numbers: Iterator[int]) -> list[Any]:
    inner = _with_markers(_unwrapped(value), numbers)
    if isinstance(value, Optional):
        return [f"@0 if {value.condition}@", inner, "@0 end@"]
    if isinstance(value, dict) and value.get("match", {}).get("path") == _PATH:
        return ["@0 range $call := $settings.enginePaths@", inner, "@0 end@"]
    if value == {"exact": _ORIGIN}:
        return ["@0 range $origin := $settings.corsOrigins@", inner, "@0 end@"]
    return [inner]


def _without_marks(text: str) -> str:
    text = re.sub(r"^( *)(?:- )?'@\d+ (.*?)@'(?:: null)?$", r"\1{{- \2 }}", text, flags=re.MULTILINE)
    text = re.sub(r"'@switch (\S+)@'", r"{{ toJson \1 }}", text)
    for number, mark in enumerate((f"exact: {_METHOD}", f"path: {_PATH}")):
        text = text.replace(mark, f'{mark.split()[0]} {{{{ index (splitList " " $call) {number} | toJson }}}}')
    text = text.replace(_ORIGIN, "{{ toJson $origin }}")
    for mark, name in _STRINGS.items():
        text = text.replace(mark, f"{{{{ toJson $settings.{name} }}}}")
    ratio = "{{ round (mulf $settings.tracesSampleRatio 1000000) 0 | int }}"
    text = text.replace(f"numerator: {round(_RATIO * 1_000_000)}", f"numerator: {ratio}")
    for name, number in {**_PORTS, **{to_camel(name): number for name, number in _number_marks().items()}}.items():
        duration = f'{{{{ include "context-cache.envoy.duration" $settings.{name} }}}}'
        text = re.sub(rf"\b{number}s\b", duration, text)
        text = re.sub(rf"\b{number}(?:\.0)?\b", f"{{{{ toJson $settings.{name} }}}}", text)
    assert "mark" not in text.replace("$settings", ""), "a mark is left"
    return text
