"""What every process of ours does at its start and end: settings, logs, metrics, signals."""
