"""Engines of a benchmark beside those of a stack: plain vLLM, or vLLM with somebody else's connector."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import httpx

from benchmarks.processes import Processes
from deploy.local.engine import PLAIN_ENVIRONMENT, engine_defaults, plain_command
from deploy.local.model import MODEL_DIR, MODEL_NAME
from deploy.local.ports import PORTS_OF_A_STACK
from deploy.local.progress import StepFailed
from deploy.local.readiness import EngineReady

AFTER_STACK = PORTS_OF_A_STACK
"""What the port of a stack is to the first port of what runs beside it."""
REST_S = 1.2
"""Until an engine stands still after an answer: plain vLLM spins for a second after a step (0.32
distributed/device_communicators/shm_broadcast.py SpinCondition), and on two cores that would be measured."""
_READY_WITHIN_S = 600.0


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Let a benchmark be run with another model, on another machine: `--model`, `--engine-arg`, `--rest-s`."""
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="directory of another model than SmolLM2")
    more = "more of vLLM's command line, as often as needed: --engine-arg=--max-model-len=40000"
    parser.add_argument("--engine-arg", action="append", default=[], help=more)
    rest = "s between two requests; less where cores are to spare"
    parser.add_argument("--rest-s", type=float, default=REST_S, help=rest)


class Startable(Protocol):
    """A stack that can be emptied and started."""

    def clean(self) -> None:
        """Stop everything and remove it."""
        ...

    def up(self) -> None:
        """Start everything."""
        ...


@contextmanager
def running(stack: Startable) -> Iterator[None]:
    """Run a stack that has nothing in it yet; nothing of it is left afterwards."""
    try:
        stack.clean()
        stack.up()
        yield
    finally:
        stack.clean()


def forget_prefixes(engine_url: str) -> None:
    """Empty an engine's prefix cache; what is saved stays valid. Raises StepFailed after some ten seconds."""
    for _ in range(100):  # while a save or a load holds blocks, it is not emptied
        answer = httpx.post(f"{engine_url}/reset_prefix_cache", timeout=60, trust_env=False)
        if answer.raise_for_status().json()["success"]:
            return
        time.sleep(0.1)
    raise StepFailed(f"the prefix cache of {engine_url} cannot be emptied")


def start_engine(
    processes: Processes,
    name: str,
    arguments: Sequence[str] = (),
    *,
    port: int,
    dtype: str,
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
    model: Path = MODEL_DIR,
) -> None:
    """Start vLLM with the model, memory and threads of a stack's engine, and wait until it has made a token."""
    command = plain_command(model, port=processes.take_port(name, port), dtype=dtype, python=python)
    taken = {key: os.environ.get(key, value) for key, value in engine_defaults().items()}
    ready = EngineReady(processes.url(name), MODEL_NAME)
    whole = {**taken, **PLAIN_ENVIRONMENT, **(env or {})}
    processes.start(name, (*command, *arguments), ready, env=whole, within_s=_READY_WITHIN_S)
