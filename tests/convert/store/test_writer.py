"""Files are aligned, whole, readable by others, the same each time; a folder is whole or absent."""

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
from safetensors import safe_open
from safetensors import torch as safetensors_torch

from mlxconv.convert.quantize.policy import affine, layout, quantize
from mlxconv.convert.store.writer import (
    Group,
    Output,
    array_bytes,
    output_of,
    pass_through,
    read_back,
    single,
    write_weights,
)
from mlxconv.runtime.errors import MlxconvError


def array_group(name: str, array: mx.array) -> Group:
    return single(output_of(name, array), lambda: array)


def arrays() -> dict[str, mx.array]:
    """Odd sizes on purpose: 3 bytes, 6 bytes and 12 bytes among multiples of 8."""
    mx.random.seed(0)
    return {
        "b.odd": mx.array([1, 2, 3], dtype=mx.uint8),
        "a.weight": mx.random.normal((4, 6)).astype(mx.bfloat16),
        "a.half": mx.random.normal((3,)).astype(mx.float16),
        "a.bias": mx.random.normal((3,)),
        "c.table": mx.arange(5, dtype=mx.int64),
        "c.scalar": mx.array(2.5),
        "c.empty": mx.zeros((0, 4)),
        "d.transposed": mx.random.normal((4, 8)).T,
    }


def groups() -> list[Group]:
    return [array_group(name, array) for name, array in arrays().items()]


def header_of(path: Path) -> tuple[int, dict[str, Any]]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return 8 + length, json.loads(data[8 : 8 + length])


def test_mlx_reads_back_what_was_written(tmp_path: Path) -> None:
    write_weights(tmp_path, "model", groups())
    loaded, metadata = mx.load(str(tmp_path / "model.safetensors"), return_metadata=True)
    assert metadata == {"format": "mlx"}
    assert loaded.keys() == arrays().keys()
    for name, array in arrays().items():
        assert loaded[name].dtype == array.dtype
        assert mx.array_equal(loaded[name], array), name


def test_the_safetensors_library_reads_it_into_torch_and_numpy(tmp_path: Path) -> None:
    write_weights(tmp_path, "model", groups())
    path = tmp_path / "model.safetensors"
    in_torch = safetensors_torch.load_file(path)
    assert in_torch["d.transposed"].tolist() == arrays()["d.transposed"].tolist()
    with safe_open(path, "np") as file:
        assert file.get_tensor("a.half").tolist() == arrays()["a.half"].tolist()
    plain = {name: array for name, array in arrays().items() if array.dtype != mx.bfloat16}
    write_weights(tmp_path, "plain", [array_group(*item) for item in plain.items()])
    assert safetensors_numpy.load_file(tmp_path / "plain.safetensors").keys() == plain.keys()


def test_data_and_tensors_begin_aligned_without_holes(tmp_path: Path) -> None:
    write_weights(tmp_path, "model", groups())
    start, header = header_of(tmp_path / "model.safetensors")
    assert start % 8 == 0
    offset = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, offset_then = entry["data_offsets"]
        assert begin == offset
        offset = offset_then
        whole = (offset - begin) % 8 == 0
        assert begin % (8 if whole else Output(name, (1,), entry["dtype"]).nbytes) == 0, name


def test_the_given_order_is_kept_and_the_bytes_are_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_weights(tmp_path / name, "model", groups(), max_shard_bytes=100)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) > 2
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    write_weights(tmp_path, "model", [array_group(n, mx.zeros((2,))) for n in ("z", "a", "m")])
    assert list(header_of(tmp_path / "model.safetensors")[1])[1:] == ["z", "a", "m"]


def test_shards_are_full_up_to_the_limit_and_a_group_is_not_split(tmp_path: Path) -> None:
    def pair(name: str) -> Group:
        outputs = (Output(f"{name}.0", (8,), "F32"), Output(f"{name}.1", (8,), "F32"))
        return Group(outputs, lambda: [mx.zeros((8,)), mx.ones((8,))], 16)

    index = write_weights(tmp_path, "model", [pair(n) for n in "abc"], max_shard_bytes=128)
    assert index["weight_map"] == {
        "a.0": "model-00001-of-00002.safetensors",
        "a.1": "model-00001-of-00002.safetensors",
        "b.0": "model-00001-of-00002.safetensors",
        "b.1": "model-00001-of-00002.safetensors",
        "c.0": "model-00002-of-00002.safetensors",
        "c.1": "model-00002-of-00002.safetensors",
    }
    small = write_weights(tmp_path, "small", [pair(n) for n in "ab"], max_shard_bytes=127)
    assert len(set(small["weight_map"].values())) == 2
    read_back(tmp_path, "model")
    read_back(tmp_path, "small")


