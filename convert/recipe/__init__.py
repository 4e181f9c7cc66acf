"""Recipes: what a class takes and what stays precise."""
