"""What stands in for vLLM where the turn's own cost is measured."""
