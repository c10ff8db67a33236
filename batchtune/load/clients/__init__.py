"""Clients: send requests and read their answers, over REST and gRPC, in open and closed loops."""
