"""How does PyTorch run batches, on the CPU and on NVIDIA GPUs?"""
