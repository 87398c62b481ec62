"""Attacks of one tenant with one API key, and the process that runs them."""
