"""Simulates one server with its scheduler under some traffic. Compiled; knows nothing of measurements."""
