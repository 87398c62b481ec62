"""From a client's request to the token ids that the engine gets: read, matched with the transcript, composed, cut."""
