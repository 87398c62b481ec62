"""How a prompt stands to the prompt of an earlier answer that the client names. Pure.

The token ids decide: two prompts with the same ids can share KV, whatever fields of the requests differ. The fields
only name the cause of a difference.
"""

from __future__ import annotations

from collections.abc import Mapping

from contextcache.model import CacheSessionMetadata, ContextMode, SegmentKind
from vllm_plugin.turn.answer.diagnostics import CAUSE_OF_WHY, Cause, Comparison
from vllm_plugin.turn.prompt.composition import ComposedPrompt, settings_shown
from vllm_plugin.turn.prompt.matching import match
from vllm_plugin.turn.prompt.request import ClientPrompt, TurnRequest
from vllm_plugin.turn.prompt.transcript import Transcript, common_prefix, shown_with


def compare(
    prompt: ComposedPrompt, request: TurnRequest, session: CacheSessionMetadata, transcript: Transcript
) -> Comparison:
    """Compare a chat's prompt with that of the newest answer in `transcript`, the transcript of `session`."""
    num_segments = len(transcript.segments)
    while num_segments and transcript.segments[num_segments - 1].kind is SegmentKind.ANSWER:
        num_segments -= 1
    earlier = transcript.head(num_segments)
    shared = 0 if session.model_id != request.model else common_prefix(prompt.token_ids, earlier.token_ids)
    if session.model_id != request.model:
        cause = Cause.MODEL
    elif shared == len(earlier.token_ids):
        cause = Cause.NONE
    else:
        cause = _cause(prompt, request, earlier, shown_with(transcript))
    return Comparison(cause, len(prompt.token_ids), len(earlier.token_ids), shared)


def _cause(prompt: ComposedPrompt, request: TurnRequest, earlier: Transcript, were_shown: Mapping[str, str]) -> Cause:
    """Return the cause of different ids. Tools and effort come before the messages in a prompt, so they come first."""
    shown = settings_shown(request)
    for name, cause in (("tools", Cause.TOOLS), ("effort", Cause.EFFORT)):
        if shown.get(name) != were_shown.get(name):
            return cause
    if not (prompt.messages and earlier.is_chat):
        return Cause.UNKNOWN
    diverged = match(earlier, ClientPrompt(messages=prompt.messages), mode=ContextMode.REPLAY).diverged
    return Cause.UNKNOWN if diverged is None else CAUSE_OF_WHY[diverged.why]
