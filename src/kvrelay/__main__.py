"""`python -m kvrelay`, where the command `kvrelay` is not on the path."""

from kvrelay.cli.main import main

if __name__ == "__main__":
    main()
