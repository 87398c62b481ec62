"""`doctor --would-inject`: findings about the pods of a manifest."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from contextcache.cli.app import app
from contextcache.doctor import would_inject as module
from contextcache.doctor.finding import Level, exit_status, lines_of
from contextcache.doctor.would_inject import NotJudged, patch_of, would_inject
from pod_injector.parts import default_parts
from tests.unit.pod_injector.pods import make_parts

TAKEN = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: llama}
spec:
  template:
    metadata: {labels: {context-cache.io/inject: "true"}}
    spec:
      containers: [{name: vllm, image: "vllm/vllm-openai:v0.32.0", args: ["--model", "m"]}]
"""
OTHER_PORT = TAKEN.replace('"m"]', '"m", "--port", "9000"]')
NO_LABEL = TAKEN.replace('"true"', '"yes"')


def findings(tmp_path, text, **options):
    file = tmp_path / "llama.yaml"
    file.write_text(text)
    return [*would_inject(str(file), **options)]


def test_a_pod_that_would_be_taken_is_ok_and_its_patch_is_printed_when_asked_for(tmp_path):
    [finding] = findings(tmp_path, TAKEN)
    [patched] = findings(tmp_path, TAKEN, with_patch=True)

    assert [*lines_of(finding)] == ["✓ Deployment/llama would be injected"]
    assert exit_status([finding]) == 0
    assert patch_of(finding) == ""
    assert {operation["op"] for operation in json.loads(patch_of(patched))} <= {"add", "replace"}


def test_a_pod_that_would_be_left_alone_fails_with_the_injectors_reason(tmp_path):
    found = findings(tmp_path, f"{TAKEN}\n---\n{OTHER_PORT}\n---\n{NO_LABEL}", with_patch=True)

    assert [finding.facts["outcome"] for finding in found] == ["injected", "port", "opted-out"]
    assert (
        found[1].text
        == "not injected (port): the engine listens on 9000, but the release expects 8000 (value discovery.port)"
    )
    assert found[2].hint == "With the label: would be injected."
    assert exit_status(found) == 1
    assert [bool(patch_of(finding)) for finding in found] == [True, False, False]


def test_the_parts_of_a_release_decide_where_they_are_given(tmp_path):
    parts = tmp_path / "parts.json"
    parts.write_text(make_parts(port=9000).model_dump_json())

    assert [each.level for each in findings(tmp_path, OTHER_PORT, parts_file=parts)] == [Level.OK]
    assert [each.level for each in findings(tmp_path, TAKEN, parts_file=parts)] == [Level.FAILED]


def test_a_newer_vllm_deserves_a_look(tmp_path):
    [finding] = findings(tmp_path, TAKEN.replace("v0.32.0", "v0.99.0"))

    assert finding.level is Level.WARNING


def test_standard_input_is_read(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TAKEN.encode())))

    assert [finding.level for finding in would_inject("-")] == [Level.OK]


@pytest.mark.parametrize(
    ("text", "message"),
    [("kind: Service\nspec: {}", "no pod template"), ("a: [", "not YAML"), ("", "no pod template")],
)
def test_a_file_without_a_pod_is_not_judged(tmp_path, text, message):
    with pytest.raises(NotJudged, match=message):
        findings(tmp_path, text)


def test_a_missing_file_is_named():
    with pytest.raises(NotJudged, match=r"nowhere\.yaml"):
        [*would_inject("nowhere.yaml")]


def test_without_the_injector_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, f"{module._INJECTOR}.preview", None)

    with pytest.raises(NotJudged, match=r"install context-cache-server\[injector\]"):
        findings(tmp_path, TAKEN)


def test_a_name_that_steers_a_terminal_is_printed_without_its_escape(tmp_path):
    [finding] = findings(tmp_path, TAKEN.replace("name: llama", 'name: "\\e[2Jx"'))

    assert "\x1b" not in "".join(lines_of(finding))


def test_default_parts_make_the_same_decision_as_those_of_a_release(tmp_path):
    parts = tmp_path / "parts.json"
    parts.write_text(default_parts().model_dump_json())

    assert findings(tmp_path, TAKEN, parts_file=parts, with_patch=True) == findings(tmp_path, TAKEN, with_patch=True)


def run(*arguments, **options):
    done = CliRunner().invoke(app, ["doctor", *arguments], **options)
    return done.exit_code, done.stdout, done.stderr


def test_the_command_prints_findings_and_exits_by_them(tmp_path):
    (tmp_path / "good.yaml").write_text(TAKEN)
    code, text, _ = run("--would-inject", str(tmp_path / "good.yaml"))
    both_code, both, _ = run(
        "--would-inject", "-", "--json", "--release-namespace", "llm", input=f"{TAKEN}---{OTHER_PORT}"
    )
    bad_code, _, complaint = run("--would-inject", str(tmp_path / "none.yaml"))

    assert (code, text) == (0, "✓ Deployment/llama would be injected\n\nAll is well.\n")
    assert (both_code, json.loads(both)["failed"], json.loads(both)["manifest"]) == (1, 1, "-")
    assert (bad_code, "none.yaml" in complaint) == (2, True)


def test_the_command_prints_the_patch_when_asked_for(tmp_path):
    code, text, _ = run("--would-inject", "-", "--show-patch", input=TAKEN)
    patch = json.loads(text[text.index("[") : text.rindex("]") + 1])

    assert code == 0
    assert [operation["path"] for operation in patch] == ["/metadata", "/spec"]


def test_the_page_shows_what_the_command_prints():
    page = Path("docs/start/existing-pods.md").read_text()
    _, unlabelled, _ = run("--would-inject", "-", input=TAKEN.replace("context-cache.io/inject", "app"))
    _, elsewhere, _ = run("--would-inject", "-", input=OTHER_PORT)

    assert unlabelled in page
    assert elsewhere.splitlines()[0] in page
