import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from prime_rl.errors import ModelError
from prime_rl.inference.vllm.expected import check_fits, shapes_of

HERE = Path("/run/weights/step_3")
SERVED = {"a": (2, 3), "b": (4,)}


def save(directory, *, tied=False, **tensors):
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))


def test_shapes_are_read_from_the_files_headers(tmp_path):
    save(tmp_path, a=torch.zeros(2, 3), b=torch.zeros(4))
    assert shapes_of(tmp_path) == SERVED


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_the_embedding_need_not_be_stored(tmp_path, tied):
    save(tmp_path, tied=tied, **{"a": torch.zeros(2), "lm_head.weight": torch.zeros(2)})
    assert ("lm_head.weight" in shapes_of(tmp_path)) is not tied


def test_quantized_checkpoints_are_not_compared(tmp_path):
    save(tmp_path, a=torch.zeros(2))
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    assert shapes_of(tmp_path) == {}


def test_a_damaged_file_is_named(tmp_path):
    save(tmp_path, a=torch.zeros(2))
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
        shapes_of(tmp_path)


def test_equal_shapes_fit_and_a_head_more_does_no_harm():
    check_fits(HERE, SERVED, SERVED)
    check_fits(HERE, SERVED | {"lm_head.weight": (9, 9)}, SERVED)
    check_fits(HERE, SERVED, {})


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"a": (2, 3)}, "step_3 has no b, which the served model has"),
        (SERVED | {"c": (1,)}, "step_3 has c, which the served model has not"),
        (SERVED | {"b": (5,)}, r"step_3: b has shape \[5\], the served model's has \[4\]"),
    ],
)
def test_what_does_not_fit_is_named(found, said):
    with pytest.raises(ModelError, match=said):
        check_fits(HERE, found, SERVED)


def test_many_names_are_summed_up():
    with pytest.raises(ModelError, match="has no t0, t1, t2 and 2 more"):
        check_fits(HERE, {}, {f"t{i}": (1,) for i in range(5)})
