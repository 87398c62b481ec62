"""The commands of `context-cache` as Markdown: what `--help` of each says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from contextcache.cli.app import app
from deploy.docs.blocks import table


def commands(_name: str) -> str:
    """Return every command with its arguments and options, those before the command first."""
    root: Any = typer.main.get_command(app)
    shown = ["\n\n".join(_parameters(root))]
    for name, command in root.commands.items():
        shown += [f"### {name}", *_command(name, command)]
    return "\n\n".join(shown)


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [_usage(one) for one in command.params if one.param_type_name == "argument"]
    yield f"`{' '.join(['context-cache', name, '[OPTIONS]', *arguments])}`"
    yield command.help.strip()
    if command.epilog:
        label, _, example = command.epilog.partition(": ")
        yield f"{label}: `{example.strip()}`" if label == "Example" else command.epilog
    yield from _parameters(command)


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _parameters(command: Any) -> Iterator[str]:
    rows: list[list[str]] = []
    for one in command.params:
        name = _usage(one) if one.param_type_name == "argument" else ", ".join(one.opts)
        kind = "" if one.param_type_name == "argument" or one.is_flag else f" {one.metavar or 'VALUE'}"
        default = "" if one.default in {None, False, ...} or not one.show_default else f" Default: {one.default}."
        rows.append([f"`{name}{kind}`", f"{one.help or ''}{default}"])
    if rows:
        yield table(["argument or option", "meaning"], rows)
