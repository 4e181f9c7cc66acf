"""The lowering as a whole: what is covered, what is refused, and what the entry says."""

from mlxconv.convert.aten.builder import row_name
from mlxconv.convert.lowering import supported

from . import (
    test_lowering_elementwise,
    test_lowering_images,
    test_lowering_products,
    test_lowering_reductions,
    test_lowering_shapes,
)
from .lowering_cases import aten_names, batches, program

TABLES = [
    test_lowering_elementwise.ROWS,
    test_lowering_images.ROWS,
    test_lowering_products.ROWS,
    test_lowering_reductions.ROWS,
    test_lowering_shapes.ROWS,
]


def test_every_row_of_the_lowering_is_tested() -> None:
    graphs = [program(batch).traced for table in TABLES for batch in batches(table)]
    tested = {row_name(name) for traced in graphs for name in aten_names(traced)}
    assert set(supported()) - tested == set()
