"""The ops by theme. Importing this package fills `registry.OPS`."""

from . import (
    creation,
    elementwise,
    images,
    indexing,
    norms,
    products,
    reductions,
    shapes,
)

__all__ = [
    "creation",
    "elementwise",
    "images",
    "indexing",
    "norms",
    "products",
    "reductions",
    "shapes",
]
