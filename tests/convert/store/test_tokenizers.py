"""Tokenizers in every layout that people download: the runtime's ids are transformers' own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxconv.convert.conversion import convert
from mlxconv.convert.store.tokenizers import PROMPTS, difference, load_tokenizer, write_tokenizer
from mlxconv.convert.verify.verify import verify
from mlxconv.runtime.bundle import read_json
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.tokens import TextTokenizer

from ...conftest import SENTENCES, _clip_tokenizer, _t5_tokenizer

Make = Callable[[Path], str]


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


def _vocabulary_files(folder: Path) -> None:
    """vocab.json and merges.txt instead of tokenizer.json."""
    model = read_json(folder / "tokenizer.json")["model"]
    _write(folder / "vocab.json", model["vocab"])
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]) + "\n", "utf-8")
    (folder / "tokenizer.json").unlink()


def clip_whole(folder: Path) -> str:
    _clip_tokenizer().save_pretrained(str(folder))
    return "CLIPTokenizer"


def clip_with_a_special_tokens_map(folder: Path) -> str:
    """Stable Diffusion 2's way: it pads with `!`, as its map alone says."""
    _clip_tokenizer().save_pretrained(str(folder))
    _vocabulary_files(folder)
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "CLIPTokenizer",
                                              "model_max_length": 77})  # fmt: skip
    _write(folder / "special_tokens_map.json", {"pad_token": "!", "unk_token": "<|endoftext|>"})
    return "CLIPTokenizer"


def clip_with_added_tokens(folder: Path) -> str:
    _clip_tokenizer().save_pretrained(str(folder))
    _vocabulary_files(folder)
    vocabulary = read_json(folder / "vocab.json")
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "CLIPTokenizer",
                                              "model_max_length": 77})  # fmt: skip
    _write(folder / "added_tokens.json", {"sofa": len(vocabulary), "50%": len(vocabulary) + 1})
    return "CLIPTokenizer"


def clip_with_a_decoder_table(folder: Path) -> str:
    _clip_tokenizer().save_pretrained(str(folder))
    _vocabulary_files(folder)
    table = {str(len(read_json(folder / "vocab.json"))): {
        "content": "red", "lstrip": True, "rstrip": False, "normalized": False,
        "single_word": True, "special": False,
    }}  # fmt: skip
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "CLIPTokenizer", "pad_token": "!",
                                              "added_tokens_decoder": table})  # fmt: skip
    return "CLIPTokenizer"


def clip_padded_on_the_left(folder: Path) -> str:
    _clip_tokenizer(padding_side="left", truncation_side="left").save_pretrained(str(folder))
    return "CLIPTokenizer"


def t5_whole(folder: Path) -> str:
    _t5_tokenizer().save_pretrained(str(folder))
    return "T5TokenizerFast"


def t5_of_a_sentencepiece_model(folder: Path) -> str:
    """PixArt's way: spiece.model, and no tokenizer.json."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20), model_prefix=str(folder / "spiece"), vocab_size=80,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (folder / "spiece.vocab").unlink()
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "T5Tokenizer", "model_max_length": 120, "extra_ids": 10,
        "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>",
    })  # fmt: skip
    return "T5Tokenizer"


def qwen_of_vocabulary_files(folder: Path) -> str:
    from ...runtime.generate.tiny_families import _qwen_tokenizer

    _qwen_tokenizer().save_pretrained(str(folder))
    _vocabulary_files(folder)
    return "Qwen2Tokenizer"


def named_by_its_configuration_alone(folder: Path) -> str:
    """FLUX.2 lists a processor: the tokenizer's class is in the folder."""
    _clip_tokenizer().save_pretrained(str(folder))
    return "AutoProcessor"


LAYOUTS: tuple[Make, ...] = (
    clip_whole, clip_with_a_special_tokens_map, clip_with_added_tokens, clip_with_a_decoder_table,
    clip_padded_on_the_left, t5_whole, t5_of_a_sentencepiece_model, qwen_of_vocabulary_files,
    named_by_its_configuration_alone,
)  # fmt: skip


