"""ATen graph -> program: rows, rewrites, shared blocks."""