def test_the_index_is_written_for_one_file_too_and_counts(tmp_path: Path) -> None:
    index = write_weights(tmp_path, "model", groups())
    stored = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert stored == index
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays().values())
    assert index["metadata"]["total_parameters"] == sum(a.size for a in arrays().values())
    assert list(index["weight_map"]) == sorted(arrays())


def test_an_empty_model_has_one_file_and_an_index(tmp_path: Path) -> None:
    assert write_weights(tmp_path, "model", [])["weight_map"] == {}
    assert mx.load(str(tmp_path / "model.safetensors")) == {}
    read_back(tmp_path, "model")


def test_a_quantized_weight_is_produced_once_and_lies_together(tmp_path: Path) -> None:
    mx.random.seed(0)
    weight, precision, calls = mx.random.normal((16, 128)), affine(4), []

    def produce() -> list[mx.array]:
        calls.append(1)
        return list(quantize(weight, precision).tensors().values())

    outputs = tuple(Output(f"x.{k}", *v) for k, v in layout((16, 128), precision).items())
    index = write_weights(tmp_path, "model", [Group(outputs, produce, weight.size)])
    assert calls == [1]
    assert index["metadata"]["total_parameters"] == 16 * 128
    loaded = mx.load(str(tmp_path / "model.safetensors"))
    expected = quantize(weight, precision)
    assert mx.array_equal(loaded["x.weight"], expected.weight)
    assert mx.array_equal(loaded["x.biases"], expected.biases)


def test_raw_bytes_pass_through_in_chunks(tmp_path: Path) -> None:
    data = np.arange(6, dtype=np.float32)
    chunks = [data[:4].tobytes(), b"", memoryview(data[4:])]
    write_weights(tmp_path, "model", [pass_through(Output("x", (2, 3), "F32"), lambda: chunks)])
    assert mx.load(str(tmp_path / "model.safetensors"))["x"].reshape(-1).tolist() == data.tolist()


def test_progress_adds_up_to_the_bytes_written(tmp_path: Path) -> None:
    seen: list[int] = []
    index = write_weights(tmp_path, "model", groups(), progress=seen.append)
    assert sum(seen) == index["metadata"]["total_size"]


@pytest.mark.parametrize(
    "part",
    [mx.zeros((3,)), mx.zeros((2,), mx.int32), [b"1234"], [b"1234", b"56789"]],
    ids=["shape", "dtype", "short", "long"],
)
def test_a_part_that_is_not_its_output_is_an_error(tmp_path: Path, part: Any) -> None:
    with pytest.raises(MlxconvError, match=r"tensor 'x.y': expected"):
        write_weights(tmp_path, "model", [single(Output("x.y", (2,), "F32"), lambda: part)])


def test_a_name_given_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MlxconvError, match=r"'a.weight' would be written twice"):
        write_weights(tmp_path, "model", groups() + groups()[1:2])


def test_array_bytes_do_not_copy_a_row_major_array() -> None:
    array = mx.arange(4, dtype=mx.uint32)
    view = array_bytes(array)
    assert np.frombuffer(view, np.uint32).ctypes.data == np.array(array, copy=False).ctypes.data


# ------------------------------------------------------------------------------------- read back


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_weights(tmp_path, "model", groups(), max_shard_bytes=100)
    read_back(tmp_path, "model")
    return tmp_path


def some_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def test_a_missing_shard_is_found(written: Path) -> None:
    shard = some_shard(written)
    shard.unlink()
    with pytest.raises(MlxconvError, match=shard.name):
        read_back(written, "model")


@pytest.mark.parametrize("left", [4, 100, -1])
def test_a_truncated_shard_is_found(written: Path, left: int) -> None:
    shard = some_shard(written)
    shard.write_bytes(shard.read_bytes()[:left])
    with pytest.raises(MlxconvError, match=shard.name):
        read_back(written, "model")


def test_a_flipped_bit_is_found_and_its_tensor_named(written: Path) -> None:
    shard = some_shard(written)
    start, header = header_of(shard)
    data = bytearray(shard.read_bytes())
    data[start + header["a.weight"]["data_offsets"][0]] ^= 1
    shard.write_bytes(data)
    with pytest.raises(MlxconvError, match=r"'a.weight': its bytes are not those written"):
        read_back(written, "model")


def test_a_tensor_that_the_index_does_not_know_is_found(written: Path) -> None:
    path = written / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["a.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(MlxconvError, match=r"'a.weight' is missing in the index"):
        read_back(written, "model")


def test_a_broken_index_is_an_error(written: Path) -> None:
    (written / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(MlxconvError, match=r"index.json: cannot be read as an index"):
        read_back(written, "model")
