"""What follows from the chart's values.yaml: each key has meaning, type and row; a slip is told by its line."""

from __future__ import annotations

import json
import re

import pytest

from context_manager.settings import ManagerSettings
from deploy.chart.__main__ import CHART
from deploy.chart.process_settings import CHART_SETTINGS, settings_schema
from deploy.chart.values import BadValues, maps_text, read_values, schema_text, tables
from gateway.settings import GatewaySettings
from vllm_plugin.turn.settings import TurnSettings

TEXT = (CHART / "values.yaml").read_text()
REPEATED = {
    "drainTimeoutS": [GatewaySettings.model_fields["drain_timeout_s"].default],
    "drainS": [ManagerSettings.model_fields["drain_s"].default],
    "maxBodyBytes": [
        GatewaySettings.model_fields["max_body_bytes"].default,
        TurnSettings.model_fields["max_body_bytes"].default,
    ],
}


def of(text: str) -> dict:
    """Return the schema that follows from a text of values."""
    return json.loads(schema_text(read_values(text)))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("key: 1\n", "line 1: key has no meaning"),
        ("# -- one\nouter:\n  inner: 1\n", "line 3: outer.inner has no meaning"),
        ("# -- one\nkey: {}\n", "line 2: key is an empty map"),
        ("# -- one\nkey: []\n", "line 2: the default of key does not say its type"),
        ("# -- one\nkey: 1  # @schema nothing\n", "types.yaml has no nothing"),
        ("# -- one\nkey: []  # @schema [nothing]\n", "types.yaml has no nothing"),
    ],
)
def test_a_key_without_its_meaning_or_its_type_is_refused(text, told):
    with pytest.raises(BadValues, match=re.escape(told)):
        schema_text(read_values(text))


def test_a_key_takes_what_its_default_is_and_what_is_named_behind_it():
    schema = of(
        "# -- how many\n# of them\nnumber: 1  # @schema {minimum: 1}\n"
        "# -- a section\nouter:\n  # -- yes or no\n  flag: true\n  # -- some\n  names: []  # @schema [name]\n"
    )
    outer = schema["properties"]["outer"]

    assert schema["properties"]["number"] == {"description": "how many of them", "type": "integer", "minimum": 1}
    assert outer["properties"]["flag"]["type"] == "boolean"
    assert outer["properties"]["names"]["items"] == {"$ref": "#/$defs/name"}
    assert list(schema["$defs"]) == ["name"]
    assert (schema["additionalProperties"], outer["additionalProperties"]) == (False, False)


def test_only_maps_that_templates_look_into_must_stay_maps():
    text = (
        "# -- a\nouter:\n  # -- b\n  settings: {}  # @schema settings.GATEWAY_\n  # -- c\n  any: {}  # @schema object\n"
    )

    assert json.loads(maps_text(read_values(text))) == ["outer", "outer.settings"]


def test_every_key_has_a_row_in_the_readme():
    text = tables(read_values(TEXT))

    def paths(keys):
        for key in keys:
            yield from [key.path] if key.keys is None else paths(key.keys)

    assert [path for path in paths(read_values(TEXT)) if text.count(f"| `{path}` |") != 1] == []


def test_a_row_of_the_readme_stays_a_row_whatever_stands_in_it():
    text = TEXT + '\n# -- one | two, <three>\nkey: "a|b"\n'

    assert r'| `key` | `"a\|b"` | one \| two, &lt;three> |' in tables(read_values(text)).splitlines()


def test_a_map_of_settings_keeps_bounds_and_meaning_of_the_fields_and_leaves_out_what_the_chart_sets():
    properties = settings_schema("GATEWAY_")["properties"]

    assert properties["saturatedKvUsage"]["exclusiveMinimum"] == 0
    assert properties["saturatedKvUsage"]["maximum"] == 1
    assert properties["saturatedKvUsage"]["description"]
    assert not {"port", "logLevel", "secretFile", "title"} & set(properties)
    assert all(reason for fields in CHART_SETTINGS.values() for reason in fields.values())


@pytest.mark.parametrize("key", REPEATED)
def test_defaults_that_the_chart_s_checks_repeat_are_those_of_the_processes(key):
    text = "".join(path.read_text() for path in sorted((CHART / "templates").glob("*.yaml")))
    found = [float(number) for number in re.findall(rf'dig "{key}" ([0-9.]+) ', text)]

    assert found == REPEATED[key]
