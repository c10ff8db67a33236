"""Fits a server's parameters to measurements, and tests how well left-out trials are predicted."""
