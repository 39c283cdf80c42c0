"""Models: loading, metadata, adapters, and `LanguageModel`, the class that users work with."""
