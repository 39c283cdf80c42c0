"""The command line: one file per command. `main` assembles them, `ui` holds shared code."""
