"""Measuring a model: evaluation datasets, perplexity, generation, MAUVE and other text metrics."""
