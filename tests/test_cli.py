"""The commands from outside: exit codes, what goes to stdout, and how fast help answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from mlxconv import __version__
from mlxconv.cli import cli, main
from mlxconv.convert.store import bundle as filled

from .conftest import Bundles

COMPONENT = {
    "class", "parameters", "bytes_in", "bytes_out", "bits_per_weight", "quantized", "kept",
    "unused", "program",
}  # fmt: skip
ROW = {
    "tier", "component", "name", "max_abs", "max_rel", "rel_l2", "cosine", "sqnr_db", "threshold",
    "reference", "passed",
}  # fmt: skip

README = Path(__file__).parent.parent / "README.md"
MAIN = "from mlxconv.cli import main; main()"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def result_of(*arguments: str | Path) -> dict[str, Any]:
    """The one JSON object that a command prints on stdout, run in this process."""
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert isinstance(data, dict)
    return data


# ---- what is printed ----------------------------------------------------------------------------


def test_convert_prints_all_fields(flux_checkpoint: Path, tmp_path: Path) -> None:
    data = result_of("convert", flux_checkpoint, "-o", tmp_path / "out", "--q", "4bit")
    assert data.keys() >= {
        "bundle", "source", "revision", "q", "seconds", "peak_rss_bytes", "components",
    }  # fmt: skip
    (part,) = data["components"].values()
    assert part.keys() >= COMPONENT
    assert part["program"].keys() >= {"nodes", "blocks", "sizes"}
    assert part["quantized"] > 0
    assert part["kept"]
    assert all(item.keys() == {"name", "dtype", "why"} for item in part["kept"])
    assert part["bytes_out"] < part["bytes_in"]
    assert data["bundle"] == str(tmp_path / "out")


def test_convert_can_verify_what_it_wrote(flux_checkpoint: Path, tmp_path: Path) -> None:
    data = result_of("convert", flux_checkpoint, "-o", tmp_path / "out", "--verify")
    assert data["verify"]["passed"]
    assert not any("verify" in step for step in data["next_steps"])


def test_verify_prints_all_fields(flux_checkpoint: Path, flux_bundle: Bundles) -> None:
    data = result_of("verify", flux_bundle("4bit"), "--against", flux_checkpoint, "--seed", "3")
    assert data.keys() >= {"passed", "seed", "tiers"}
    assert (data["passed"], data["seed"]) == (True, 3)
    assert all(row.keys() >= ROW for row in data["tiers"])
    assert data["tiers"][-1]["reference"].startswith("diffusers 0.")


@pytest.mark.parametrize("kind", ["checkpoint", "bundle"])
def test_inspect_prints_all_fields(kind: str, flux_checkpoint: Path, flux_bundle: Bundles) -> None:
    path = flux_checkpoint if kind == "checkpoint" else flux_bundle("4bit")
    data = result_of("inspect", path)
    assert data["kind"] == kind
    assert data["format_version"] == (None if kind == "checkpoint" else 1)
    part = data["components"]["transformer"]
    assert part.keys() >= {
        "class", "parameters", "bytes", "dtypes", "bits_per_weight", "quantized", "kept",
    }  # fmt: skip
    assert part["class"] == "FluxTransformer2DModel"


def test_inspect_counts_from_the_files(flux_checkpoint: Path, flux_bundle: Bundles) -> None:
    source = result_of("inspect", flux_checkpoint)["components"]["transformer"]
    assert source["bits_per_weight"] == 32
    assert source["dtypes"] == {"F32": source["parameters"]}
    made = result_of("inspect", flux_bundle("4bit"))["components"]["transformer"]
    assert made["parameters"] == source["parameters"]
    assert made["dtypes"].keys() == {"4bit", "8bit", "BF16"}
    assert 4.5 < made["bits_per_weight"] < 16


def test_inspect_prints_the_program_and_the_tensors(flux_bundle: Bundles) -> None:
    path = str(flux_bundle("4bit"))
    shown = CliRunner().invoke(cli, ["inspect", path, "--program", "transformer"]).stdout
    assert "linear(" in shown
    assert "transformer_blocks" in shown
    program = result_of("inspect", path, "--program", "transformer")
    assert program["format"] == "mlxconv-program"
    listed = result_of("inspect", path, "--tensors")["components"]["transformer"]["tensors"]
    assert {"name", "dtype", "shape"} <= listed[0].keys()


def test_models_lists_every_recipe() -> None:
    data = result_of("models")
    assert "FluxTransformer2DModel" in [model["class"] for model in data["models"]]
    assert all(model.keys() >= {"class", "recipe", "parity"} for model in data["models"])


def test_results_go_to_stdout_and_progress_to_stderr(
    flux_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    bundle = str(tmp_path / "out")
    for line, shown in (
        (["convert", str(flux_checkpoint), "-o", bundle], f"{bundle}: "),
        (["inspect", bundle], "FluxTransformer2DModel"),
        (["verify", bundle, "--against", str(flux_checkpoint), "-v"], "PASSED"),
        (["models"], "FluxTransformer2DModel"),
    ):
        monkeypatch.setattr(sys, "argv", ["mlxconv", *line])
        main()
        out, err = capsys.readouterr()
        assert shown in out
        progress = {"convert": "tracing", "verify": "comparing weights"}.get(line[0])
        assert (progress in err and progress not in out) if progress else err == ""


def test_models_of_a_name_are_shown_and_a_single_one_in_full() -> None:
    assert [m["class"] for m in result_of("models", "fluxTransformer2Dmodel")["models"]] == [
        "FluxTransformer2DModel"
    ]
    several = [m["class"] for m in result_of("models", "FluxPipeline")["models"]]
    assert "FluxTransformer2DModel" in several and "T5EncoderModel" in several
    assert "WanTransformer3DModel" not in several
    shown = CliRunner().invoke(cli, ["models", "FluxTransformer2DModel"]).stdout
    assert "recipe: recipes/FluxTransformer2DModel.toml" in shown
    assert "stays precise: x_embedder" in shown
    unknown = CliRunner().invoke(cli, ["models", "FluxTransfomer"])
    assert unknown.exit_code == 1
    assert "(close: FluxTransformer2DModel" in str(unknown.exception)
    nothing = CliRunner().invoke(cli, ["models", "Nothing"])
    assert "'Nothing' in its name; derive" in str(nothing.exception)


def commands(group: click.Group = cli) -> Iterator[click.Command]:
    for command in group.commands.values():
        yield from commands(command) if isinstance(command, click.Group) else [command]


def test_every_command_can_be_quiet(flux_checkpoint: Path, tmp_path: Path) -> None:
    for command in commands():
        assert "quiet" in {parameter.name for parameter in command.params}, command.name
    line = ["convert", str(flux_checkpoint), "-o", str(tmp_path / "out"), "--quiet"]
    result = CliRunner().invoke(cli, line, catch_exceptions=False)
    assert result.stderr == "" and f"{tmp_path / 'out'}: " in result.stdout
    failed = run("verify", tmp_path / "absent", "--against", flux_checkpoint, "--quiet")
    assert failed.returncode == 1 and failed.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("float32", "float32")],
)
def test_a_dtype_has_a_short_name_too(given: str, meant: str) -> None:
    for command in commands():
        for option in command.params:
            if option.name in ("dtype", "vae_dtype"):
                assert option.type.convert(given, option, None) == meant


def test_libraries_draw_no_bars_in_a_pipe() -> None:
    code = """
