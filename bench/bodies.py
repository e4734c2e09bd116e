"""What the ranks of the benchmark run. Times are in seconds, memory is in bytes."""

from __future__ import annotations

import ctypes
import gc
import resource
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cpcompat.context import CPContext
from cpcompat.ring import Ring

LENGTHS = (1 << 10, 1 << 13, 1 << 16, 1 << 20)
METHODS = ("alltoall", "allgather")


def cp_mesh(size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))


def quiet_context(mesh: Any, kind: type[CPContext] = CPContext, **options: Any) -> CPContext:
    """A context without the warning that nothing attended, which is right here."""
    cp = kind(mesh, **options)
    cp._attended = True
    return cp


def alternate(works: dict[str, Callable[[], Any]], rounds: int, burst: int = 1) -> dict[str, list[float]]:
    """Time works by turns: each round `burst` calls of one, of the next, and so on; seconds for one call."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for turn in range(rounds):
        names = list(works) if turn % 2 == 0 else list(reversed(works))
        for name in names:
            work = works[name]
            start = time.perf_counter()
            for _ in range(burst):
                work()
            times[name].append((time.perf_counter() - start) / burst)
    return times


# --- memory ------------------------------------------------------------------------------------------------------------


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def return_freed_memory() -> None:
    """Let malloc give back what it holds, and keep giving back at once, so that resident size tells what is in use."""
    libc = ctypes.CDLL(None)
    gc.collect()
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    libc.malloc_trim(0)


@contextmanager
def peak() -> Iterator[list[int]]:
    """Measure by how much the resident size rises, at most, above what it is at the start."""
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, rise = _status("VmRSS"), [0]
    yield rise
    rise[0] = _status("VmHWM") - before


# --- get_cp_context ----------------------------------------------------------------------------------------------------


def lookup() -> dict[str, float]:
    """A call for a context that is there, and reads of the accelerator's attributes."""
    from accelerate import Accelerator

    from cpcompat import get_cp_context
    from cpcompat.testing import cpu_parallelism_config, tiny_llama

    acc = Accelerator(parallelism_config=cpu_parallelism_config(2))
    acc.prepare_model(tiny_llama())
    assert get_cp_context(acc) is get_cp_context(acc)
    statements = {
        "call": "get_cp_context(acc)",
        "empty call": "empty(acc)",
        "instance attribute": "acc._cp_context",
        "getattr": "getattr(acc, '_cp_context')",
        "property": "acc.device",
    }
    names = {"acc": acc, "get_cp_context": get_cp_context, "empty": lambda acc, *, a=None, b=None, c=None: None}
    timers = {name: timeit.Timer(statement, globals=names) for name, statement in statements.items()}
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(100):
        for name, timer in timers.items():
            times[name].append(timer.timeit(500) / 500)
    dist.barrier()
    return {name: median(values) for name, values in times.items()}


# --- enter and leave ---------------------------------------------------------------------------------------------------


class WithTorchsAttention(CPContext):
    """A context that switches torch's own attention on, as it does on accelerators."""

    @property
    def _device_type(self) -> str:
        return "other than cpu"


def _buffers(length: int) -> list[torch.Tensor]:
    return [torch.arange(length).view(1, length).clone() for _ in range(4)]


def enter_and_leave(length: int, keep: bool, rounds: int, burst: int) -> dict[str, float]:
    """Enter and leave, ours and torch's; with `keep`, no buffer is restored and each round brings new ones."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = cp_mesh(2)
    ours, switched = quiet_context(mesh), quiet_context(mesh, WithTorchsAttention)
    dims = [1] * 4
    enters: dict[str, Callable[..., Any]] = {
        "ours": lambda **kw: ours(buffer_seq_dims=dims, **kw),
        "torch": lambda **kw: context_parallel(mesh, buffer_seq_dims=dims, **kw),
        "with torch's attention": lambda **kw: switched(buffer_seq_dims=dims, **kw),
        "fingerprint": lambda **kw: ours(buffer_seq_dims=dims, fingerprint="always", **kw),
    }
    times: dict[str, list[float]] = {name: [] for name in enters}
    whole = _buffers(length)
    # What was sharded for good cannot be sharded again: each enter has its own set, made outside the timed part.
    for turn in range(-1, rounds):
        for name in list(enters) if turn % 2 == 0 else list(reversed(enters)):
            enter = enters[name]
            many = min(burst, 2) if name == "fingerprint" else burst
            sets = [[b.clone() for b in whole] for _ in range(many)] if keep else [whole] * many
            works = [{"buffers": one, "no_restore_buffers": set(one) if keep else None} for one in sets]
            start = time.perf_counter()
            for work in works:
                with enter(**work):
                    pass
            if turn >= 0:
                times[name].append((time.perf_counter() - start) / many)
    return {name: median(values) for name, values in times.items()}


def enter_memory(which: str, keep: bool) -> int:
    """How far the resident size rises in a block over 4 buffers of 1 Mi tokens."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh, dims = cp_mesh(2), [1] * 4
    ours = quiet_context(mesh)
    for length in LENGTHS[0], LENGTHS[-1]:  # the short one loads what is loaded once
        buffers = _buffers(length)
        kept = set(buffers) if keep else None
        with peak() as rise:
            if which == "ours":
                with ours(buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=kept, fingerprint="never"):
                    pass
            else:
                with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=kept or set()):
                    pass
    return rise[0]


