"""What does an HTTP/2 connection consist of? Frames, windows, header blocks, for both ends."""
