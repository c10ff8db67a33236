"""What did the user ask for? Parse, call the rooms in order, print, exit with the code that says how it went.

`app` holds the command line, and one module each holds what a command does.
"""

from batchtune.cli.app import app, main

__all__ = ["app", "main"]
