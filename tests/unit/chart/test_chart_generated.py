"""The chart's generated files: every key has its default, its meaning and its row; nothing in them is said by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from pydantic import Field

from context_manager.settings import ManagerSettings
from deploy.chart.__main__ import CHART
from deploy.chart.chart_settings import CHART_SETTINGS, settings_schema
from deploy.chart.generate_readme import readme
from deploy.chart.generate_schema import values_schema
from deploy.chart.generate_values import values_yaml
from deploy.chart.section import Section
from deploy.chart.values import ChartValues
from gateway.settings import GatewaySettings
from vllm_plugin.turn.settings import TurnSettings

REPEATED = {
    "drainTimeoutS": [GatewaySettings.model_fields["drain_timeout_s"].default],
    "drainS": [ManagerSettings.model_fields["drain_s"].default],
    "maxBodyBytes": [
        GatewaySettings.model_fields["max_body_bytes"].default,
        TurnSettings.model_fields["max_body_bytes"].default,
    ],
}


def keys(section: Section, prefix: str = "") -> Iterator[str]:
    """Return every key of the values with its path."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        key = f"{prefix}{field.alias or name}"
        if isinstance(value, Section):
            yield from keys(value, f"{key}.")
        else:
            yield key


def test_values_yaml_says_the_defaults_of_the_models_and_nothing_else():
    assert yaml.safe_load(values_yaml(ChartValues)) == ChartValues().model_dump(by_alias=True)


def test_every_key_of_values_yaml_stands_below_its_meaning():
    lines = values_yaml(ChartValues).splitlines()
    top = [number for number, line in enumerate(lines) if re.match(r"[a-zA-Z]+:", line)]

    assert len(top) > 20
    assert [lines[number] for number in top if not lines[number - 1].startswith("#")] == []


def test_every_key_has_a_row_in_the_readme():
    text = readme(ChartValues)
    of_pods = {"podAnnotations", "podLabels", "nodeSelector", "tolerations", "affinity", "priorityClassName"}
    missing = [
        key
        for key in keys(ChartValues())
        if f"| `{key}` |" not in text and key.rpartition(".")[2] not in {*of_pods, "topologySpread", "extraEnv"}
    ]

    assert missing == []
    assert all(f"| `{key}` |" in text for key in of_pods)


def test_a_row_of_the_readme_stays_a_row_whatever_stands_in_it():
    class Odd(Section):
        key: str = Field("a|b", description="one | two, <three>")

    assert r'| `key` | `"a\|b"` | one \| two, &lt;three> |' in readme(Odd).splitlines()


def test_the_schema_says_nothing_but_the_keys_in_their_titles_place():
    schema = json.loads(values_schema(ChartValues))

    def titles(node: Any) -> Iterator[Any]:
        if isinstance(node, dict):
            yield from (node["title"] for _ in [0] if isinstance(node.get("title"), str))
            for inner in node.values():
                yield from titles(inner)
        elif isinstance(node, list):
            for inner in node:
                yield from titles(inner)

    assert list(titles(schema)) == ["Values of the context-cache chart"]


def test_a_map_of_settings_keeps_bounds_and_meaning_of_the_fields_and_leaves_out_what_the_chart_sets():
    properties = settings_schema(GatewaySettings, "GATEWAY_")["properties"]

    assert properties["saturatedKvUsage"]["exclusiveMinimum"] == 0
    assert properties["saturatedKvUsage"]["maximum"] == 1
    assert properties["saturatedKvUsage"]["description"]
    assert not {"port", "logLevel", "secretFile", "title"} & set(properties)
    assert all(reason for fields in CHART_SETTINGS.values() for reason in fields.values())


@pytest.mark.parametrize("key", REPEATED)
def test_defaults_that_the_chart_s_checks_repeat_are_those_of_the_processes(key):
    text = (CHART / "templates" / "validate.yaml").read_text()
    found = [float(number) for number in re.findall(rf'dig "{key}" ([0-9.]+) ', text)]

    assert found == REPEATED[key]
