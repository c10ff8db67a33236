"""The commands, one file each: call the rooms in order, print, return the exit code."""
