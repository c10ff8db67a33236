"""How is gRPC spoken at a few microseconds per request? The client's end and the server's."""
