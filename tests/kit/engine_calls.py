"""Every call that vLLM's API server can have, method and path, whatever model and switches it was started with.

`python -m tests.kit.engine_calls` builds the server's app without an engine and writes the list that tests read;
tests/vllm holds the list to the app.
"""

from __future__ import annotations

import json
import os
import typing
from pathlib import Path
from unittest.mock import Mock

LIST = Path(__file__).with_name("engine_calls.json")
SWITCHES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Read when vLLM is imported."""
OPTIONS = (
    "--enable-tokenizer-info-endpoint",
    "--profiler-config",
    '{"profiler": "torch", "torch_profiler_dir": "/tmp"}',
)


def known_calls() -> list[tuple[str, str]]:
    """Return the committed list: (method, path with holes in braces)."""
    return [(method, path) for method, path in json.loads(LIST.read_text())]


def built_calls() -> list[tuple[str, str]]:
    """Return what the app has that vLLM builds with everything on. Needs SWITCHES in the environment."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.tasks import SupportedTask
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(list(OPTIONS))
    tasks = tuple(_words(SupportedTask))
    found = set()
    # A model that generates, and one that pools and scores.
    for model in (None, Mock(**{"get_pooling_task.return_value": "embed"})):
        for route in build_app(arguments, tasks, model).routes:
            methods = getattr(route, "methods", None) or ["GET"]  # a mount, or a WebSocket, which begins as a GET
            found |= {(method, route.path) for method in methods}
    return sorted(found)


def _words(literal: object) -> typing.Iterator[str]:
    for part in typing.get_args(literal):
        if isinstance(part, str):
            yield part
        else:
            yield from _words(part)


if __name__ == "__main__":
    os.environ.update(SWITCHES)
    LIST.write_text(json.dumps(built_calls()).replace("], [", "],\n [") + "\n")
