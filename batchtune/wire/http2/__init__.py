"""HTTP/2: frames, windows and header blocks, for both ends."""
