"""Which pods there are, how they are, and which one a request goes to."""