@pytest.mark.parametrize("make", LAYOUTS, ids=lambda make: make.__name__)
def test_ids_are_those_of_transformers(make: Make, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    name = make(source)
    shutil.copytree(source, out)
    write_tokenizer(source, name, out)
    theirs, ours = load_tokenizer(source, name), TextTokenizer(out)
    assert len(PROMPTS) == 50
    assert difference(ours, theirs) == ""
    for prompt in PROMPTS[:4]:  # by hand, without `difference`
        assert ours.unpadded(prompt).ids.tolist() == [theirs(prompt).input_ids]
    if theirs.pad_token is not None:
        cut = {"padding": "max_length", "max_length": 12, "truncation": True}
        found = [ours.padded(prompt, 12).ids.tolist()[0] for prompt in PROMPTS]
        assert found == theirs(list(PROMPTS), **cut).input_ids


def test_stable_diffusion_2_pads_with_an_exclamation_mark(tmp_path: Path) -> None:
    name = clip_with_a_special_tokens_map(tmp_path)
    write_tokenizer(tmp_path, name, tmp_path)
    mark = read_json(tmp_path / "vocab.json")["!"]
    assert TextTokenizer(tmp_path).padded("cat", 10).ids.tolist()[0][-1] == mark


def test_a_tokenizer_that_pads_otherwise_is_noticed(tmp_path: Path) -> None:
    clip_whole(tmp_path)
    theirs = load_tokenizer(tmp_path, "CLIPTokenizer")
    options = read_json(tmp_path / "tokenizer_config.json")
    _write(tmp_path / "tokenizer_config.json", {**options, "pad_token": "!"})
    assert "the prompt '' becomes the tokens" in difference(TextTokenizer(tmp_path), theirs)


def test_padding_without_a_padding_token_is_refused(tmp_path: Path) -> None:
    clip_whole(tmp_path)
    options = read_json(tmp_path / "tokenizer_config.json")
    _write(tmp_path / "tokenizer_config.json", {**options, "pad_token": "<nothing>"})
    with pytest.raises(MlxconvError, match="pad_token is '<nothing>', which is not a token"):
        TextTokenizer(tmp_path).padded("cat", 10)


def test_verify_compares_the_tokens_of_a_pipeline(
    pipeline_checkpoint: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    convert(pipeline_checkpoint, bundle, components=("text_encoder",), weights_only=True)
    rows = [row for row in verify(bundle, pipeline_checkpoint).tiers if row.tier == "tokens"]
    assert [(row.component, row.passed) for row in rows] == [
        ("tokenizer", True), ("tokenizer_2", True),
    ]  # fmt: skip
    options = read_json(bundle / "tokenizer/tokenizer_config.json")
    _write(bundle / "tokenizer/tokenizer_config.json", {**options, "pad_token": "!"})
    report = verify(bundle, pipeline_checkpoint)
    assert not report.passed
    (wrong,) = (row for row in report.tiers if row.tier == "tokens" and not row.passed)
    assert wrong.component == "tokenizer" and "the prompt ''" in wrong.note


# ---- no code of a checkpoint is run --------------------------------------------------------------


@pytest.fixture
def trapped(pipeline_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipeline whose tokenizer brings code that leaves a mark, and a user who answers "y"."""
    source = Path(shutil.copytree(pipeline_checkpoint, tmp_path / "source"))
    mark = tmp_path / "mark"
    (source / "tokenizer" / "planted.py").write_text(
        f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
        "from transformers import CLIPTokenizer\nclass Planted(CLIPTokenizer):\n    pass\n", "utf-8"
    )  # fmt: skip
    options = read_json(source / "tokenizer" / "tokenizer_config.json")
    options |= {"auto_map": {"AutoTokenizer": ["planted.Planted", None]},
                "tokenizer_class": "Planted"}  # fmt: skip
    _write(source / "tokenizer" / "tokenizer_config.json", options)
    index = read_json(source / "model_index.json")
    index["tokenizer"] = ["transformers", "AutoTokenizer"]
    _write(source / "model_index.json", index)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return source


def test_a_tokenizers_code_is_not_run(trapped: Path, tmp_path: Path) -> None:
    (trapped / "tokenizer" / "tokenizer.json").unlink()
    report = convert(trapped, tmp_path / "out", components=("vae",), weights_only=True)
    assert not (tmp_path / "mark").exists()
    assert any("cannot tokenize prompts" in text for text in report.warnings)


def test_a_pipelines_code_is_not_run(trapped: Path, tmp_path: Path) -> None:
    """A processor loads its tokenizer by an Auto class, without handing on who trusts what."""
    from transformers import CLIPImageProcessor

    from mlxconv.convert.source.checkpoint import open_checkpoint
    from mlxconv.convert.verify.pipelines import load_pipeline

    CLIPImageProcessor().save_pretrained(str(trapped / "tokenizer"))
    index = read_json(trapped / "model_index.json")
    index["tokenizer"] = ["transformers", "CLIPProcessor"]
    _write(trapped / "model_index.json", index)
    with pytest.raises(MlxconvError, match="cannot load the pipeline"):
        load_pipeline(open_checkpoint(trapped), {"default": "float32"}, None)
    assert not (tmp_path / "mark").exists()


def test_every_from_pretrained_refuses_remote_code() -> None:
    """By the source, so that the next call is not forgotten."""
    import ast

    root = Path(__file__).parents[3]
    calls = [
        (file, node)
        for folder in ("convert", "runtime", "src/mlxconv")
        for file in (root / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained"
    ]
    assert len(calls) >= 5
    for file, call in calls:
        source = ast.get_source_segment(file.read_text(encoding="utf-8"), call) or ""
        named = "trust_remote_code=False" in source or "**options" in source
        assert named, f"{file}:{call.lineno}: name trust_remote_code=False"
