"""The way from a client's request to the engine's token ids: read, matched with the transcript, composed, cut."""
