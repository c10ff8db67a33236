"""What does each command do? One file a command: call the rooms in order, print, say the exit code."""
