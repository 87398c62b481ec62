"""The client, the command line and the doctor, and the modules that several processes share.

Shared modules are the model, errors, names, tokens and rules for requests. `wire` has transport, `process` settings,
logs and metrics. None of them knows Redis, KV bytes, HTTP routes or vLLM. The package imports no process.
"""
