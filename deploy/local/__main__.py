"""`python -m deploy.local up|down|status|kill|start|drain|undrain|clean|model|demo`: what the Makefile calls."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from deploy.local.demo import run_demo
from deploy.local.model import MODEL_NAME, prepare_model
from deploy.local.parts import HOST_MEMORY_BYTES, part_names
from deploy.local.progress import exit_code
from deploy.local.stack import DEFAULT_DIRECTORY, Stack
from deploy.local.state import API_KEYS
from deploy.local.table import render


@exit_code
def main(arguments: list[str] | None = None) -> None:
    """Run one command and return the exit status."""
    options = _parser().parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started us in the background, deaf to SIGINT
        signal.signal(number, signal.default_int_handler)
    _run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.local", description=__doc__)
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, help="Directory for the stack's state.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, purpose in {
        "up": "Start all parts and return when they are ready.",
        "demo": "Run the story. Start the stack if needed.",
    }.items():
        command = commands.add_parser(name, help=purpose)
        command.add_argument("--port", type=int, help="Envoy's port. The other ports follow it.")
        command.add_argument(
            "--dtype", choices=("bfloat16", "float32"), help="Data type of the model. float32 gives exact comparisons."
        )
        command.add_argument(
            "--engines",
            type=int,
            help=f"vLLM processes, each with its own sidecar of {HOST_MEMORY_BYTES >> 20} MiB.",
        )
        command.add_argument(
            "--store", choices=("dir", "s3"), help="Shared store of the sidecars, so that KV outlives its pod."
        )
        command.add_argument("--dev", action="store_true", default=None, help="Enable vLLM's development routes.")
        if name == "demo":
            command.add_argument("--json", action="store_true", help="Print figures as JSON.")
    for name in ("kill", "start", "drain", "undrain"):
        commands.add_parser(name).add_argument("part", help=", ".join(part_names(2)))
    for name in ("down", "status", "clean", "model"):
        commands.add_parser(name)
    return parser


def _run(options: argparse.Namespace) -> None:
    name = options.command
    if name == "model":
        prepare_model()
    elif name in ("up", "demo"):
        stack = Stack(
            options.directory,
            port=options.port,
            dtype=options.dtype,
            engines=options.engines,
            dev=options.dev,
            store=options.store,
        )
        if name == "demo":
            run_demo(stack, as_json=options.json)
        else:
            stack.up()
            print(_next_steps(stack))
    elif name in ("kill", "start"):
        getattr(Stack(options.directory), name)(options.part)
    elif name in ("drain", "undrain"):
        Stack(options.directory).drain(options.part, draining=name == "drain")
    elif name == "status":
        rows = [
            [s.name, s.state, str(s.pid or "-"), s.url, os.path.relpath(s.log)]
            for s in Stack(options.directory).status()
        ]
        print(render(["part", "state", "pid", "url", "log"], rows))
    else:
        getattr(Stack(options.directory), name)()


def _next_steps(stack: Stack) -> str:
    key = next(iter(API_KEYS))
    call = f"curl -s {stack.url}/v1"
    head = f"-H 'Content-Type: application/json' -H 'Authorization: Bearer {key}'"
    model = f'"model": "{MODEL_NAME}"'
    return f"""\
ready: {stack.url}   (make status, make demo, make down; past Envoy: {stack.front_url})

create a context, continue it with its session_id, delete it:
  {call}/context {head} -d '{{{model}, "prompt": "Say this is a test", "ttl": 3600}}'
  {call}/completions {head} -d '{{"session_id": "<session_id>", {model}, "prompt": " And again"}}'
  {call}/context/<session_id> -X DELETE -H 'Authorization: Bearer {key}'

in a browser {stack.url}/console, in a shell `.venv/bin/context-cache login {stack.url}`; API key: {key}"""


if __name__ == "__main__":
    sys.exit(main())
