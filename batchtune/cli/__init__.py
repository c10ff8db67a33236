"""The command line: parses, calls the rooms in order, prints, exits with the code that says how it went.

`app` lists the commands and ends them, `commands` has one file a command, `arguments` what the words mean.
"""

from batchtune.cli.app import main

__all__ = ["main"]
