"""What happened to each request? Written by a worker, read by the parent, merged into samples."""
