"""Many pods and contexts in one process: the real routing over pods, tiers and traffic that are made up."""
