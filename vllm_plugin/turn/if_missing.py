"""A turn of a context that may not be there yet: `context_create: "if_missing"`.

The reservation decides who creates it, so of several requests at once one does. The others go on with what it made, or
hear that it is busy making it.
"""

from __future__ import annotations

from contextcache.errors import ContextExists, ContextExpired, ContextNotFound
from contextcache.identity import Identity
from contextcache.model import NewSession
from vllm_plugin.turn.admission import TurnAdmission
from vllm_plugin.turn.engine import Engine
from vllm_plugin.turn.request import TurnRequest
from vllm_plugin.turn.story import Client, TurnStory


async def continue_or_create(
    story: TurnStory,
    admission: TurnAdmission,
    engine: Engine,
    request: TurnRequest,
    new: NewSession,
    identity: Identity,
    client: Client,
) -> None:
    """Continue the context of this name; where there is none, or its life has ended, create it as `new` says.

    A turn that is for one generation (`If-Match`) creates nothing. Raises ContextCacheError.
    """
    try:
        await story.continue_turn(engine, request, new.session_id, identity, client)
    except (ContextNotFound, ContextExpired):
        if request.expected_generation is not None:
            raise
    else:
        return
    await admission.check_quota(identity.tenant)
    try:
        await story.create(engine, request, new, identity, client)
    except ContextExists:
        await story.continue_turn(engine, request, new.session_id, identity, client)
