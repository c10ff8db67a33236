"""Judges configurations by all of their runs: brackets of capacity, the best point of a load test, bottlenecks."""
