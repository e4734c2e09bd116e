"""The README's blocks of code, run in order on real ranks."""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace
from typing import Any

import torch

from cpcompat.testing import tiny_llama
from ranks.equality import batch, make_accelerator


def blocks(code: list[str]) -> dict[str, Any]:
    """Run them with the names that a reader has in his own loop."""
    accelerator = make_accelerator(2, fsdp2=False)
    model = tiny_llama()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = batch(2, 64)
    losses: list[float] = []

    def loss_of(model: Any, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids, position_ids=positions).logits
        losses.append(ids.shape[1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    names: dict[str, Any] = {
        "accelerator": accelerator,
        "accelerator_without_cp": SimpleNamespace(parallelism_config=None),
        "model": model,
        "ids": data["input_ids"],
        "labels": data["labels"],
        "positions": data["position_ids"],
        "batch": {"input_ids": data["input_ids"], "labels": data["input_ids"].clone()},
        "loss_of": loss_of,
        "cross_entropy": torch.nn.functional.cross_entropy,
        "trainer": SimpleNamespace(train=lambda: losses.append(-1)),
    }
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in code:
            exec(block, names)
    from cpcompat import unpatch

    unpatch()
    return {"printed": printed.getvalue(), "losses": losses, "origin": names["cp"].origin}
