"""The command line: parses, calls the rooms in order, prints, exits with the code that says how it went.

`app` holds the command line, `ending` how it ends, `commands` one file a command, `arguments` what its words mean.
"""

from batchtune.cli.ending import main

__all__ = ["main"]
