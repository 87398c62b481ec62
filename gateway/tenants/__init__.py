"""Who is calling, and what they may use."""