from mlxconv.cli import _quiet
_quiet()
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging
from huggingface_hub.utils import tqdm
for bar in (diffusers_logging.tqdm, transformers_logging.tqdm, tqdm):
    assert list(bar(range(3))) == [0, 1, 2]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_the_completion_that_the_readme_shows_completes() -> None:
    assert 'eval "$(_MLXCONV_COMPLETE=zsh_source mlxconv)"' in README.read_text()
    script = "import sys; sys.argv[0] = 'mlxconv'; " + MAIN
    for variables, printed in (
        ({"_MLXCONV_COMPLETE": "zsh_source"}, "compdef"),
        ({"_MLXCONV_COMPLETE": "bash_complete", "COMP_WORDS": "mlxconv conv", "COMP_CWORD": "1"},
         "plain,convert"),
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", script], env=os.environ | variables, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert printed in done.stdout, done.stderr


def test_a_reader_that_goes_away_ends_a_command_quietly() -> None:
    line = f"{sys.executable} -c '{MAIN}' models | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "")


# ---- exit codes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["convert", "-h"]])
def test_help_and_version_exit_0(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 0
    assert ("Usage" in result.stdout) or (__version__ in result.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["convret"],
        ["convert"],
        ["convert", "x", "--trace"],
        ["convert", "x", "-o", "y", "--size", "10by10"],
        ["convert", "x", "-o", "y", "--set", "8"],
        ["convert", "x", "-o", "y", "--method", "magic"],
        ["verify", "x", "--against", "y", "--tier", "soul"],
        ["verify", "x", "--against", "y", "--dim", "batch"],
        ["models", "--colour"],
    ],
)  # fmt: skip
def test_usage_errors_exit_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = in_process(arguments, monkeypatch, capsys)
    assert code == 2
    assert out == ""
    assert "Usage" in err


def in_process(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command's entry point."""
    monkeypatch.setattr(sys, "argv", ["mlxconv", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def test_failures_are_one_line_without_a_traceback(tmp_path: Path) -> None:
    result = run("inspect", tmp_path / "absent", "--json")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "absent" in result.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = run("inspect", tmp_path / "absent", "--debug")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "MlxconvError" in result.stderr


def test_what_nobody_expected_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str | None) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("mlxconv.convert.catalog.supported.supported_models", fail)
    code, _, err = in_process(["models"], monkeypatch, capsys)
    assert code == 1
    assert err.startswith("error: RuntimeError: first line (unexpected; --debug")
    assert err.count("\n") == 1


def test_a_missing_extra_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str | None) -> None:
        raise ModuleNotFoundError("No module named 'diffusers'", name="diffusers")

    monkeypatch.setattr("mlxconv.convert.catalog.supported.supported_models", fail)
    code, _, err = in_process(["models"], monkeypatch, capsys)
    assert (code, err) == (
        1,
        "error: diffusers is not installed; `pip install 'mlxconv[convert]'`\n",
    )


# ---- Ctrl-C -------------------------------------------------------------------------------------


def test_ctrl_c_while_writing_exits_130_and_leaves_nothing(
    flux_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(filled, "_write_manifest", interrupt)
    code, out, err = in_process(
        ["convert", str(flux_checkpoint), "-o", str(tmp_path / "out")], monkeypatch, capsys
    )
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupt_signal_ends_a_conversion_with_130(
    flux_checkpoint: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """SIGINT once the process says that it is tracing."""
    cache = tmp_path_factory.mktemp("cache")
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "convert", str(flux_checkpoint), "-o", str(tmp_path / "out")],
        stderr=subprocess.PIPE, text=True,
        env={**os.environ, "MLXCONV_CACHE": str(cache)},  # where no program is yet
    )  # fmt: skip
    assert process.stderr is not None
    assert any("tracing" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 130
    assert "interrupted" in rest
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_that_a_library_swallows_is_not_lost(
    flux_checkpoint: Path, tmp_path: Path
) -> None:
    command = ["mlxconv", "convert", str(flux_checkpoint), "-o", str(tmp_path / "out")]
    code = (
        "import os, signal, sys\n"
        "from mlxconv.runtime.interrupts import remember_interrupts\n"
        "from mlxconv.cli import main\n"
        "remember_interrupts()\n"
        "try: os.kill(os.getpid(), signal.SIGINT)\n"
        "except: pass\n"
        f"sys.argv = {command!r}\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert list(tmp_path.iterdir()) == []


# ---- start-up -----------------------------------------------------------------------------------

HEAVY = ("torch", "diffusers", "transformers", "mlx", "numpy", "huggingface_hub")


@pytest.mark.parametrize(
    "code",
    [
        "import mlxconv",
        "from mlxconv.cli import main; import sys; sys.argv[1:] = ['--help']; main()",
    ],
    ids=["import", "help"],
)
def test_starting_imports_nothing_heavy_and_is_quick(code: str) -> None:
    watched = (
        f"import atexit, sys; heavy = {HEAVY!r}; atexit.register(lambda: "
        "print('LOADED', *(m for m in heavy if m in sys.modules), file=sys.stderr))\n"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", watched + code], capture_output=True, text=True, check=True
    ).stderr.strip()
    assert loaded == "LOADED"
    assert min(cpu_seconds(code) for _ in range(3)) <= 0.3


def cpu_seconds(code: str) -> float:
    """CPU time of a process that runs `code`: other processes on the machine do not count."""
    before = os.times()
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    after = os.times()
    return (after.children_user - before.children_user) + (
        after.children_system - before.children_system
    )
