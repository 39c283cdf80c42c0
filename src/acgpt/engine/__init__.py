"""Running a model on queries: the layout, the attention mask, exact scores and cached sampling."""
