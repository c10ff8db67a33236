"""What all runs of a configuration say together, and which configuration leads."""
