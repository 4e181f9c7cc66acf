"""Tokenizers and schedules of a bundle that ask for much: refused soon, in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.tokens import TextTokenizer
from mlxconv.runtime.schedulers import read_scheduler

from ...bundles import change_json
from ...conftest import _clip_tokenizer

Change = Callable[[Any], Any]
TOO_MANY = "tokens .max_sequence_length, or model_max_length"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    _clip_tokenizer().save_pretrained(str(folder))
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "tokenizer"))


def _set(**values: Any) -> Change:
    return lambda data: {**data, **values}


def _sequence(step: dict[str, Any], count: int) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [step] * count}


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
EMPTY = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "b"}
CASES: dict[str, tuple[str, Change, str]] = {
    "a length of 11 GB": ("tokenizer_config.json", _set(model_max_length=10**8), TOO_MANY),
    "a length without end": ("tokenizer_config.json", _set(model_max_length=1e30), TOO_MANY),
    "a length that is text": ("tokenizer_config.json", _set(model_max_length="many"), TOO_MANY),
    "a side of its own": ("tokenizer_config.json", _set(truncation_side="up"), "tokenizer fails"),
    "replacements that double": (
        "tokenizer.json", _set(normalizer=_sequence(REPLACE, 26)), "times longer; refused",
    ),
    "a pattern of nothing": (
        "tokenizer.json", _set(normalizer=_sequence(EMPTY, 13)), "times longer; refused",
    ),
    "normalizers within normalizers": (
        "tokenizer.json",
        _set(normalizer=_sequence(_sequence(_sequence(REPLACE, 5), 5), 5)),
        "times longer; refused",
    ),
    "a normalizer that is none": ("tokenizer.json", _set(normalizer=[1]), "not a tokenizer"),
    "a model that is none": ("tokenizer.json", _set(model={"type": "X"}), "tokenizer fails"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_tokenizer_is_refused(name: str, folder: Path) -> None:
    file, change, says = CASES[name]
    change_json(folder / file, change)
    with pytest.raises(MlxconvError, match=says) as raised:
        TextTokenizer(folder).padded("a a a a")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("length", [2 * 10**9, -1])
def test_more_tokens_than_any_pipeline_takes(length: int, folder: Path) -> None:
    for way in (TextTokenizer(folder).padded, TextTokenizer(folder).unpadded):
        with pytest.raises(MlxconvError, match=TOO_MANY):
            way("a cat", length)
    assert TextTokenizer(folder).padded("a cat", 9).ids.shape == (1, 9)  # what the hint says


def test_a_panic_is_a_sentence_and_prints_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Oniguruma gives up on a pattern that backtracks, and the library panics."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    change_json(folder / "tokenizer.json", _set(pre_tokenizer=split, normalizer=None))
    with pytest.raises(MlxconvError, match="the tokenizer fails"):
        TextTokenizer(folder).unpadded("a" * 40 + "b")
    assert capfd.readouterr().err == ""


def test_the_tokenizers_of_models_pass(whole: Path) -> None:
    assert TextTokenizer(whole).padded("a photo of a cat").ids.shape == (1, 77)


# ---- schedules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("num_train_timesteps", 2 * 10**8, "num_train_timesteps must be"),
        ("num_train_timesteps", 0, "num_train_timesteps must be 1 to 100000"),
        ("beta_start", float("nan"), "beta_start must be a float, found nan"),
        ("solver_order", 10**9, "solver_order"),
    ],
)
def test_a_schedule_is_refused(option: str, value: Any, says: str, tmp_path: Path) -> None:
    config = {"_class_name": "DPMSolverMultistepScheduler", "beta_schedule": "linear"}
    file = tmp_path / "scheduler_config.json"
    file.write_text(json.dumps({**config, option: value}))
    with pytest.raises(MlxconvError, match=says):
        read_scheduler(tmp_path)
