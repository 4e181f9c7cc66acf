"""A module as one functional ATen graph, without its weights."""
