"""The commands that guard what was reached."""
