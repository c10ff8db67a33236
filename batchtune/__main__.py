"""Makes `python -m batchtune` run the same command line as the console script `batchtune`."""

from batchtune.cli.app import main

if __name__ == "__main__":
    main()
