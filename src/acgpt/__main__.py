"""`python -m acgpt` is the command `acgpt`."""

from acgpt.cli.main import main

if __name__ == "__main__":
    main()
