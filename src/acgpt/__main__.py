"""Entry point of `python -m acgpt`."""

from acgpt.cli.main import main

if __name__ == "__main__":
    main()
