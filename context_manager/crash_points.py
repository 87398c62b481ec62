"""Every crash point of the manager: around each script, before Redis is asked and after it answered.

With MANAGER_REDIS_WAIT_REPLICAS, `after` is also after the replicas' answer: script and WAIT travel together.
"""

from __future__ import annotations

POINTS: tuple[str, ...] = (
    *("manager.reserve.before", "manager.reserve.after"),
    *("manager.admit.before", "manager.admit.after"),
    *("manager.begin.before", "manager.begin.after"),
    *("manager.renew.before", "manager.renew.after"),
    *("manager.commit.before", "manager.commit.after"),
    *("manager.abort.before", "manager.abort.after"),
    *("manager.touch.before", "manager.touch.after"),
    *("manager.unregister.before", "manager.unregister.after"),
    *("manager.sweep.before", "manager.sweep.after"),
)
