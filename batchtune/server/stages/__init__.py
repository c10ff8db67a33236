"""Stages: the work of a model around its device part, before it, after it, and what it calls out for."""
