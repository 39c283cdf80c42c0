"""The one idea and how it runs: the layout of a query, the attention mask, exact scores and cached sampling."""
