"""Random conversations over two real engines: evictions, moves, restarts; every answer against a cold one.

`turns` is the number of answers compared. About every hundred of them an engine is killed, and the turns
go on at the other while it starts again. After a difference the parts' logs are in `.build/torture_conversations/`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from deploy.local.progress import say
from tests.kit.faults.conversation_run import ConversationRun
from tests.kit.faults.reference import Difference
from tests.kit.tiny_stack import TinyStack
from tests.torture.report import Options, Report

ENGINES = 2
LOGS = Path(".build/torture_conversations")
MINUTES = 15.0
"""The longest time for `turns`; fewer in that time is a failure."""
_TURNS_BETWEEN_RESTARTS = 100
_TURNS_A_REPORT = 20


def run(options: Options) -> Report:
    """Take the turns; stop at the first difference."""
    report = Report("conversations", {"engines": ENGINES, "turns wanted": options.turns})
    with tempfile.TemporaryDirectory(prefix="context-cache-torture-") as directory:
        # A memory tier of 2 000 tokens, so that what is restored comes from there, from disk and from the peer.
        memory = {"SIDECAR_MEMORY_LIMIT_BYTES": str(2 << 20)}
        with TinyStack(Path(directory), engines=ENGINES, patient=True, env=memory) as stack:
            report.rows["stack up, s"] = round(stack.started_in_s)
            with ConversationRun(stack, options.random(report.name), seed=options.seed) as conversations:
                _take(conversations, options, report)
            if report.failures:
                shutil.rmtree(LOGS, ignore_errors=True)
                shutil.copytree(stack.paths.log("engine").parent, LOGS)
    return report


def _take(conversations: ConversationRun, options: Options, report: Report) -> None:
    began_s = time.monotonic()
    until_s = began_s + 60 * (options.minutes or MINUTES)
    seen = conversations.seen
    try:
        while seen["turns"] < options.turns and time.monotonic() < until_s:
            conversations.take_turns(min(_TURNS_A_REPORT, options.turns - seen["turns"]), until_s=until_s)
            say(f"  {seen['turns']} turns, {time.monotonic() - began_s:.0f} s")
            restarts = seen["engine killed and started"]
            if seen["turns"] >= (restarts + 1) * _TURNS_BETWEEN_RESTARTS < options.turns:
                conversations.kill_engine()
        if seen["turns"] < options.turns:
            report.failures.append(f"{seen['turns']} turns in the time of {options.turns}")
    except Difference as difference:
        report.failures.append(str(difference))
    report.rows["turns"] = seen["turns"]
    report.rows |= {what: seen[what] for what in sorted(seen) if what != "turns"}
    spent = [[what, f"{seconds:.0f}"] for what, seconds in sorted(conversations.events.spent_s.items())]
    report.tables["where the time went"] = (["what", "s"], spent)
    report.rows["differences"] = sum("seed" in failure for failure in report.failures)
