"""The meaning of the words of a command line."""