def over_time(times: int) -> dict[str, int]:
    """Enter and leave many times; by how much resident size and the number of live tensors grow."""
    mesh = cp_mesh(2)
    cp = quiet_context(mesh)
    buffers = _buffers(LENGTHS[0])

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    def enter() -> None:
        with cp(buffers=buffers, buffer_seq_dims=[1] * 4, no_restore_buffers=None):
            pass

    for _ in range(1000):
        enter()
    return_freed_memory()
    live, size = tensors(), _status("VmRSS")
    for _ in range(times):
        enter()
    return_freed_memory()
    return {"tensors": tensors() - live, "resident": _status("VmRSS") - size}


# --- attention ---------------------------------------------------------------------------------------------------------


def _heads(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 8, length, 64, generator=generator).requires_grad_() for _ in range(3)]


def _forward_and_backward(heads: list[torch.Tensor]) -> None:
    out = F.scaled_dot_product_attention(*heads, is_causal=True)
    out.backward(torch.ones_like(out))
    for tensor in heads:
        tensor.grad = None


class _Done:
    def wait(self) -> None:
        pass


class Silent(Ring):
    """A ring whose messages do not travel, to see what the kernels and the merging take by themselves."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
        return _Done()

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        tensor.zero_()
        return _Done()


def attention_times(length: int, rounds: int) -> dict[str, list[float]]:
    """Forward and backward of one process, while the other rank waits, and of two ranks; seconds of each round.

    "silent" is alltoall without its messages.
    """
    mesh = cp_mesh(2)
    contexts = {method: quiet_context(mesh, rotate_method=method) for method in METHODS}
    unheard = quiet_context(mesh, rotate_method="alltoall")
    unheard._ring = Silent(**vars(unheard._ring))
    first = dist.get_rank() == 0
    whole = _heads(length) if first else []
    local = _heads(length // 2)

    def one(threads: int) -> Callable[[], None]:
        def work() -> None:
            if first:
                torch.set_num_threads(threads)
                _forward_and_backward(whole)
                torch.set_num_threads(1)
            dist.barrier()

        return work

    def two(method: str) -> Callable[[], None]:
        def work() -> None:
            with contexts[method]():
                _forward_and_backward(local)
            dist.barrier()

        return work

    def silent() -> None:
        with unheard():
            _forward_and_backward(local)
        dist.barrier()

    works = {
        "one thread": one(1),
        "two threads": one(2),
        "silent": silent,
        **{m: two(m) for m in METHODS},
    }
    return alternate(works, rounds)


def attention_memory(length: int, method: str) -> int:
    """The peak of forward and backward with its inputs; of a process by itself where `method` is empty."""
    cp = quiet_context(cp_mesh(2), rotate_method=method) if method else None

    def work(length: int) -> None:
        if cp is None:
            _forward_and_backward(_heads(length))
        else:
            with cp():
                _forward_and_backward(_heads(length // 2))

    work(64)
    with peak() as rise:
        work(length)
    return rise[0]


# --- training ----------------------------------------------------------------------------------------------------------

# Small, with the vocabulary of Llama 2: memory goes where it does in training, and little time to attention.
LLAMA: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1 << 20,
}


def _trainer(length: int, cp_size: int, **fields: Any) -> Callable[[], float]:
    """A train step over one sequence: plain where cp_size is 1, else with get_cp_context under DDP."""
    from accelerate import Accelerator

    from cpcompat import get_cp_context
    from cpcompat.testing import cpu_parallelism_config, tiny_llama

    model = tiny_llama(**fields)
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(1))
    if cp_size == 1:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def plain() -> float:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return plain

    acc = Accelerator(parallelism_config=cpu_parallelism_config(cp_size))
    model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    cp = get_cp_context(acc)

    def with_cp() -> float:
        with cp.batch({"input_ids": ids, "labels": ids}) as local:
            labels = local.pop("shift_labels")
            # No name for the logits, which would keep them in memory during backward.
            loss_sum = F.cross_entropy(model(**local).logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = cp.reduce_loss(loss_sum, (labels != -100).sum())
            acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return with_cp


def train_times(length: int, rounds: int) -> dict[str, list[float]]:
    """Steps of one process, while the other rank waits, and of two ranks; seconds of each round."""
    fields = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": length,
    }
    step = _trainer(length, 1, **fields) if dist.get_rank() == 0 else lambda: 0.0
    with_cp = _trainer(length, 2, **fields)
    return alternate({"one": lambda: (step(), dist.barrier()), "two": lambda: (with_cp(), dist.barrier())}, rounds)


def train_within(length: int, cp_size: int, limit: int) -> bool:
    """Whether two train steps fit in a limit of private memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    step = _trainer(length, cp_size, **LLAMA)
    step()
    step()
    return True


def train_memory(length: int, cp_size: int) -> int:
    """By how much the resident size rises in a train step, over that of a process with model and optimizer."""
    _trainer(64 * cp_size, cp_size, **LLAMA)()
    step = _trainer(length, cp_size, **LLAMA)
    with peak() as rise:
        step()
    return rise[0]
