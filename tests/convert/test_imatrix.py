"""Importance matrices: read from both formats, and felt by the quantizer."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from pyorch.cli import main
from pyorch.convert.imatrix import read_imatrix
from pyorch.convert.to_gguf import convert
from pyorch.errors import FormatError

N_CALLS = 4


@pytest.fixture(scope="module")
def sums(small_moe_f32: Path) -> dict[str, np.ndarray]:
    """Sums of squares of the inputs of every matrix, float32[n_matrices, n_inputs], over N_CALLS tokens."""
    random = np.random.default_rng(1)
    made = {}
    for tensor in gguf.GGUFReader(small_moe_f32).tensors:
        if len(tensor.shape) >= 2 and "norm" not in tensor.name:
            n_matrices = int(tensor.shape[2]) if len(tensor.shape) > 2 else 1
            made[tensor.name] = random.lognormal(0, 3, (n_matrices, int(tensor.shape[0]))).astype(np.float32)
    return made


def write_gguf(path: Path, sums: dict[str, np.ndarray], unseen: str = "") -> Path:
    writer = gguf.GGUFWriter(path, "imatrix")
    for name, values in sums.items():
        writer.add_tensor(f"{name}.in_sum2", values)
        writer.add_tensor(f"{name}.counts", np.full((len(values), 1), 0 if name == unseen else N_CALLS, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_legacy(path: Path, sums: dict[str, np.ndarray]) -> Path:
    entries = b"".join(
        struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", N_CALLS, values.size) + values.tobytes()
        for name, values in sums.items())
    path.write_bytes(struct.pack("<i", len(sums)) + entries + struct.pack("<ii", N_CALLS, 0))
    return path


def test_both_formats_say_the_same(sums: dict[str, np.ndarray], tmp_path: Path) -> None:
    new, old = read_imatrix(write_gguf(tmp_path / "a.gguf", sums)), read_imatrix(write_legacy(tmp_path / "a.dat", sums))
    assert new.keys() == old.keys() == sums.keys()
    for name, values in sums.items():
        assert np.array_equal(new[name], values.reshape(-1) / N_CALLS) and np.array_equal(old[name], new[name])


def test_what_no_token_reached_weighs_as_much_as_all_else(sums: dict[str, np.ndarray], tmp_path: Path) -> None:
    name = next(iter(sums))
    assert (read_imatrix(write_gguf(tmp_path / "a.gguf", sums, unseen=name))[name] == 1).all()


def test_the_quantizer_minds_what_is_important(
    small_moe_f32: Path, sums: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Errors where inputs are large weigh more: so they become smaller, at the price of the others."""
    imatrix = write_gguf(tmp_path / "imatrix.gguf", sums)
    command = ["convert", str(small_moe_f32), "-o", str(tmp_path / "with.gguf"), "--quantize", "Q4_0"]
    assert main([*command, "--imatrix", str(imatrix)]) == 0
    convert(small_moe_f32, tmp_path / "without.gguf", quantize="Q4_0")
    tensors = [{tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
               for path in (small_moe_f32, tmp_path / "with.gguf", tmp_path / "without.gguf")]
    name = "blk.3.ffn_down_exps.weight"
    whole, minded, plain = (
        gguf.quants.dequantize(found[name].data, found[name].tensor_type).reshape(64, -1, 32) for found in tensors)
    weights = sums[name][:, None, :]
    errors = [float((weights * (values - whole) ** 2).sum()) for values in (minded, plain)]
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\x01\x00\x00\x00", b"x" * 4096])
def test_what_is_no_importance_matrix_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(content)
    with pytest.raises(FormatError, match="importance matrix"):
        read_imatrix(path)


def test_an_importance_matrix_is_for_quantizing(small_moe_f32: Path, tmp_path: Path, capsys) -> None:
    command = ["convert", str(small_moe_f32), "-o", str(tmp_path / "out.gguf"), "--imatrix", str(tmp_path / "none.dat")]
    assert main(command) == 2 and "name the type with --quantize" in capsys.readouterr().err
    assert main([*command, "--quantize", "Q4_0"]) == 2 and "cannot be read" in capsys.readouterr().err
