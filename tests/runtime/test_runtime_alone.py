"""The runtime works where PyTorch is not installed, and never asks for it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlxconv
from mlxconv.runtime.bundle import load_component

from ..conftest import Bundles

FOREIGN = ("torch", "diffusers", "transformers", "accelerate", "mlxconv.convert")
FILES = sorted((Path(mlxconv.__file__).parent / "runtime").rglob("*.py"))

WITHOUT_TORCH = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == f or name.startswith(f + ".") for f in {FOREIGN!r}):
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, Blocker())
"""
ALONE = f"""{WITHOUT_TORCH}
import mlx.core as mx
import mlxconv
import numpy as np
bundle, inputs, output = sys.argv[1:]
model = mlxconv.load_component(bundle, "transformer")
result = model(**{{name: mx.array(value) for name, value in np.load(inputs).items()}})
np.savez(output, result=np.array(result.astype(mx.float32)))
"""


def example() -> dict[str, mx.array]:
    rng = np.random.default_rng(0)
    shapes = {
        "hidden_states": (1, 12, 16), "encoder_hidden_states": (1, 5, 64),
        "pooled_projections": (1, 32), "img_ids": (12, 3), "txt_ids": (5, 3),
    }  # fmt: skip
    made = {k: mx.array(rng.standard_normal(v).astype(np.float32)) for k, v in shapes.items()}
    return {**made, "timestep": mx.array([0.5]), "guidance": mx.array([4.0])}


@pytest.mark.parametrize("q", ["fp32", "bf16", "4bit"])
def test_a_component_runs_without_torch_and_gives_the_same_numbers(
    q: str, flux_bundle: Bundles, tmp_path: Path
) -> None:
    inputs, output = tmp_path / "inputs.npz", tmp_path / "output.npz"
    mx.savez(str(inputs), **example())
    command = [sys.executable, "-c", ALONE, str(flux_bundle(q)), str(inputs), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    here = load_component(flux_bundle(q), "transformer")(**example()).astype(mx.float32)
    np.testing.assert_array_equal(np.load(output)["result"], np.array(here))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_of_the_runtime_imports_the_torch_side(file: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            imported |= {node.module or ""} if node.level == 0 else set()
            imported |= {f"mlxconv.{n}" for n in names} if node.module == "mlxconv" else set()
            climbs = node.level > len(file.relative_to(FILES[0].parent).parts)
            assert not (climbs and "convert" in (node.module or "")), file
    assert not [name for name in imported if name.startswith(FOREIGN)]


def test_the_runtime_has_files() -> None:
    assert {"bundle.py", "executor.py", "program.py", "weights.py"} <= {f.name for f in FILES}
