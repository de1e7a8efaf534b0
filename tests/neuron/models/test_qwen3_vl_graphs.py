"""Weights (slices, shards, dtypes) and graphs (no breaks under torch.compile)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from neuron.kernels import load_kernels
from neuron.models import family_of
from neuron.models.interface import CheckpointError
from neuron.models.qwen3_vl.weights import Checkpoint
from tests.neuron.models.gang import Gang, Meeting, Seq, ThreadCollectives
from tests.neuron.models.reference import make_checkpoint, make_image


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), layers=2)


def play(gang: Gang) -> list[torch.Tensor]:
    """An image prompt in two chunks, a text prompt, and a decode batch of both."""
    image = make_image("a", 4, 6, gang.config.patch_dim, seed=1)
    seen = Seq([5, 6, 7, *[gang.config.image_token_id] * 6, 8, 9], [(3, image)])
    text = Seq([11, 12, 13])
    gang.encode([image])
    logits = [*gang.prefill([(seen, 6)], 16, 32), *gang.prefill([(seen, 5), (text, 3)], 16, 32)]
    logits += gang.prefill([(other := Seq([3, 4]), 2)], 16, 32)
    for seq in (seen, text, other):
        seq.tokens.append(17)
    return [*logits, gang.decode([seen, text, other], 4, 2)]


def test_graphs_have_no_breaks_and_one_shape_compiles_once(folder: Path) -> None:
    """aot_eager: traced whole, with the writes to the buffers made explicit, but run as is: no compiler's minutes."""
    gang = Gang(folder, 1)
    expected = play(gang)
    torch.compiler.reset()
    model = gang.models[0]
    for name in ("encode", "write_embeddings", "prefill", "decode"):
        setattr(model, name, torch.compile(getattr(model, name), fullgraph=True, dynamic=False, backend="aot_eager"))
    gang.image_rows, gang.next_row = {}, 0
    got = play(gang)
    with torch.compiler.set_stance("fail_on_recompile"):
        gang.image_rows, gang.next_row = {}, 0
        again = play(gang)
    for a, b, c in zip(expected, got, again, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(b, c, atol=0, rtol=0)


def test_bfloat16_stays_close(folder: Path) -> None:
    exact, rough = play(Gang(folder, 1)), play(Gang(folder, 2, dtype=torch.bfloat16))
    for a, b in zip(exact, rough, strict=True):
        assert b.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(a, b, dim=-1).min() > 0.99


def test_a_sharded_checkpoint_gives_the_same_logits(folder: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, layers=2, shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    for a, b in zip(play(Gang(folder, 1)), play(Gang(tmp_path, 1)), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_a_rank_reads_only_its_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What 16 ranks read of the text model's matrices is the checkpoint once, beside replicated KV heads and norms."""
    read = 0
    original = Checkpoint._slice

    def counting(self: Checkpoint, name: str) -> object:
        inner = original(self, name)

        class Counted:
            def get_shape(self) -> list[int]:
                return inner.get_shape()

            def __getitem__(self, key: object) -> torch.Tensor:
                nonlocal read
                part = inner[key]
                if any(word in name for word in ("q_proj", "o_proj", "mlp.down", "mlp.gate", "embed_tokens")):
                    read += part.numel() if "language_model" in name else 0
                return part

        return Counted()

    monkeypatch.setattr(Checkpoint, "_slice", counting)
    meeting = Meeting(16)
    for rank in range(16):
        family_of(folder).load_model(
            folder, ThreadCollectives(meeting, rank, 16), load_kernels("masked"), torch.float32, "cpu"
        )
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = [n for n in file.keys() if "language_model" in n]  # noqa: SIM118
        total = sum(
            file.get_tensor(n).numel()
            for n in names
            if any(word in n for word in ("q_proj", "o_proj", "mlp.down", "mlp.gate", "embed_tokens"))
        )
    assert read == total


def test_a_missing_tensor_and_a_missing_file_are_named(folder: Path, tmp_path: Path) -> None:
    collectives = ThreadCollectives(Meeting(1), 0, 1)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    family = family_of(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or model\.safetensors\.index\.json"):
        family.load_model(tmp_path, collectives, load_kernels("masked"), torch.float32, "cpu")
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.language_model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor model\.language_model\.norm\.weight"):
        family.load_model(tmp_path, collectives, load_kernels("masked"), torch.float32, "cpu")
