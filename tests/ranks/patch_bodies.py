"""Bodies for the tests of `patch`: loops that call ``acc.maybe_context_parallel`` as trainers do."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
import torch.distributed as dist

from cpcompat import patch, unpatch
from cpcompat.testing import tiny_llama

from . import equality


@contextlib.contextmanager
def warned_by_accelerate() -> Any:
    """The messages of accelerate's logger, which warns once in a process."""
    from accelerate.logging import MultiProcessAdapter

    MultiProcessAdapter.warning_once.cache_clear()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("accelerate.accelerator")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def loop(prepare: str) -> dict[str, Any]:
    """One step of a loop that knows nothing of cpcompat, against the same batch in one process."""
    data = equality.batch(rows=2, length=64)
    loss, grads = equality.reference(tiny_llama(), data)
    acc = equality.make_accelerator(2, fsdp2=False)
    model = tiny_llama()
    if prepare == "model and optimizer":
        model, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    elif prepare == "model alone":
        model = acc.prepare_model(model)
    else:
        model = acc.prepare_model(model, evaluation_mode=True)
    total = int((data["labels"] != equality.IGNORE).sum())
    with patch():
        block = acc.maybe_context_parallel(buffers=list(data.values()), buffer_seq_dims=[1, 1, 1])
        with block:
            length = data["input_ids"].shape[1]
            local = equality.loss_of(model, data, total)
            if prepare != "for evaluation":
                acc.backward(local * 2)
    whole = local.detach().clone()
    dist.all_reduce(whole)
    return {
        "loss": abs(float(whole) - loss) / loss,
        "gradient": 0.0 if prepare == "for evaluation" else equality.worst(equality.gradients(model), grads),
        "lengths": (length, data["input_ids"].shape[1]),
        "block": type(block).__name__,
    }


def without_cp() -> dict[str, Any]:
    """An accelerator without CP must not notice."""
    from accelerate import Accelerator

    acc = Accelerator(cpu=True)
    ids = torch.arange(7)[None]
    with patch(), warned_by_accelerate() as messages:
        for _ in range(2):
            with acc.maybe_context_parallel(buffers=[ids], buffer_seq_dims=[1], no_restore_buffers={ids}):
                inside = ids.clone()
    return {
        "messages": messages,
        "ids": inside.equal(ids) and ids.equal(torch.arange(7)[None]),
        "context": hasattr(acc, "_cp_context"),
    }


def replaced_on_the_instance(calls_on: bool) -> list[str]:
    """An owner's own method on one accelerator stays in charge, also where it calls the one it replaced."""
    acc = equality.make_accelerator(2, fsdp2=False)
    acc.prepare(tiny_llama())
    seen = []
    with patch():
        theirs = acc.maybe_context_parallel

        @contextlib.contextmanager
        def mine(**keywords: Any) -> Any:
            seen.append("mine")
            with theirs(**keywords) if calls_on else contextlib.nullcontext():
                yield

        acc.maybe_context_parallel = mine
        try:
            with acc.maybe_context_parallel(buffers=[torch.zeros(1, 8)], buffer_seq_dims=[1]):
                seen.append("inside")
        except AttributeError as error:  # accelerate 1.12.0 itself, which is what calling on leads to
            seen.append(str(error))
    return seen


def foreign_context() -> list[str]:
    """A library that leaves a context of its own where accelerate reads it (axolotl) gets the call."""
    acc = equality.make_accelerator(2, fsdp2=False)
    seen = []

    @contextlib.contextmanager
    def context(buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None) -> Any:
        seen.append("theirs")
        yield

    acc._cp_context = context
    ids = torch.zeros(1, 8)
    with patch(), acc.maybe_context_parallel(buffers=[ids], buffer_seq_dims=[1]):
        seen.append(f"{ids.shape[1]} tokens")
    return seen


def gathered(cp: bool, patched: bool) -> dict[str, Any]:
    """Every batch of six rows in batches of four, gathered as metrics; the sign tells the rank's shards apart."""
    from accelerate import Accelerator

    acc = equality.make_accelerator(2, fsdp2=False) if cp else Accelerator(cpu=True)
    loader = acc.prepare(torch.utils.data.DataLoader(torch.arange(1, 7), batch_size=4 if cp else 2))
    sign = -1 if acc.process_index else 1
    found: dict[str, Any] = {"rows": [], "nested": [], "objects": [], "sums": []}
    with patch() if patched else contextlib.nullcontext():
        for rows in loader:
            found["rows"].append(acc.gather_for_metrics(rows * sign).tolist())
            found["nested"].append(acc.gather_for_metrics({"a": (rows * sign,)})["a"][0].tolist())
            found["objects"].append(acc.gather_for_metrics([str(int(row)) for row in rows]))
            found["sums"].append(acc.gather_for_metrics(rows.sum() * sign).tolist())
    return found


def left_over() -> bool:
    """Whether a body before this one left the class patched; unpatching once more must do no harm."""
    from accelerate import Accelerator

    unpatch()
    return hasattr(Accelerator.maybe_context_parallel, "__cpcompat__")
