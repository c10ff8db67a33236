"""Finds the batching parameters to serve a model with, on this hardware, under this traffic and SLO."""

__version__ = "0.1.0"
