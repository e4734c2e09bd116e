"""Bodies in which something goes wrong on a rank, and what the others see of it."""

from __future__ import annotations

import contextlib
import dis
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cpcompat import CPContext, get_cp_context
from cpcompat import block as block_module
from cpcompat import ring as ring_module
from cpcompat.hooks import Models

from .equality import make_accelerator, plain_name

SDPA = F.scaled_dot_product_attention
PACKAGE = str(Path(block_module.__file__).parent)


def context(seconds: float = 60, rotate_method: str = "allgather") -> CPContext:
    """A context over all ranks whose process group waits for so long."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    return CPContext(mesh, rotate_method=rotate_method)


def attend(cp: CPContext, seed: int = 0, here: Tensor | None = None) -> Tensor:
    """One causal attention call, forward and backward, over this rank's shards; the gradient of the queries."""
    generator = torch.Generator().manual_seed(seed)
    here = cp.positions(8 * cp.size) if here is None else here
    query, key, value = torch.randn(3, 1, 2, 8 * cp.size, 8, generator=generator)[..., here, :].clone()
    query.requires_grad_()
    F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
    assert query.grad is not None
    return query.grad


def right(cp: CPContext, seed: int = 0) -> Tensor:
    """The same without CP."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, 1, 2, 8 * cp.size, 8, generator=generator).clone()
    query.requires_grad_()
    SDPA(query, key, value, is_causal=True).sum().backward()
    assert query.grad is not None
    return query.grad[..., cp.positions(8 * cp.size), :]


def goes_on(cp: CPContext) -> bool:
    """Whether a block of this context gives the right numbers."""
    ids = torch.arange(8 * cp.size)[None]
    with cp(buffers=[ids], buffer_seq_dims=[1]):
        found = attend(cp, 7)
    return torch.allclose(found, right(cp, 7), rtol=1e-5, atol=1e-6) and ids.shape == (1, 8 * cp.size)


def said(error: BaseException) -> str:
    """An error with its notes, as a traceback shows it."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


# --- on one rank only -------------------------------------------------------------------------------------------------


