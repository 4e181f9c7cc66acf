"""The rows of the lowering by theme. Importing this package fills `builder.TABLE`."""

from . import (
    creation,
    dtypes,
    elementwise,
    images,
    indexing,
    norms,
    products,
    reductions,
    shapes,
    sizes,
)

__all__ = [
    "creation",
    "dtypes",
    "elementwise",
    "images",
    "indexing",
    "norms",
    "products",
    "reductions",
    "shapes",
    "sizes",
]
