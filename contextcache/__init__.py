"""The client, the command line and the doctor; and the modules that all processes share.

Modules of the second kind: model, errors, conversion, clock, identity, rpc, settings, logs, metrics. At least two
processes need each of them. None of them knows Redis, KV bytes, HTTP routes or vLLM. The package imports no process.
"""