class Uncuttable(Tensor):
    """A buffer like any other, until it is cut."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.as_strided_copy:
            raise MemoryError("no memory for the second buffer")
        return super().__torch_function__(func, types, args, kwargs or {})


def on_one_rank(kind: str, rotate_method: str) -> dict[str, Any]:
    """Rank 1 fails in the second block, and rank 0 waits in attention for it.

    Returns:
        What was raised, how long it took in seconds, whether buffers and SDPA are as before, and whether a new group
        goes on.
    """
    rank, seconds = dist.get_rank(), float(os.environ["CP_TIMEOUT"])
    cp = context(seconds, rotate_method)
    assert goes_on(cp)
    length = 8 * cp.size
    ids, positions = torch.arange(length)[None], torch.arange(length)[None]
    buffers: list[Tensor] = [ids, positions]
    if rank == 1 and kind == "a buffer that cannot be cut":
        buffers[1] = torch.arange(length)[None].as_subclass(Uncuttable)  # type: ignore[assignment]
    if rank == 1 and kind == "refused":
        buffers = [tensor[:, :-1] for tensor in buffers]
    pointers = [tensor.data_ptr() for tensor in buffers]
    before = [torch.Tensor.clone(tensor) for tensor in buffers]
    start = time.monotonic()
    text = "no error"
    try:
        with cp(buffers=buffers, buffer_seq_dims=[1, 1]):
            if rank == 1 and kind == "raises":
                raise ValueError("mine")
            if rank == 1 and kind == "hangs":
                time.sleep(seconds + 1.5)
            attend(cp)
    except Exception as error:
        text = said(error)
    took = time.monotonic() - start
    report = {
        "said": text,
        "seconds": took,
        "buffers": all(
            tensor.data_ptr() == pointer and torch.equal(tensor.as_subclass(Tensor), values.as_subclass(Tensor))
            for tensor, pointer, values in zip(buffers, pointers, before, strict=True)
        ),
        "sdpa": F.scaled_dot_product_attention is SDPA,
    }
    dist.barrier()
    report["goes on"] = goes_on(context())
    return report


def killed(folder: str) -> None:
    """Rank 1 is killed in a block; rank 0 writes what it saw before anybody ends it."""
    cp = context(30)
    assert goes_on(cp)
    ids = torch.arange(8 * cp.size)[None]
    start = time.monotonic()
    try:
        with cp(buffers=[ids], buffer_seq_dims=[1]):
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            attend(cp)
    except Exception as error:
        report = {
            "said": said(error),
            "seconds": time.monotonic() - start,
            "buffers": ids.shape == (1, 8 * cp.size),
            "sdpa": F.scaled_dot_product_attention is SDPA,
        }
        (Path(folder) / "survivor.json").write_text(json.dumps(report))
        raise


def gave_up_and_went_on(numbered: bool, rotate_method: str) -> dict[str, Any]:
    """Rank 1 skips the rest of a batch, as programs do that catch out-of-memory errors; rank 0 does not.

    Args:
        numbered: as the block does it; without, each call's messages look like any other's.
        rotate_method: of the ring.
    """
    cp = context(2, rotate_method)
    rank, ring = cp.rank, cp._own_ring()

    def call(seed: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        query, key, value = torch.randn(3, 1, 2, 8 * cp.size, 8, generator=generator)[..., cp.positions(8 * cp.size), :]
        return ring_module.attention(ring, query, key, value, causal=True, scale=None, number=number if numbered else 0)

    call(0, 1)
    text, wrong = "no error", 0.0
    try:
        if rank == 0:
            found = call(1, 2)
            generator = torch.Generator().manual_seed(1)
            whole = SDPA(*torch.randn(3, 1, 2, 8 * cp.size, 8, generator=generator), is_causal=True)
            wrong = float((found - whole[..., cp.positions(8 * cp.size), :]).abs().max())
        else:
            call(2, 3)
    except Exception as error:
        text = said(error)
    dist.barrier()
    return {"said": text, "wrong": wrong}


# --- on all ranks at once ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def little_memory(spare: int) -> Iterator[None]:
    """Allow this process no more than `spare` bytes over what it has now."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def out_of_memory() -> dict[str, Any]:
    """Memory ends inside a block, and while one is entered; training goes on once there is some."""
    cp = context()
    assert goes_on(cp)
    found: dict[str, Any] = {}
    big = torch.zeros(1, 16 << 20, dtype=torch.int64)  # whose shard takes 64 MiB
    ids = torch.arange(8 * cp.size)[None]
    for where in "inside", "entering":
        buffers = [ids] if where == "inside" else [big, big.view_as(big)]
        pointers = [tensor.data_ptr() for tensor in buffers]
        text = "no error"
        try:
            with little_memory(96 << 20), cp(buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
                torch.empty(1 << 30)
        except RuntimeError as error:
            text = said(error)
        found[where] = {
            "said": text,
            "buffers": [tensor.data_ptr() for tensor in buffers] == pointers
            and buffers[0].shape[1] % (8 * cp.size) == 0,
            "sdpa": F.scaled_dot_product_attention is SDPA,
            "goes on": goes_on(cp),
        }
    return found


def group_destroyed(when: str) -> dict[str, Any]:
    """The process group is destroyed (and made again) while a block is open."""
    acc = make_accelerator(2, fsdp2=False)
    arguments = {} if hasattr(acc, "parallelism_config") else {"cp_size": 2}
    cp = get_cp_context(acc, **arguments)
    rank, found = dist.get_rank(), {}
    ids = torch.arange(16)[None]
    pointer = ids.data_ptr()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
    ports = [store.port if store else None]
    dist.broadcast_object_list(ports, src=0)

    def remake() -> None:
        mine = store or dist.TCPStore("127.0.0.1", ports[0], is_master=False)
        dist.init_process_group("gloo", store=mine, rank=rank, world_size=2)

    here = cp.positions(16)
    try:
        with cp(buffers=[ids], buffer_seq_dims=[1]):
            dist.barrier()
            dist.destroy_process_group()
            if when == "made again inside":
                remake()
            attend(cp, here=here)
        found["attention"] = "no error"
    except Exception as error:
        found["attention"] = said(error)
    found["buffers"] = ids.data_ptr() == pointer and ids.shape == (1, 16)
    found["sdpa"] = F.scaled_dot_product_attention is SDPA
    if when != "made again inside":
        remake()
    try:
        with cp():
            pass
    except Exception as error:
        found["old context"] = type(error).__name__
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    found["goes on"] = goes_on(get_cp_context(make_accelerator(2, fsdp2=False), **arguments))
    dist.barrier()
    return found


def dropped() -> dict[str, Any]:
    """A generator that holds a block is dropped without being closed; an exit stack is forgotten, which cannot be."""
    cp = context()
    ids = torch.arange(8 * cp.size)[None]

    def steps() -> Iterator[int]:
        with cp(buffers=[ids], buffer_seq_dims=[1]):
            attend(cp)
            yield ids.shape[1]

    running = steps()
    found: dict[str, Any] = {"inside": next(running)}
    del running
    found["after"] = (ids.shape[1], F.scaled_dot_product_attention is SDPA)
    stack = contextlib.ExitStack()
    stack.enter_context(cp())
    try:
        with cp():
            pass
    except Exception as error:
        found["forgotten"] = said(error)
    stack.close()
    found["goes on"] = goes_on(cp)
    return found


def interrupted_prepare(argument: bool) -> dict[str, Any]:
    """Ctrl-C in the middle of ``prepare``; the next try trains with the right numbers."""
    from cpcompat.testing import tiny_llama

    from .equality import batch, gradients, loss_of, reference, worst

    class Interrupting(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:  # which accelerate reads when it wraps the optimizer
            raise KeyboardInterrupt

    data = batch(rows=2, length=32)
    _, grads = reference(tiny_llama(), data)
    acc = make_accelerator(2, fsdp2=False)
    arguments = {"cp_size": 2} if argument else {}
    model = tiny_llama()
    found: dict[str, Any] = {"interrupted": False}
    try:
        acc.prepare(model, Interrupting(model.parameters(), lr=0.1))
    except KeyboardInterrupt:
        found["interrupted"] = True
    model, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    cp = get_cp_context(acc, **arguments)
    total = int((data["labels"] != -100).sum())
    with cp(buffers=list(data.values()), buffer_seq_dims=[1, 1, 1]):
        local = loss_of(model, data, total)
        acc.backward(local * cp.size)
    found["gradient"] = worst(gradients(model), grads)
    return found


# --- Ctrl-C anywhere --------------------------------------------------------------------------------------------------


def _interruptible(code: CodeType) -> set[int]:
    """Where the interpreter may run a signal handler: at the start of a function, after calls, at jumps back.

    3.10 looks before nearly every instruction; that its last ones, with which a function returns, lie outside of any
    ``try`` is more than a library can mend.
    """
    places, after_call = set(), True
    for instruction in dis.get_instructions(code):
        if after_call:
            places.add(instruction.offset)
        after_call = instruction.opname.startswith(("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE"))
    return places


def interrupted(phase: str) -> dict[str, int]:
    """Raise KeyboardInterrupt at one place after the other while a block is entered, or while it is left.

    Returns:
        How many places there were, and how often what followed was not as before.
    """
    cp = context()
    cp._attended = True
    length = 8 * cp.size
    ids, rows = torch.arange(length)[None], torch.arange(length).expand(3, -1)
    places: dict[CodeType, set[int]] = {}
    # The first instruction of __exit__ runs before anything of ours could catch it.
    skipped = block_module.Block.__exit__.__code__
    tried, broken = 0, []

    def attempt(number: int) -> str:
        seen, where, counting = 0, "", phase == "entering"

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal seen, where
            code = frame.f_code
            if not code.co_filename.startswith(PACKAGE):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if code not in places:
                places[code] = _interruptible(code)
            if counting and event == "opcode" and code is not skipped and frame.f_lasti in places[code]:
                seen += 1
                if seen == number:
                    where = f"{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}:{frame.f_lineno}"
                    raise KeyboardInterrupt
            return trace

        block = cp(buffers=[ids, rows], buffer_seq_dims=[1, 1], fingerprint="never")
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for this when tracing begins, and not later
        try:
            sys.settrace(trace)
            with block:
                counting = phase == "leaving"
                assert ids.shape[1] == rows.shape[1] == 8
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        return where

    pointers = ids.data_ptr(), rows.data_ptr()
    while True:
        if sys.version_info >= (3, 13):
            attempt(0)  # nowhere: it tells of no instruction in a function when it begins to trace it
        where = attempt(tried + 1)
        if not where:
            break
        tried += 1
        whole = (ids.shape, rows.shape, rows.stride()) == ((1, length), (3, length), (0, 1))
        if not whole or (ids.data_ptr(), rows.data_ptr()) != pointers or F.scaled_dot_product_attention is not SDPA:
            broken.append(where)
            break
    return {"tried": tried, "broken": broken, "goes on": not broken and goes_on(cp)}


# --- for a long time --------------------------------------------------------------------------------------------------

PLACES = ("entering", "attention", "loss", "backward", "step")


class Thrown(Exception):
    """What is thrown in."""


def survive(steps: int, share: float) -> dict[str, Any]:
    """Train with exceptions thrown in on all ranks at once; and again without the steps in which they were thrown.

    Gradients are averaged by hand: DDP itself cannot go on after a backward pass that was broken off.
    """
    from cpcompat.testing import tiny_llama

    draw = random.Random(5)
    thrown = {step: draw.choice(PLACES) for step in range(steps) if draw.random() < share}
    length = 16
    cp = context()

    def train(skip: bool) -> tuple[dict[str, Tensor], int]:
        model = tiny_llama(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1)
        Models().refresh([model])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        place, caught = "", 0

        def throw(here: str) -> None:
            if place == here:
                raise Thrown(here)

        model.model.layers[1].self_attn.register_forward_pre_hook(lambda module, args: throw("attention"))

        def in_backward(grad: Tensor) -> Tensor:
            throw("backward")
            return grad

        def step(number: int) -> None:
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(128, (2, length), generator=generator)
            batch = {"input_ids": ids, "labels": ids}
            if place == "entering":
                batch = {"input_ids": ids, "labels": ids[:, :-1]}
            with cp.batch(batch) as local:
                labels = local.pop("shift_labels")
                hidden = model.model(**local, use_cache=False).last_hidden_state
                hidden.register_hook(in_backward)
                logits = model.lm_head(hidden)
                total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                loss = cp.reduce_loss(total, (labels != -100).sum())
                throw("loss")
                optimizer.zero_grad()
                loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= cp.size
            throw("step")
            optimizer.step()

        for number in range(steps):
            place = thrown.get(number, "")
            if place and skip:
                continue
            try:
                step(number)
            except (Thrown, ValueError, RuntimeError) as error:
                if not place:
                    raise
                assert isinstance(error, Thrown) or place == "entering", error
                caught += 1
            assert F.scaled_dot_product_attention is SDPA
        return {plain_name(name): value.detach().clone() for name, value in model.named_parameters()}, caught

    with_faults, caught = train(skip=False)
    without, _ = train(skip=True)
    return {
        "steps": steps,
        "thrown": len(thrown),
        "caught": caught,
        "places": sorted(set(thrown.values())),
        "equal": all(torch.equal(with_faults[name], without[name]) for name in without),
        "moved": not torch.equal(
            without["model.embed_tokens.weight"],
            tiny_llama(
                hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1
            ).model.embed_tokens.weight,
        ),
    }
