"""The way in: what of a prompt is saved, whether loading it beats computing it, and the load itself."""
