"""How do tensors travel to TensorFlow Serving and back, over gRPC and REST?"""
