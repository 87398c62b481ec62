"""Code blocks of the documentation: each is run by a test, or checked as far as it goes without a cluster.

Calls by curl and examples in Python run in tests/integration/test_page_examples.py and tests/vllm/test_examples.py.
tests/chart/test_chart_pages.py renders values and helm commands. This file checks the rest.
"""

from __future__ import annotations

import json
import re
import subprocess
from importlib.util import find_spec

import typer
import yaml

from contextcache.cli.app import app
from contextcache.cli.serve import PARTS
from tests.kit.pages import ROOT, blocks, commands, programs

CHECKED = {"sh", "bash", "python", "javascript", "typescript", "json", "yaml"}
DRAWN = {"", "mermaid", "text"}
"""Drawings, diagrams that are generated from code, formulas, and output of programs."""
PROGRAMS = {
    "base64", "cd", "context-cache", "curl", "docker", "echo", "envoy", "export", "git", "helm", "jq", "kind",
    "kubectl", "lmcache", "make", "npm", "oc", "openssl", "pip", "printf", "python3",
    ".venv/bin/python",
}  # fmt: skip
"""Programs that commands of the pages start: another one needs a check of its own here."""
COMPOSE = {"down", "exec", "kill", "logs", "ps", "pull", "restart", "start", "stop", "up"}
RUN_ELSEWHERE = {
    "README.md",  # tests/vllm/test_examples.py
    "docs/reference/python.md",  # the same
    "docs/project/formats.md",  # tests/unit/kv_sidecar/test_kv_formats_doc.py
    "docs/guides/conversations.md",  # tests/integration/test_page_examples.py
    "docs/guides/messages-and-responses.md",  # the same
}
SHELL = blocks("sh", "bash")
CALLS = [(str(block), call) for block in SHELL for command in commands(block) for call in programs(command)]


def of(program: str) -> list[tuple[str, list[str]]]:
    """Return where a program is called, with its arguments."""
    return [(place, arguments) for place, (name, *arguments) in CALLS if name == program]


def test_every_block_is_of_a_kind_that_is_checked():
    """Seen to fail with a block marked `console`."""
    assert [str(block) for block in blocks() if block.language not in CHECKED | DRAWN] == []


def test_shell_blocks_are_shell_and_start_known_programs():
    """Seen to fail with a quote left open, and with `helmet` for `helm`."""
    for block in SHELL:
        text = re.sub(r"<[a-z][^>\n]*>", "PLACE", block.text)
        parsed = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
        assert parsed.returncode == 0, f"{block}: {parsed.stderr}"

    assert [(place, name) for place, (name, *_) in CALLS if "=" not in name and name not in PROGRAMS] == []


def test_every_program_of_a_page_has_a_test_that_runs_it():
    """Seen to fail with a block of Python on the page of streams."""
    sdks = {f"docs/sdks/{page.name}" for page in (ROOT / "docs/sdks").glob("*.md")}

    assert {block.page for block in blocks("python", "javascript", "typescript")} <= sdks | RUN_ELSEWHERE


def test_json_blocks_are_json():
    """One value, or several: the answers of several calls. Seen to fail with a comma left out."""
    for block in blocks("json"):
        text = block.text.strip()
        while text:
            _, end = json.JSONDecoder().raw_decode(text)
            text = text[end:].strip()


def test_yaml_blocks_are_yaml():
    assert [str(block) for block in blocks("yaml") if not yaml.safe_load(block.text)] == []


def test_the_command_line_takes_what_pages_pass_to_context_cache():
    """Seen to fail with `--tll` for `--ttl`, and with a misspelt part after `serve`."""
    root = typer.main.get_command(app)
    called = of("context-cache")

    assert len(called) > 8
    for place, (name, *arguments) in called:
        if name == "serve":
            assert arguments[0] in PARTS, place
        else:
            root.commands[name].make_context(name, arguments)


def test_images_are_built_from_files_and_arguments_that_exist():
    """Seen to fail with VLLM_IMAGES for VLLM_IMAGE."""
    built = [(place, line[1:]) for place, line in of("docker") if line[0] == "build"]

    assert len(built) >= 4
    for place, line in built:
        dockerfile = (ROOT / line[line.index("-f") + 1]).read_text()
        named = {line[number + 1].partition("=")[0] for number, word in enumerate(line) if word == "--build-arg"}
        assert named <= set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE)), place


def test_compose_commands_name_profiles_and_services_that_exist():
    """Seen to fail with `--profile cpus`, and with `kill engine`."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    profiles = {profile for service in services.values() for profile in service.get("profiles", ())}
    called = [(place, line[1:]) for place, line in of("docker") if line[0] == "compose"]

    assert called
    for place, line in called:
        assert {line[number + 1] for number, word in enumerate(line) if word == "--profile"} <= profiles, place
        command = next(number for number, word in enumerate(line) if word in COMPOSE)
        assert {word for word in line[command + 1 :] if not word.startswith("-")} <= services.keys(), place


def test_programs_and_files_of_the_repository_that_pages_start_exist():
    """Seen to fail with `deploy.docker.key`, and with a test's file misspelt."""
    for place, line in [*of(".venv/bin/python"), *of("python3")]:
        module, *arguments = line[1:] if line[0] == "-m" else ("", *line)
        files = [word for word in arguments if re.fullmatch(r"[\w/]+\.py", word)]

        assert not module or find_spec(module), place
        assert [file for file in files if not (ROOT / file).exists()] == [], place
