"""Keyword arguments become an entry's values, or an error that names what does not fit."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.binding import NoSuchSize, bind
from mlxconv.runtime.program.program import Entry, Input, Program
from mlxconv.runtime.program.types import INT, parse_type

LIST = Entry(
    [], (),
    inputs=(
        Input("a", "prompts.0", parse_type("compute[tokens, 4]")),
        Input("b", "prompts.1", parse_type("compute[tokens, 4]")),
    ),
)  # fmt: skip


def test_the_items_of_a_list_have_one_shape() -> None:
    program = Program("Model", [LIST])
    same = {"prompts": [mx.zeros((3, 4)), mx.ones((3, 4))]}
    assert bind(program, "forward", same, "float32")[1]["b"].shape == (3, 4)
    other = {"prompts": [mx.zeros((3, 4)), mx.ones((5, 4))]}
    with pytest.raises(MlxconvError, match=r"0 \(3, 4\) and prompts.1 \(5, 4\) differ"):
        bind(program, "forward", other, "float32")


def test_a_size_may_have_a_comma_of_its_own() -> None:
    inputs = (Input("x", "x", parse_type("int32[Max(1, n)]")),)
    given = {"x": mx.zeros((3,), mx.int32)}
    bound = bind(Program("Model", [Entry([], (), inputs=inputs)]), "forward", given, "float32")[1]
    assert bound["x"].shape == (3,)


def assuming(**literals: object) -> Program:
    inputs = (Input("x", "x", parse_type("int32[n]"), kinds="count"),)
    return Program("Model", [Entry([], (), inputs=inputs, literals=literals)])


@pytest.mark.parametrize(
    ("literal", "given", "said"),
    [
        (1, [1, 0, 1], "x was traced as 1 throughout, and 1 of the 3 elements given are not"),
        ({"below": 5}, [1, 5], "largest element of below 5, not 5"),
        ({"reaches": 5}, [1, 4], "largest element of at least 5, not 4"),
    ],
)
def test_elements_are_what_the_trace_took_them_to_be(
    literal: object, given: list[int], said: str
) -> None:
    program = assuming(x=literal)
    with pytest.raises(MlxconvError, match=said):
        bind(program, "forward", {"x": mx.array(given)}, "float32")
    fitting = {"x": mx.array([1, 1] if literal == 1 else [4 if "below" in str(literal) else 5])}
    assert bind(program, "forward", fitting, "float32")[1]["x"].dtype == mx.int32


def test_literals_given_as_arrays_are_compared() -> None:
    program = assuming(scale=1.0)
    x = mx.array([1])
    for same in (1.0, mx.array(1.0), mx.array([1.0])):
        bind(program, "forward", {"x": x, "scale": same}, "float32")
    for other in (0.5, mx.array(0.5), mx.array([1.0, 1.0])):
        with pytest.raises(MlxconvError, match=r"scale was traced as 1\.0, given"):
            bind(program, "forward", {"x": x, "scale": other}, "float32")


@pytest.mark.parametrize("extra", [{"b": mx.zeros(2)}, [mx.zeros((3, 4))] * 3])
def test_what_the_program_would_pass_over_is_refused(extra: object) -> None:
    program = Program("Model", [LIST])
    given = extra if isinstance(extra, list) else {"0": 1, "1": 1, **extra}  # type: ignore[dict-item]
    with pytest.raises(MlxconvError, match=r"traced without prompts\.|has shape"):
        bind(program, "forward", {"prompts": given}, "float32")


def test_kinds_are_cast_only_where_numbers_alone_count() -> None:
    mask = {"x": mx.array([True, False])}
    assert bind(assuming(), "forward", mask, "float32")[1]["x"].tolist() == [1, 0]
    with pytest.raises(MlxconvError, match=r"x is float, and was traced as integer, .* as int32"):
        bind(assuming(), "forward", {"x": mx.array([1.0])}, "float32")


def test_a_list_has_as_many_items_as_were_traced() -> None:
    inputs = tuple(Input(f"n{i}", f"shapes.0.0.{i}", parse_type("int")) for i in range(3))
    program = Program("Model", [Entry([], (), inputs=inputs)])
    assert bind(program, "forward", {"shapes": [[(1, 2, 3)]] * 2}, "float32")[1]["n1"] == 2
    for given in ([[(1, 2, 3), (1, 2, 3)]], [[(1, 2, 3)], [(1, 4, 3)]], [[(1, 2, 3, 4)]]):
        with pytest.raises(MlxconvError, match=r"traced without shapes\.[01]"):
            bind(program, "forward", {"shapes": given}, "float32")


def test_sizes_choose_the_entry_that_was_traced_for_them() -> None:
    inputs = (Input("x", "frames.0", parse_type("float32[n, 4]")), Input("m", "count", INT))
    few = Entry([], (), inputs=inputs, sizes={"n": 2}, assumptions=("x[0] <= 4", "max(m, 3) == 3"))
    many = Entry([], (), inputs=inputs, assumptions=("x[0] >= 5",))
    program = Program("Model", [many, few])
    for n, wanted in ((7, many), (5, many), (4, few), (1, few)):
        given = {"frames": [mx.zeros((n, 4))], "count": 2}
        assert bind(program, "forward", given, "float32")[0] is wanted
    with pytest.raises(NoSuchSize) as refused:
        bind(program, "forward", {"frames": [mx.zeros((4, 4))], "count": 9}, "float32")
    assert str(refused.value) == (
        "Model.forward: the class branches on sizes and was traced for "
        "frames.0.shape[0] >= 5; given frames.0.shape[0] = 4. Sizes in this bundle: {'n': 2}."
    )
    assert refused.value.axes == {("frames.0", 0), ("count", 0)}
