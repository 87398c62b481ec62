"""`context-cache ls`, `ask` and the like: the client of `contextcache.client` on a command line."""
