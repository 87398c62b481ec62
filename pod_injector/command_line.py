"""Finds vLLM's API server in a container's command line, and appends arguments to it. Pure.

Kubernetes runs `command` + `args` as one list; without `command` the image's own entry point comes first. Known:
`vllm serve …` and `python -m vllm.entrypoints.openai.api_server …`, alone, behind a wrapper (`tini --`, `numactl …`),
or as one command in the script of `sh -c`. Anything else raises NotInjected: better no sidecar than a pod that does not
start.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pod_injector.engine_options import expanded
from pod_injector.not_injected import NotInjected, Reason
from pod_injector.shell_script import SimpleCommand, UnreadableScript, simple_commands

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh"})
_WRAPPERS = frozenset(
    {"exec", "env", "nohup", "nice", "ionice", "numactl", "tini", "dumb-init", "uv", "stdbuf", "setsid", "taskset"}
)
_PYTHON = re.compile(r"^python[0-9.]*$")
_MODULES = ("vllm.entrypoints.openai.api_server",)


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """Where vLLM's arguments stand in a container, and what they are."""

    options: tuple[str, ...]
    """The words after `vllm serve` or the module's name, expanded as far as the container's env says."""
    field: str
    """`command` or `args`: where the arguments end."""
    script: int | None = None
    """Index in the field of the shell script; None: the field's end is the end of the arguments."""
    offset: int = 0
    """In a script: where to insert."""

    def append(self, container: dict[str, Any], arguments: Sequence[str]) -> None:
        """Append arguments to vLLM's in a container, in place."""
        # Kubernetes replaces $(NAME) in both fields; $$ is its escape.
        words = [argument.replace("$(", "$$(") for argument in arguments]
        if self.script is None:
            container[self.field] = [*(container.get(self.field) or []), *words]
            return
        script: str = container[self.field][self.script]
        added = "".join(f" {shlex.quote(word)}" for word in words)
        container[self.field][self.script] = script[: self.offset] + added + script[self.offset :]


def find_engine(container: Mapping[str, Any]) -> EngineCommand:
    """Return the container's engine. Raises NotInjected when there is none, or what runs cannot be told."""
    command, args = list(container.get("command") or []), list(container.get("args") or [])
    env = {item["name"]: item.get("value", "") for item in container.get("env") or [] if "valueFrom" not in item}
    field = "args" if args or not command else "command"
    if (script := _script_index([*command, *args])) is not None:
        in_command = script < len(command)
        place = ("command", script) if in_command else ("args", script - len(command))
        return _in_script([*command, *args][script], env, *place)
    words = expanded([*command, *args], env)
    if not command:
        return _behind_entry_point(words, field)
    if (found := _engine_arguments(words)) is None:
        raise NotInjected(Reason.COMMAND_UNKNOWN, f"{words[0]!r} is not a known command that starts vLLM's API server")
    return EngineCommand(tuple(words[found:]), field)


def looks_like_vllm(container: Mapping[str, Any]) -> bool:
    """Return whether a container seems to run vLLM, by its command or else by its image's name."""
    try:
        find_engine(container)
    except NotInjected as exc:
        # A script that cannot be extended may still be the one that was meant: its reason shall be told.
        return exc.reason is Reason.SHELL_SCRIPT or "vllm" in _image_name(container)
    return bool(container.get("command")) or "vllm" in _image_name(container)


def _image_name(container: Mapping[str, Any]) -> str:
    return str(container.get("image", "")).partition("@")[0].rpartition("/")[2]


def _behind_entry_point(words: list[str], field: str) -> EngineCommand:
    if not words:
        raise NotInjected(
            Reason.COMMAND_UNKNOWN,
            "the container has neither command nor args, so its image's own arguments run: write them into the pod",
        )
    first = _program(words[0])
    found = _engine_arguments(words)
    if found is None and (first in _SHELLS or _PYTHON.match(first) or first.endswith((".sh", ".py"))):
        raise NotInjected(Reason.COMMAND_UNKNOWN, f"{words[0]!r} is not a known command that starts vLLM's API server")
    if found is None:
        found = 1 if first == "serve" else 0
    return EngineCommand(tuple(words[found:]), field)


def _script_index(words: Sequence[str]) -> int | None:
    """Return the index of the script of `sh -c SCRIPT`, wrappers before it or not."""
    for index, word in enumerate(words):
        if index and _program(words[0]) not in _WRAPPERS:
            return None
        if _program(word) in _SHELLS:
            for follower in range(index + 1, len(words)):
                if re.fullmatch(r"-[a-z]*c", words[follower]) and follower + 1 < len(words):
                    return follower + 1
                if not words[follower].startswith(("-", "+")) and words[follower] != "pipefail":
                    return None
            return None
    return None


def _in_script(script: str, env: Mapping[str, str], field: str, index: int) -> EngineCommand:
    try:
        commands = simple_commands(script)
    except UnreadableScript as exc:
        raise NotInjected(Reason.SHELL_SCRIPT, f"the shell script cannot be extended safely: {exc}") from exc
    found = [engine for command in commands if (engine := _engine_of(command, env)) is not None]
    if len(found) != 1:
        count = "no command" if not found else f"{len(found)} commands"
        raise NotInjected(
            Reason.SHELL_SCRIPT if found else Reason.COMMAND_UNKNOWN,
            f"{count} of the shell script start vLLM's API server; exactly one must",
        )
    options, offset = found[0]
    return EngineCommand(options, field, script=index, offset=offset)


def _engine_of(command: SimpleCommand, env: Mapping[str, str]) -> tuple[tuple[str, ...], int] | None:
    found = _engine_arguments([word.text for word in command.words])
    if found is None:
        return None
    options: list[str] = []
    texts = expanded((word.text for word in command.words[found:]), env)
    for index, (word, text) in enumerate(zip(command.words[found:], texts, strict=True)):
        # A variable without quotes may hold several options.
        if word.expands and "$" in text and index and not texts[index - 1].startswith("-"):
            raise NotInjected(Reason.COMMAND_UNKNOWN, f"{text} is not in the container's env, and may hold options")
        options += text.split() if word.expands else [text]
    return tuple(options), command.words[-1].end


def _engine_arguments(words: Sequence[str]) -> int | None:
    """Return the index of the first argument of vLLM's API server in a list of words, or None."""
    for index in range(len(words) - 1):
        pair = (_program(words[index]), words[index + 1])
        is_engine = pair == ("vllm", "serve") or (pair[0] == "-m" and pair[1] in _MODULES)
        if is_engine:
            first = _program(words[0])
            starts = index == 0 or first in _WRAPPERS or _PYTHON.match(first) is not None
            return index + 2 if starts else None
    return None


def _program(word: str) -> str:
    return word.rpartition("/")[2]
