"""The factor by which the variants of a scenario differ, block by block."""
