"""Tensors to TensorFlow Serving and back, over gRPC and REST."""
