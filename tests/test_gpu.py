"""bf16 on a GPU: no further from float64 than 1.5 × the plain model of transformers is."""

from pathlib import Path

import pytest
import torch
import transformers

import ithaca
from ithaca.model.decoder import stored_name
from tests.models import SIZES, make_model, save

GPU_SIZES = SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama3.1", "qwen3", "smollm3"])
@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_bf16_error(family: str, checkpoint: str, tmp_path: Path) -> None:
    folder = save(make_model(family, torch.bfloat16, **GPU_SIZES), tmp_path / "in")
    tokens = torch.randint(0, 97, (2, 600))

    def theirs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        model.cuda()(tokens.cuda(), labels=tokens.cuda()).loss.backward()
        return {name: parameter.grad.double() for name, parameter in model.named_parameters()}

    model = ithaca.apply(ithaca.load_model(folder, "bfloat16"), ithaca.Plan(checkpoint=checkpoint))
    assert model.kernel.name == "cudnn+flash"
    model(model.shard(tokens, tokens)).backward()
    exact, plain = theirs(torch.float64), theirs(torch.bfloat16)
    ours = {stored_name(n): p.grad.full_tensor().double() for n, p in model.decoder.named_parameters()}

    def error(found: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(found[name] - exact[name]).norm() / exact[name].norm() for name in exact])

    assert (error(ours) <= 1.5 * error(plain)).all(), torch.stack((error(ours), error(plain)))
