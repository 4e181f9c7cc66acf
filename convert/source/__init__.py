"""Checkpoints: folders and files of weights, read tensor by tensor; the classes they belong to."""
