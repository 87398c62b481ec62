"""Start and end of a process: settings, logs, metrics, signals."""
