"""JSON bodies become tensors, and outputs become JSON."""
