"""What the tests of the whole share: tiny checkpoints, and the bundles made of them, once each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from .shared_programs import FOLDER
from .shared_programs import shared_programs as sharing

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MLX_ENABLE_TF32", "0")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

Bundles = Callable[[str], Path]

SENTENCES = (
    "a photo of a cat on a red sofa",
    "an oil painting of a lighthouse in a storm",
    "two dogs running over the beach at dawn",
)


@pytest.hookimpl(wrapper=True)  # before pytest-xdist's own hook, which reads the groups
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """With pytest-xdist: tests that share a fixture on one worker, where it is made once.

    All others are handed out one by one, so that both workers end at about the same time.
    """
    for item in items:
        group = _group(item)
        if group and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group))
    yield
    if config.getoption("loadgroup", False):
        for item in items:
            _name_group(item)


def _name_group(item: pytest.Item) -> None:
    """Test ids end with their group, which pytest-xdist 3.8 writes where pytest 9.2 reads none.

    The groups were ignored in silence, and every shared fixture was made on every worker.
    """
    named = getattr(item, "_nodeid", item.nodeid)
    if named != item.nodeid:
        item._id = type(item.id).parse(named)  # type: ignore[attr-defined]
    if item.get_closest_marker("xdist_group") and "@" not in item.nodeid.rpartition("]")[2]:
        raise pytest.UsageError(f"{item.nodeid}: this pytest-xdist does not name its group")


_EVERYWHERE = {
    "tmp_path_factory", "one_thread", "own_cache", "programs_folder", "shared_programs"
}  # fmt: skip


def _group(item: pytest.Item) -> str | None:
    """The users of the tiny pipeline together, other users of shared fixtures by module."""
    used = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009, no public access
    shared = {name for name, found in used.items() if found[-1].scope in ("session", "module")}
    if {"pipeline_checkpoint", "pipeline_bundle"} & shared:
        return "pipeline"
    return item.path.stem if shared - _EVERYWHERE else None


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models are a hundred times slower on many threads of a busy machine."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """A command sets variables of its process; the next test begins without them."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or fills the user's cache of programs; MLX's kernels are kept, as they take a
    minute to compile."""
    from mlxconv.runtime.cache_folders import keep_kernels_private

    folder, kernels = tmp_path_factory.mktemp("cache"), keep_kernels_private()
    if kernels is not None:
        (folder / "kernels").symlink_to(kernels.parent)
    os.environ["MLXCONV_CACHE"] = str(folder)


@pytest.fixture(scope="session", autouse=True)
def programs_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"
    folder.mkdir(exist_ok=True)
    os.environ[FOLDER] = str(folder)


@pytest.fixture(scope="module")
def shared_programs() -> Iterator[None]:
    """For modules whose conversions need not trace what others traced."""
    with sharing():
        yield


@pytest.fixture(scope="session")
def flux_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny FluxTransformer2DModel: 2 double and 2 single blocks, fp32."""
    from mlxconv.convert.catalog.figures import tiny_checkpoint
    from mlxconv.convert.recipe.reading import load_recipe

    folder = tmp_path_factory.mktemp("flux") / "transformer"
    return tiny_checkpoint(load_recipe("FluxTransformer2DModel"), None, folder)


@pytest.fixture(scope="session")
def flux_bundle(flux_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """`flux_bundle("4bit")`: the tiny transformer at that precision. Copy it before changing it."""
    return _bundles(flux_checkpoint, tmp_path_factory.mktemp("flux-bundles"))


@pytest.fixture(scope="session")
def pipeline_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FluxPipeline as `save_pretrained` writes it: T5 in shards, tokenizers, licence."""
    return _pipeline(tmp_path_factory.mktemp("pipeline") / "tiny-flux")


@pytest.fixture(scope="session")
def pipeline_bundle(pipeline_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """`pipeline_bundle("4bit")`: the whole tiny pipeline. Copy it before changing it."""
    return _bundles(pipeline_checkpoint, tmp_path_factory.mktemp("pipeline-bundles"))


def _bundles(source: Path, folder: Path) -> Bundles:
    from mlxconv.convert.conversion import convert

    def bundle(q: str) -> Path:
        out = folder / q
        if not out.exists():
            with sharing():
                convert(source, out, q)
        return out

    return bundle


def _pipeline(folder: Path) -> Path:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    from mlxconv.convert.catalog.figures import tiny_checkpoint
    from mlxconv.convert.recipe.reading import load_recipe

    clip, t5 = _clip_tokenizer(), _t5_tokenizer()
    flux, vae = load_recipe("FluxTransformer2DModel"), load_recipe(AutoencoderKL.__name__)
    flux = replace(flux, tiny={**flux.tiny, "in_channels": 64})  # 2 x 2 latents of 16 channels
    vae = replace(vae, tiny={**vae.tiny, "shift_factor": 0.1, "scaling_factor": 0.5})
    tiny_checkpoint(flux, None, folder / "transformer")
    tiny_checkpoint(vae, "flux", folder / "vae", seed=1)
    _save(CLIPTextModel(CLIPTextConfig(
        vocab_size=len(clip), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=77, projection_dim=32,
    )), folder / "text_encoder", seed=2)  # fmt: skip
    _save(T5EncoderModel(T5Config(
        vocab_size=len(t5), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu",
    )), folder / "text_encoder_2", seed=3, max_shard_size="100KB")  # fmt: skip
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(str(folder / "scheduler"))
    clip.save_pretrained(str(folder / "tokenizer"))
    t5.save_pretrained(str(folder / "tokenizer_2"))
    (folder / "model_index.json").write_text(json.dumps(_INDEX, indent=2), encoding="utf-8")
    (folder / "LICENSE.md").write_text("For tests only.\n", encoding="utf-8")
    return folder


_INDEX = {
    "_class_name": "FluxPipeline",
    "_diffusers_version": "0.42.1",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "image_encoder": [None, None],
}


def _save(module: Any, folder: Path, seed: int, **options: Any) -> None:
    """With seeded weights that differ everywhere, as `tiny_checkpoint` fills them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    module.save_pretrained(str(folder), **options)


def _clip_tokenizer(**options: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    trained.train_from_iterator(SENTENCES, trainers.BpeTrainer(
        vocab_size=120, end_of_word_suffix="</w>", show_progress=False,
        special_tokens=["<|startoftext|>", "<|endoftext|>", "!"],
    ))  # fmt: skip
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return CLIPTokenizer(vocab=model["vocab"], merges=merges, model_max_length=77, **options)


def _t5_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import T5TokenizerFast

    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    trained.train_from_iterator(SENTENCES, trainers.UnigramTrainer(
        vocab_size=80, show_progress=False, unk_token="<unk>",
        special_tokens=["<pad>", "</s>", "<unk>"],
    ))  # fmt: skip
    vocab = [tuple(item) for item in json.loads(trained.to_str())["model"]["vocab"]]
    return T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=64)
