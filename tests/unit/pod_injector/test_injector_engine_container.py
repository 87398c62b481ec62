"""vLLM's container in a pod, and the conditions that its manifest shows. Only vLLM's start knows the others."""

from __future__ import annotations

import pytest

from pod_injector.engine_container import (
    NotInjected,
    Reason,
    check_written,
    looks_like_vllm,
    warning_about,
    written_arguments,
)
from tests.unit.pod_injector.pods import make_engine, make_parts

SERVE = ["vllm", "serve", "m"]
API_SERVER = ["-m", "vllm.entrypoints.openai.api_server"]
PARTS = make_parts()


@pytest.mark.parametrize(
    ("command", "args", "written"),
    [
        (None, ["--model", "m"], ["--model", "m"]),
        (None, ["org/model", "--port=8000"], ["org/model", "--port=8000"]),
        (SERVE, None, ["m"]),
        (["/usr/bin/vllm"], ["serve", "m", "--port", "1"], ["m", "--port", "1"]),
        (["tini", "--", *SERVE], None, ["m"]),
        (["numactl", "-N", "0", "python3", "-u", *API_SERVER], ["--model", "m"], ["--model", "m"]),
        (None, None, None),
        (None, ["bash", "/start.sh", "--port", "1"], None),
        (None, ["/opt/start.py", "--port", "1"], None),
        (["/start.sh"], ["--port", "1"], None),
        (["sh", "-c", "vllm serve m --port 1"], None, None),
    ],
)
def test_arguments_are_known_where_the_pod_spells_them_out(command, args, written):
    assert written_arguments(make_engine(command=command, args=args)) == written


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        (make_engine(), True),
        ({"image": "registry:5000/team/vllm-openai@sha256:0", "args": ["--model", "m"]}, True),
        ({"image": "vllm/vllm-openai:v0.32.0", "command": ["/start.sh"]}, True),
        ({"image": "own:1", "command": SERVE}, True),
        ({"image": "own:1", "command": ["python3", *API_SERVER]}, True),
        ({"image": "own:1", "command": ["sh", "-c", 'eval "exec vllm serve m \'x $@"']}, True),
        ({"image": "nginx:1", "args": ["-g", "daemon off;"]}, False),
        ({"image": "own:1", "command": ["sleep", "1"]}, False),
        ({"image": "own:1", "command": ["vllm", "bench", "serve"]}, False),
        ({"image": "vllm.example.org/nginx:1", "args": ["-g"]}, False),
    ],
)
def test_vllm_is_told_by_its_image_or_by_its_command(container, expected):
    assert looks_like_vllm(container) is expected


TESTED = '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'


def reason_of(parts=PARTS, **container):
    with pytest.raises(NotInjected) as refusal:
        check_written(make_engine(**container), parts)
    return refusal.value.reason


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["m", "--kv-transfer-config", "{}"], Reason.KV_CONNECTOR),
        (["m", "--kv_transfer_config={}"], Reason.KV_CONNECTOR),
        (["m", "--kv-transfer-config.kv_connector", "X"], Reason.KV_CONNECTOR),
        (["m", "--kv-transfer-config", '{"kv_connector": "NixlConnector"}'], Reason.KV_CONNECTOR),
        (["m", "--kv-transfer-config", f'{TESTED[:-1]}, "kv_load_failure_policy": "fail"}}'], Reason.KV_CONNECTOR),
        (["m", "--kv-transfer-config", f'{TESTED[:-1]}, "engine_id": "one"}}'], Reason.KV_CONNECTOR),
        (["m", "--kv-transfer-config", TESTED, "--kv-transfer-config.kv_role", "kv_both"], Reason.KV_CONNECTOR),
        (["m", "--kv-transfer-config", TESTED, "--kv-offloading-size", "4"], Reason.KV_CONNECTOR),
        (["m", "--kv-offloading-size", "4"], Reason.KV_CONNECTOR),
        (["m", "--config", "/c.yaml", "--kv-transfer-config", "{}"], Reason.KV_CONNECTOR),
        (["m", "--port", "9000"], Reason.PORT),
        (["m", "--port", "8000", "--port=9000"], Reason.PORT),
        (["m", "--headless"], Reason.SERVER),
        (["m", "--uds", "/s"], Reason.SERVER),
        (["m", "--host", "127.0.0.1"], Reason.SERVER),
        (["m", "--ssl-certfile", "/c"], Reason.SERVER),
    ],
)
def test_options_that_forbid_an_injection_are_told_apart(words, reason):
    assert reason_of(args=words) is reason


@pytest.mark.parametrize(
    "words",
    [
        ["m"],
        ["m", "--middleware", "their.Own"],
        ["m", "--host", "0.0.0.0", "--port", "8000"],
        ["--model=m", "--host", "::"],
        ["m", "--port", "1", "--port", "8000"],
        ["m", "--port", "$(PORT)"],
        ["m", "--", "--port", "9000"],
        ["m", "--kv-transfer-config", TESTED],
    ],
)
def test_other_options_do_not(words):
    check_written(make_engine(args=words), PARTS)


def test_vllms_own_port_counts_where_none_is_written():
    assert reason_of(make_parts(port=8080), args=["m"]) is Reason.PORT
    check_written(make_engine(args=["m", "--config", "/c.yaml"]), make_parts(port=8080))


def test_a_certificate_of_their_own_and_one_of_the_release_exclude_each_other():
    assert reason_of(make_parts(https=True), args=["m", "--ssl-keyfile", "/k"]) is Reason.SERVER


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, False),
        ({"command": ["sh", "-c", "vllm serve m"], "args": None}, True),
        ({"args": None}, True),
        ({"args": ["m", "--port", "$(PORT)"]}, True),
        ({"args": ["m", "--config", "/c.yaml"]}, True),
    ],
)
def test_arguments_that_are_only_known_at_the_start_are_a_doubt(changes, warned):
    assert ("when vLLM starts" in warning_about(make_engine(**changes))) is warned
