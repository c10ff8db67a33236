"""What did the user ask for? Parse, call the rooms in order, print, exit with the code that says how it went.

`app` holds the command line, `ending` how it ends, and one module each what a command does.
"""

from batchtune.cli.app import app
from batchtune.cli.ending import main

__all__ = ["app", "main"]
