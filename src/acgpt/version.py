"""The version of acgpt, in one place: the package, its metadata and every result file read it here."""

__version__ = "0.1.0"
