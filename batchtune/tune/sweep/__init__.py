"""Carries a search out: within its budget, on one server or on several nodes, with progress and an export to Optuna."""
