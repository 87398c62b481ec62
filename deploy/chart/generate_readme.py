"""README.md of the chart: how to install it, and a table of values for each section."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deploy.chart.generate_values import own_first
from deploy.chart.pod_values import Pod
from deploy.chart.section import Section

_HEAD = """\
# context-cache

Conversations with a handle for vLLM on Kubernetes: gateway, context-manager, Envoy, and a kv-sidecar beside every vLLM
pod.

Written by `python -m deploy.chart` from the models in `deploy/chart`; `values.yaml` and `values.schema.json` come from
the same place, and Helm refuses what the schema does not know.

## Install

Kubernetes 1.30 or later, Helm 3 or 4. A release needs a Redis or Valkey and vLLM pods; this one has both of its own, to
try it:

```sh
helm install context-cache charts/context-cache --namespace llm --create-namespace \\
  --set image.registry=registry.example.org --set valkey.enabled=true \\
  --set engine.enabled=true --set engine.model=Qwen/Qwen3-0.6B
helm --namespace llm test context-cache     # creates a context, asks it, deletes it
```

For real use, in a values file:

```yaml
image: {registry: registry.example.org}
redis: {existingSecret: redis-url}          # the whole URL, password included
auth: {existingSecret: api-keys}            # {"keys": [{"sha256": "…", "tenant": "…"}]}
signing: {existingSecret: signing}          # 32 bytes or more
tls: {enabled: true, certManager: {enabled: true, issuerRef: {name: internal-ca}}}
monitoring: {podMonitor: {enabled: true}, prometheusRule: {enabled: true}, dashboard: {enabled: true}}
injector: {enabled: true}                   # for vLLM Deployments you have; or engine.enabled
```

Secrets that no value names are made once and kept by `helm upgrade`, which looks them up in the cluster. Tools that
render without one (`helm template`, Argo CD) would make new ones each time: name existing Secrets there.

## Values
"""
_PODS = """
### Pods

Every component with pods has these keys too: `{components}`.
"""
_SETTINGS = {
    "gateway.settings": "gateway",
    "contextManager.settings": "context-manager",
    "envoy.settings": "envoy",
    "sidecar.settings": "kv-sidecar",
    "engine.turn": "turn-middleware",
    "engine.connector": "connector",
    "injector.settings": "injector",
}
"""Maps of settings, and their headings in docs/operations/settings.md."""


def readme(values: type[Section]) -> str:
    """Return the text of the README."""
    whole = values()
    sections = [
        (name, field) for name, field in values.model_fields.items() if isinstance(getattr(whole, name), Section)
    ]
    single = [row for row in _rows(whole, "") if "." not in row[0].replace("`", "")]
    plain = {field.alias or name for name, field in values.model_fields.items() if (name, field) not in sections}
    parts = [_HEAD, "### The release", "", *_table(row for row in single if row[0].strip("`") in plain)]
    components = [field.alias or name for name, field in sections if isinstance(getattr(whole, name), Pod)]
    parts += [_PODS.format(components="`, `".join(components)), *_table(_rows(Pod(), ""))]
    for name, field in sections:
        key = field.alias or name
        parts += ["", f"### {key}", "", f"{_sentence(field)}", "", *_table(_rows(getattr(whole, name), f"{key}."))]
        parts += _settings(type(getattr(whole, name)), key)
    return "\n".join(parts) + "\n"


def _rows(section: Section, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield key, default and meaning; a component's rows leave out what the section Pods says."""
    for name, field in own_first(type(section)):
        if isinstance(section, Pod) and type(section) is not Pod and _is_pods_own(type(section), name):
            continue
        value = getattr(section, name)
        key = f"{prefix}{field.alias or name}"
        if isinstance(value, Section):
            yield from _rows(value, f"{key}.")
        else:
            yield f"`{key}`", f"`{_text(value)}`", field.description or ""


def _is_pods_own(section: type[Section], name: str) -> bool:
    return (
        name in Pod.model_fields
        and section.model_fields[name].description == Pod.model_fields[name].description
        and (
            section.model_fields[name].get_default(call_default_factory=True)
            == Pod.model_fields[name].get_default(call_default_factory=True)
        )
    )


def _settings(section: type[Section], key: str) -> Iterator[str]:
    """Yield where the keys of each map of settings stand: they are the fields of a process, listed once."""
    for name in section.model_json_schema()["properties"]:
        if anchor := _SETTINGS.get(f"{key}.{name}"):
            yield from ("", f"Keys of `{key}.{name}`: [settings](../../docs/operations/settings.md#{anchor}).")


def _table(rows: Any) -> Iterator[str]:
    yield "| key | default | meaning |"
    yield "| --- | --- | --- |"
    for row in rows:
        yield "| " + " | ".join(_cell(cell) for cell in row) + " |"


def _cell(text: str) -> str:
    text = text.replace("|", "\\|").replace("\n", " ")
    return text if text.startswith("`") else text.replace("<", "&lt;")


def _text(value: Any) -> str:
    def plain(inner: object) -> object:
        return inner.model_dump(by_alias=True) if isinstance(inner, BaseModel) else str(inner)

    return json.dumps(value, default=plain, ensure_ascii=False)


def _sentence(field: FieldInfo) -> str:
    text = (field.description or "").rstrip(".")
    return text[:1].upper() + text[1:] + "."
