"""Bodies in which more than one thing goes on in a process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from cpcompat import CPContext, get_cp_context
from cpcompat.errors import CPError, NestedContext

from .equality import batch, gradients, loss_of, make_accelerator, reference, worst

SDPA = F.scaled_dot_product_attention


def _step(acc: Any, cp: CPContext, model: nn.Module, data: dict[str, Tensor]) -> None:
    total = int((data["labels"] != -100).sum())
    with cp(buffers=list(data.values()), buffer_seq_dims=[1, 1, 1]):
        acc.backward(loss_of(model, data, total) * cp.size)


def two_accelerators(argument: bool) -> dict[str, float]:
    """Two accelerators with a model each, whose blocks come by turns; each gradient's difference from that without CP."""
    from cpcompat.testing import tiny_llama

    arguments = {"cp_size": 2} if argument else {}
    found = {}
    owners = []
    for seed in (1, 2):
        acc = make_accelerator(2, fsdp2=False)
        model = tiny_llama(seed=seed)
        model, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        owners.append((acc, get_cp_context(acc, **arguments), model))
    assert owners[0][1] is not owners[1][1]
    for turn in range(2):
        for seed, (acc, cp, model) in enumerate(owners, 1):
            data = batch(rows=2, length=32, seed=10 * turn + seed)
            _, grads = reference(tiny_llama(seed=seed), data)
            model.zero_grad()
            _step(acc, cp, model, data)
            found[f"turn {turn}, model {seed}"] = worst(gradients(model), grads)
    return found


def two_threads(rounds: int) -> dict[str, Any]:
    """Many threads that enter at once: one comes in, the others get an error; nothing is left behind."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    contexts = [CPContext(mesh) for _ in range(4)]
    for cp in contexts:
        cp._attended = True
    inside, refused, most, wrong = 0, 0, 0, []
    count = threading.Lock()
    start = threading.Barrier(len(contexts))

    def work(cp: CPContext) -> None:
        nonlocal inside, refused, most
        for _ in range(rounds):
            ids = torch.arange(16)[None]
            start.wait(timeout=30)
            try:
                with cp(buffers=[ids], buffer_seq_dims=[1], fingerprint="never"):
                    with count:
                        inside += 1
                        most = max(most, inside)
                    if ids.shape != (1, 8):
                        wrong.append("not cut")
                    with count:
                        inside -= 1
            except NestedContext:
                with count:
                    refused += 1
            if ids.shape != (1, 16):
                wrong.append("not restored")

    threads = [threading.Thread(target=work, args=(cp,)) for cp in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return {
        "most": most,
        "refused": refused,
        "wrong": wrong,
        "sdpa": F.scaled_dot_product_attention is SDPA,
        "ended": not any(thread.is_alive() for thread in threads),
    }


def another_thread() -> dict[str, Any]:
    """A thread that attends while another one's block is open; and after it."""
    cp = CPContext(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    query = torch.randn(1, 2, 8, 8)
    found: dict[str, Any] = {}

    def attend(when: str) -> None:
        try:
            out = F.scaled_dot_product_attention(query, query, query, is_causal=True)
            found[when] = torch.equal(out, SDPA(query, query, query, is_causal=True))
        except CPError as error:
            found[when] = str(error)

    def in_thread(when: str) -> None:
        thread = threading.Thread(target=attend, args=(when,), name="reward model")
        thread.start()
        thread.join(30)

    with cp():
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
        in_thread("inside")
        with cp.disabled():
            in_thread("disabled")
    in_thread("after")
    return found


class Attending(torch.utils.data.Dataset[Tensor]):
    """Samples that come out of attention, as from a frozen encoder in a worker."""

    def __init__(self) -> None:
        self.values = torch.randn(4, 1, 2, 8, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        value = self.values[index]
        return F.scaled_dot_product_attention(value, value, value, is_causal=True)


def loader(method: str) -> dict[str, Any]:
    """A loader whose workers start while a block is open, and attend; what they give, and the block's own attention."""
    cp = CPContext(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    data = Attending()
    expected = torch.stack([data[index] for index in range(len(data))])
    query, key, value = torch.randn(3, 1, 2, 16, 8, generator=torch.Generator().manual_seed(4))
    whole = SDPA(query, key, value, is_causal=True)
    here = cp.positions(16)
    ids = torch.arange(16)[None]
    workers = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context=method, timeout=60)
    with cp(buffers=[ids], buffer_seq_dims=[1]):
        found = torch.cat(list(workers))
        out = F.scaled_dot_product_attention(
            query[..., here, :], key[..., here, :], value[..., here, :], is_causal=True
        )
    return {
        "workers": torch.allclose(found, expected, atol=1e-6),
        "block": torch.allclose(out, whole[..., here, :], atol=1e-6),
        "restored": ids.shape == (1, 16) and F.scaled_dot_product_attention is SDPA,
    }


@contextlib.contextmanager
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def compiled(backend: str, order: str, argument: bool) -> list[tuple[float, float]]:
    """A compiled model inside and outside of blocks, in turns; the differences of logits and gradients from plain ones.

    Args:
        backend: of ``torch.compile``.
        order: "i" for a step inside a block, "o" for one outside.
        argument: ask by ``cp_size=``.
    """
    from cpcompat.testing import tiny_llama

    data = batch(rows=1, length=32)
    loss, grads = reference(tiny_llama(), data)
    acc = make_accelerator(2, fsdp2=False)
    model, cp = acc.prepare_model(tiny_llama()), get_cp_context(acc, **({"cp_size": 2} if argument else {}))
    plain = model.module
    quick = torch.compile(plain, backend=backend)
    total = int((data["labels"] != -100).sum())
    found = []
    with _fresh_dynamo():
        for where in order:
            plain.zero_grad()
            if where == "o":
                out = loss_of(quick, data, total)
                out.backward()
            else:
                with cp(buffers=list(data.values()), buffer_seq_dims=[1, 1, 1]):
                    out = loss_of(quick, data, total)
                    out.backward()
                out = out.detach()
                torch.distributed.all_reduce(out)
                for parameter in plain.parameters():
                    torch.distributed.all_reduce(parameter.grad)
            found.append((abs(float(out) - loss) / loss, worst(gradients(plain), grads)))
    return found
