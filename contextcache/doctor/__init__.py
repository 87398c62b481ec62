"""`context-cache doctor`: examines a running deployment from outside and reports its faults."""
