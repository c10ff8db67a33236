"""`python -m batchtune`: the same as the console script `batchtune`."""

from batchtune.cli import main

if __name__ == "__main__":
    main()
