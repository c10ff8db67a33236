"""Batches under PyTorch, on the CPU and on NVIDIA GPUs."""
