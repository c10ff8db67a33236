"""Loaded versions: which one answers a name, how each lives and ends."""
