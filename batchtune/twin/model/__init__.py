"""The twin: readings of a server's parameters, predictions, the highest rate, and the replicas that a rate needs."""
