"""`python -m batchtune`: the same as the console script `batchtune`."""

from batchtune.cli.ending import main

if __name__ == "__main__":
    main()
