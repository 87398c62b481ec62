"""Command line over `contextcache.client`: `context-cache ls`, `ask` and more."""
