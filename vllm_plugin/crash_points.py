"""Where the connector can be told to die: on the way of a save out of the engine, and of a load into it.

The turn process's points are its own (`vllm_plugin/turn`).
"""

from __future__ import annotations

COPIED_OUT = "connector.save.copied-out"
"""The files are filled, the engine's blocks are still held."""
BEFORE_HAND_OVER = "connector.save.before-hand-over"
"""The blocks are free, the sidecar knows of no file."""
BETWEEN_HANDED_BLOCKS = "connector.save.between-blocks"
BEFORE_SEAL = "connector.save.before-seal"
AFTER_SEAL = "connector.save.after-seal"
BEFORE_LOAD = "connector.load.before"
BETWEEN_LOADED_BLOCKS = "connector.load.between-blocks"

POINTS: tuple[str, ...] = (
    COPIED_OUT,
    BEFORE_HAND_OVER,
    BETWEEN_HANDED_BLOCKS,
    BEFORE_SEAL,
    AFTER_SEAL,
    BEFORE_LOAD,
    BETWEEN_LOADED_BLOCKS,
)
"""All of them, in the order a conversation passes them."""
