"""How is a request sent and its answer read, over REST and gRPC, open loop and closed?"""
