"""Items of a response's input: our tables say what the engine's own types say."""

import json
import typing
from collections import defaultdict
from contextlib import suppress

import pytest
import typing_extensions
from openai.types.responses import ResponseInputItemParam, ResponseOutputItem
from pydantic import ValidationError
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from contextcache.errors import InvalidRequest
from contextcache.input_items import (
    FLAT,
    FLAT_OUTPUT_MESSAGE,
    ITEMS_MAX,
    REQUIRED,
    UNCHECKED_MAX,
    check_items_of_input,
)

GIVEN_BY_THE_ENGINE = {"reasoning": {"id"}}
TEXT, IMAGE = {"type": "input_text", "text": "x"}, {"type": "input_image", "detail": "auto", "image_url": "data:,"}
FILE = {"type": "input_file", "filename": "x", "file_data": "data:,"}
SAID = {"type": "output_text", "text": "x", "annotations": [], "logprobs": None}
ANNOTATIONS = [
    {"type": "file_citation", "file_id": "f", "filename": "x", "index": 0},
    {"type": "url_citation", "start_index": 0, "end_index": 1, "title": "x", "url": "x"},
    {"type": "container_file_citation", "container_id": "c", "file_id": "f", "filename": "x", "start_index": 0,
     "end_index": 1},
    {"type": "file_path", "file_id": "f", "index": 0},
]  # fmt: skip
TOP_LOGPROB = {"token": "x", "bytes": [120], "logprob": -0.5}
LOGPROB = TOP_LOGPROB | {"top_logprobs": [TOP_LOGPROB]}
FLAT_ITEMS = [
    {"role": "user", "content": "x"},
    {"role": "developer", "content": [TEXT, IMAGE, FILE]},
    {"type": "message", "role": "user", "content": [TEXT], "phase": None},
    {"type": "message", "role": "assistant", "content": [SAID]},
    {"type": "message", "role": "assistant", "content": [SAID | {"annotations": ANNOTATIONS, "logprobs": [LOGPROB]}]},
    {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "x"}], "id": "m",
     "status": "completed", "phase": "final_answer"},
    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c", "id": "fc", "status": "completed",
     "namespace": None, "async": None, "caller": None},
    {"type": "function_call_output", "call_id": "c", "output": "x", "id": None, "status": None, "name": None},
    {"type": "function_call_output", "call_id": "c", "output": [TEXT, IMAGE, FILE]},
    {"type": "custom_tool_call", "call_id": "c", "input": "x", "name": "f", "id": "i"},
    {"type": "custom_tool_call_output", "call_id": "c", "output": "x", "id": "i"},
    {"type": "custom_tool_call_output", "call_id": "c", "output": [TEXT]},
    {"type": "reasoning", "summary": []},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}], "status": "completed",
     "content": [{"type": "reasoning_text", "text": "x"}], "encrypted_content": None},
    {"type": "item_reference", "id": "x"},
    {"id": "x"},
    {"type": "file_search_call", "id": "f", "queries": ["x"], "status": "completed", "results": None},
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "open_page", "url": "x"}},
    {"type": "web_search_call", "id": "w", "status": "completed",
     "action": {"type": "find_in_page", "url": "x", "pattern": "x"}},
]  # fmt: skip
SCREENSHOT = {"type": "computer_screenshot", "image_url": "data:,"}
NESTED_ITEMS = [
    {"type": "file_search_call", "id": "f", "queries": ["x"], "status": "completed",
     "results": [{"file_id": "f", "text": "x"}]},
    {"type": "computer_call", "id": "i", "call_id": "c", "pending_safety_checks": [], "status": "completed",
     "action": {"type": "click", "button": "left", "x": 1, "y": 1}},
    {"type": "computer_call_output", "call_id": "c", "output": SCREENSHOT},
    {"type": "code_interpreter_call", "id": "i", "container_id": "c", "code": None, "outputs": None,
     "status": "completed"},
    {"type": "image_generation_call", "id": "i", "status": "completed", "result": None},
    {"type": "tool_search_call", "arguments": {}},
    {"type": "tool_search_output", "tools": []},
    {"type": "additional_tools", "role": "developer", "tools": []},
    {"type": "configuration_update"},
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "compaction_trigger"},
    {"type": "local_shell_call", "id": "i", "call_id": "c", "status": "completed",
     "action": {"type": "exec", "command": ["ls"], "env": {}}},
    {"type": "local_shell_call_output", "id": "i", "output": "x"},
    {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
    {"type": "shell_call_output", "call_id": "c",
     "output": [{"stdout": "", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
    {"type": "apply_patch_call", "call_id": "c", "status": "completed",
     "operation": {"type": "delete_file", "path": "x"}},
    {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"},
    {"type": "mcp_list_tools", "id": "i", "server_label": "x", "tools": []},
    {"type": "mcp_approval_request", "id": "i", "arguments": "{}", "name": "x", "server_label": "x"},
    {"type": "mcp_approval_response", "approval_request_id": "i", "approve": True},
    {"type": "mcp_call", "id": "i", "arguments": "{}", "name": "x", "server_label": "x", "error": None},
    {"type": "program", "id": "i", "call_id": "c", "code": "x", "fingerprint": "x"},
    {"type": "program_output", "id": "i", "call_id": "c", "result": "x", "status": "completed"},
]  # fmt: skip
ODD = (None, 5, True, "odd", {}, [], [{}], [5], ["odd"], [TEXT], [SAID], [TEXT, SAID], [{"type": "input_text"}])


def engine_accepts(item) -> bool:
    with suppress(ValidationError):
        ResponsesRequest.model_validate({"model": "m", "input": [json.loads(json.dumps(item))]})
        return True
    return False


def passes(item, times=1) -> bool:
    with suppress(InvalidRequest):
        check_items_of_input(json.dumps([item] * times).encode())
        return True
    return False


def types_of_the_engine() -> dict[str, list[tuple[set[str], set[str]]]]:
    """Return the required fields and all fields of the engine's types, by the item's type."""
    found = defaultdict(list)
    for kind in typing.get_args(ResponseInputItemParam):
        hints = typing_extensions.get_type_hints(kind, include_extras=True)
        required = {name for name, hint in hints.items() if typing_extensions.get_origin(hint) in REQUIRED_MARKS}
        tag = typing_extensions.get_type_hints(kind)["type"]
        found[tag_of(tag)].append((required - {"type"}, {*hints}))
    for kind in typing.get_args(typing.get_args(ResponseOutputItem)[0]):
        fields = kind.model_fields
        required = {name for name, field in fields.items() if field.is_required()}
        names = {field.alias or name for name, field in fields.items()}
        found[tag_of(fields["type"].annotation)].append((required - {"type"}, names))
    return found


REQUIRED_MARKS = (typing.Required, typing_extensions.Required)


def tag_of(hint) -> str:
    while not isinstance(hint, str):
        hint = typing.get_args(hint)[0]
    return hint


def test_each_type_requires_what_all_of_the_engines_types_of_that_name_require():
    required = {
        name: set.intersection(*(needed for needed, _ in kinds)) - GIVEN_BY_THE_ENGINE.get(name, set())
        for name, kinds in types_of_the_engine().items()
    }

    assert {name: set(fields) for name, fields in REQUIRED.items()} == required


def test_a_flat_type_has_every_field_that_the_engine_reads():
    """Without `created_by`, which the engine's output types add as any text."""
    of_the_engine = types_of_the_engine()
    for name, fields in FLAT.items():
        known = {"type", *fields, *(FLAT_OUTPUT_MESSAGE if name == "message" else ())}
        read = set().union(*(names for _, names in of_the_engine[name]))
        assert read - known <= {"created_by"} | ({"status"} if name == "custom_tool_call_output" else set()), name


@pytest.mark.parametrize("item", FLAT_ITEMS + NESTED_ITEMS, ids=lambda item: item.get("type", "none"))
def test_what_clients_send_again_passes(item):
    assert engine_accepts(item)
    assert passes(item)
    assert passes(item, ITEMS_MAX) == (item in FLAT_ITEMS)


def changed(value):
    """Return `value` with one odd value in each place in turn."""
    yield from ODD
    if isinstance(value, dict):
        for name, held in value.items():
            rest = {key: other for key, other in value.items() if key != name}
            yield rest
            yield from (rest | {name: odd} for odd in changed(held))
    elif isinstance(value, list):
        for index, held in enumerate(value):
            yield from ([*value[:index], odd, *value[index + 1 :]] for odd in changed(held))


@pytest.mark.parametrize("item", FLAT_ITEMS + NESTED_ITEMS, ids=lambda item: item.get("type", "none"))
def test_more_items_than_a_few_pass_only_if_the_engine_accepts_each(item):
    """Seen with vLLM 0.32: 230 errors and three to ten ms for an item that has a known type and one odd field."""
    optional = {"id": "x", "status": "odd", "phase": "odd", "caller": {}, "async": "odd", "namespace": 5, "name": 5}
    for odd in [*changed(item), *({**item, name: value} for name, value in optional.items())]:
        assert not passes(odd, UNCHECKED_MAX + 1) or engine_accepts(odd), odd


@pytest.mark.parametrize("item", FLAT_ITEMS + NESTED_ITEMS, ids=lambda item: item.get("type", "none"))
def test_an_item_that_is_refused_for_a_missing_field_is_refused_by_the_engine(item):
    for name in item:
        rest = {key: value for key, value in item.items() if key != name}
        assert passes(rest) or not engine_accepts(rest), name


@pytest.mark.parametrize(
    ("item", "fault"),
    [
        ({"type": "message", "role": "user"}, " lacks `content`, which its type requires"),
        ({"role": "user"}, " lacks `content`, which its type requires"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, " lacks `call_id`, which its type requires"),
        ({"type": "function_call_output", "call_id": "c"}, " lacks `output`, which its type requires"),
        ({"type": "reasoning"}, " lacks `summary`, which its type requires"),
        ({"type": "item_reference"}, " lacks `id`, which its type requires"),
        ({}, " lacks `id`, which its type requires"),
        ({"type": "odd " * 100}, ".type is not a known item type"),
        ({"role": "odd " * 100, "content": "x"}, ".role has the wrong type"),
        ({"role": "user", "content": 5}, ".content has the wrong type"),
        (
            {"role": "user", "content": [TEXT, {"type": "odd"}]},
            ".content[1].type has the wrong type",
        ),
        (
            {"role": "user", "content": [{"type": "input_text"}]},
            ".content[0] lacks `text`, which its type requires",
        ),
        (5, " has the wrong type"),
    ],
)
def test_a_refusal_names_the_item_and_its_field_and_quotes_no_text(item, fault):
    assert not engine_accepts(item)
    with pytest.raises(InvalidRequest) as caught:
        check_items_of_input(json.dumps([FLAT_ITEMS[0], item]).encode())

    assert (caught.value.message, caught.value.param) == (f"input[1]{fault}", "input[1]")


def test_elements_of_lists_that_only_the_engine_checks_are_counted():
    """Seen with vLLM 0.32: 4000 empty tools in one item of an odd status held it for four seconds."""
    odd, rest = {"type": "input_image", "detail": "odd"}, {"type": "tool_search_output", "status": "odd"}

    assert passes({"role": "user", "content": [odd] * (UNCHECKED_MAX - 1)})
    assert not passes({"role": "user", "content": [odd] * UNCHECKED_MAX})
    assert not passes({"type": "function_call_output", "output": [odd] * UNCHECKED_MAX})
    assert not passes(rest | {"tools": [{}] * UNCHECKED_MAX})
    assert not passes(
        {"type": "message", "role": "assistant", "content": [SAID | {"annotations": [{}] * UNCHECKED_MAX}]}
    )
    assert not passes({"type": "computer_call_output", "call_id": "c", "output": {"odd": [{}] * UNCHECKED_MAX}})
