"""The closed op set: name -> MLX function.

Arrays are `mx.array`; sizes are Python ints and may appear wherever an int does. Shapes in the
docstrings are the tensors' logical (PyTorch) shapes; `...` is any number of axes. Where an op is
named like a function of `mlx.core`, it is that function.
"""

from . import creation, elementwise, images, indexing, norms, products, reductions, shapes
from .limits import limited, limits_of, problem
from .registry import OPS, Number, Value, dtype_of, on_cpu, op

OPS.update({name: limited(function, name) for name, function in OPS.items()})

__all__ = [
    "OPS",
    "Number",
    "Value",
    "creation",
    "dtype_of",
    "elementwise",
    "images",
    "indexing",
    "limits_of",
    "norms",
    "on_cpu",
    "op",
    "problem",
    "products",
    "reductions",
    "shapes",
]
