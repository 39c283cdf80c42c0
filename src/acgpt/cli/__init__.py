"""The command line: one file a command; `main` puts them together, `ui` holds what they share."""
