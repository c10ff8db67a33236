"""How are TensorFlow Serving's gRPC services answered?"""
