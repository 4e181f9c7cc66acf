"""The closed op set: name -> MLX function.

Arrays are `mx.array`; sizes are Python ints and may appear wherever an int does. Shapes in the
docstrings are the tensors' logical (PyTorch) shapes; `...` is any number of axes. Where an op is
named like a function of `mlx.core`, it is that function.
"""

from .limits import limits_of, problem
from .registry import DTYPES, OPS, Number, Value, dtype_of, on_cpu, op

__all__ = ["DTYPES", "OPS", "Number", "Value", "dtype_of", "limits_of", "on_cpu", "op", "problem"]
