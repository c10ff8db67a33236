"""Backends: a directory of files becomes a model that runs."""
