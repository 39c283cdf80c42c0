"""Models that can be asked: loading, metadata, adapters, and the user-facing `LanguageModel`."""
