"""A value that the command line alone shows to be wrong: exit 2, and a line that names the option.

Every option of every command is tried, so that a new one is read by a type of `parameters`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from mlxconv import parameters
from mlxconv.cli import cli, main

from .conftest import Bundles

# Texts that only a checkpoint, a bundle or the Hub can judge: names in it, sources, prompts.
FREE = {
    "component", "components", "keep", "variant", "revision", "against", "program", "negative",
    "prompts", "license_id", "license_name",
}  # fmt: skip
BELOW, NOT_FINITE = ("-1", "1.5", "x"), ("-0.5", "nan", "inf", "x")
BAD = {
    parameters.CLASS: ("x", "a:b:c", ":x", "a b:C"),
    parameters.COUNT: ("0", *BELOW, str(10**30)),
    parameters.DECODER: ("absent",),
    parameters.DIM: ("x", "x=0", "=3", "x=²"),
    parameters.FILE: (".",),
    parameters.FOLDER: (__file__,),
    parameters.FROM_ZERO: BELOW,
    parameters.GROUP_SIZE: ("48", "0", "x"),
    parameters.NUMBERS: ("1,x", "1,nan", ","),
    parameters.OLD_FILE: ("absent", "."),
    parameters.OLD_FOLDER: ("absent", __file__),
    parameters.OLD_PATH: ("absent",),
    parameters.PICTURE: ("x.gif", "x", "absent/x.png"),
    parameters.PICTURE_FILE: ("x.gif", ".", "absent/x.png"),
    parameters.POSITIVE: ("0", *NOT_FINITE),
    parameters.PRECISION: ("7bit", "9", "", "absent.toml"),
    parameters.PROGRAM: ("absent",),
    parameters.REPOSITORY: ("x", "a/b/c", "a/b--c"),
    parameters.SCALE: NOT_FINITE,
    parameters.SCHEDULER: ("nonsense", "Euler Nonsense", "Euler:x", "Euler:no_such_option=1"),
    parameters.SEED: (*BELOW, str(2**64)),
    parameters.SETTING: ("x", "=8", "x=", "x=7", "x=many"),
    parameters.SHARE: ("1.5", *NOT_FINITE),
    parameters.SIZE: ("x", "64", "0x64", "64x-1", "64x²", "64x64x64"),
    parameters.TILE: ("x", "0", "-1", "1.5"),
    parameters.TOKENS: ("0", *BELOW, str(10**9)),
    parameters.UP_TO_200: ("0", "201", *BELOW),
    parameters.URL: ("x", "ftp://x", "javascript:x"),
}


def commands(
    group: click.Group = cli, *above: str
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)
        else:
            yield (*above, name), command


def tried() -> Iterator[tuple[tuple[str, ...], str, str]]:
    """(command line without options, option, bad value)."""
    for name, command in commands():
        line = (*name, *("a/b" for p in command.params if isinstance(p, click.Argument)))
        for option in command.params:
            if isinstance(option, click.Argument):
                continue
            flag = max(option.opts, key=len)
            if isinstance(option.type, click.Choice):
                yield line, flag, "nonsense"
            elif isinstance(option.type, click.File):
                yield line, flag, "absent"
            elif getattr(option, "is_flag", False):
                yield line, flag, "="
            elif option.name not in FREE or option.type is not click.STRING:
                assert option.type in BAD, f"{flag}: no bad value of {option.type!r} is known here"
                yield from ((line, flag, value) for value in BAD[option.type])


@pytest.mark.parametrize(("line", "option", "value"), list(tried()), ids=str)
def test_a_bad_value_is_a_usage_error(line: tuple[str, ...], option: str, value: str) -> None:
    result = CliRunner().invoke(cli, [*line, f"{option}={value}"])
    assert result.exit_code == 2, (result.output, result.exception)
    (said,) = [text for text in result.stderr.splitlines() if text.startswith("Error: ")]
    assert result.stderr.endswith(f"{said}\n") and option in said
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("code", "line", "says"),
    [
        (2, "bench {bundle} --source .", "--source has no effect without --against"),
        (2, "verify {bundle} --steps 2", "--steps: applies to whole pipelines"),
        (2, "convert {bundle} --q bf16 --group-size 32", "bf16 has no groups"),
        (2, "convert {bundle} --q 4bit --target-size 1", "cannot be combined with --q"),
        (1, "generate {bundle} a -o x.png --size 63x65", "63x65: width and height have to be"),
        (1, "generate {bundle} a -o x.png --scheduler DDIM", "does not fit a flow model"),
        (1, "verify {bundle} --component absent", "no component 'absent'"),
    ],
)
def test_what_files_decide_is_a_failure_and_not_usage(
    code: int, line: str, says: str, pipeline_bundle: Bundles, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = line.format(bundle=pipeline_bundle("fp32")).split()
    monkeypatch.setattr(sys, "argv", ["mlxconv", *words])
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capsys.readouterr()
    assert (exit_.value.code, out) == (code, "") and says in err, err
    assert err.splitlines()[-1].startswith("error: ")
