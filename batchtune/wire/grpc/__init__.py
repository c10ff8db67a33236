"""gRPC at a few microseconds per request: the client's end and the server's."""
