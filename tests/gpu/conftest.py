"""vLLM and torch warn about themselves while they are imported; from here on warnings are errors again."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.core.sched.scheduler  # noqa: F401  # brings in everything else
