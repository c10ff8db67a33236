"""Compares the variants of a scenario block by block: runs, ratios with intervals, the noise floor."""
