"""Carries a search through: budget, order, confirmation, progress, export."""
