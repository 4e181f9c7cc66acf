"""The ops by theme. Importing this package fills `registry.OPS`."""

from . import creation, elementwise, images, indexing, norms, products, reductions, shapes
from .limits import limited
from .registry import OPS

OPS.update({name: limited(function, name) for name, function in OPS.items()})

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
