"""Bodies that drive the engine: shard, attend, restore, refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from cpcompat import AttentionWarning, CPContext, CPError

SDPA = F.scaled_dot_product_attention
DTYPES = (torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16, torch.float64, torch.uint8)


def context(rotate_method: str = "allgather") -> CPContext:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return CPContext(mesh, rotate_method=rotate_method)


def attend(length: int = 8, **keywords: Any) -> Tensor:
    """One causal attention call, for blocks that are about something else."""
    query = torch.ones(1, 1, length, 8)
    return F.scaled_dot_product_attention(query, query, query, **{"is_causal": True, **keywords})


@st.composite
def tensors(draw: st.DrawFn, size: int) -> tuple[Tensor, int]:
    """A tensor of any dtype, strides and origin, and the sequence dimension of it."""
    length = 2 * size * draw(st.integers(1, 4))
    before, after = draw(st.lists(st.integers(1, 3), max_size=2)), draw(st.lists(st.integers(1, 3), max_size=2))
    shape, dim = [*before, length, *after], len(before)
    dtype = draw(st.sampled_from(DTYPES))
    values = torch.arange(int(np.prod(shape)) * 3) * 7 % 101
    kind = draw(st.sampled_from(["contiguous", "transposed", "sliced", "numpy", "expanded", "strided"]))
    count = int(np.prod(shape))
    tensor = values[:count].view(shape).to(dtype)
    if kind == "transposed":
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    elif kind == "sliced":
        tensor = torch.cat((tensor, tensor, tensor), dim).narrow(dim, length, length)
    elif kind == "numpy" and dtype != torch.bfloat16:
        tensor = torch.from_numpy(tensor.numpy().copy())
    elif kind == "expanded":
        tensor = tensor.narrow(0, 0, 1).expand(shape[0], *tensor.shape[1:]) if dim else tensor
    elif kind == "strided":
        tensor = tensor.repeat_interleave(2, dim)[(slice(None),) * dim + (slice(0, None, 2),)]
    return tensor, draw(st.sampled_from([dim, dim - len(shape)]))


def shards_are_torchs(examples: int) -> int:
    """Compare with torch's own context, bit for bit, and restore; every rank draws the same examples."""
    cp, size, count = context(), dist.get_world_size(), 0

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=HealthCheck)
    @given(st.lists(tensors(size), min_size=1, max_size=3))
    def same(drawn: list[tuple[Tensor, int]]) -> None:
        nonlocal count
        length = drawn[0][0].shape[drawn[0][1]]
        drawn = [(tensor, dim) for tensor, dim in drawn if tensor.shape[dim] == length]
        theirs = [tensor.clone(memory_format=torch.contiguous_format) for tensor, _ in drawn]
        ours = [tensor for tensor, _ in drawn]
        before = [(t.clone(), t.data_ptr(), t.stride(), t.storage_offset()) for t in ours]
        with context_parallel(cp.mesh, buffers=theirs, buffer_seq_dims=[d % t.dim() for t, d in drawn]):
            expected = [tensor.clone() for tensor in theirs]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttentionWarning)
            with cp(buffers=ours, buffer_seq_dims=[dim for _, dim in drawn], fingerprint="never"):
                for mine, right in zip(ours, expected, strict=True):
                    assert mine.dtype == right.dtype
                    assert torch.equal(mine, right)
        for tensor, (values, pointer, stride, offset) in zip(ours, before, strict=True):
            assert torch.equal(tensor, values)
            assert (tensor.data_ptr(), tensor.stride(), tensor.storage_offset()) == (pointer, stride, offset)
        count += 1

    same()
    return count


def aliases() -> None:
    """Tensors that share storage, which every torch corrupts or confuses, are cut rightly and restored."""
    cp = context()
    n, rank = cp.size, cp.rank
    index = cp.positions(8 * n)

    whole = torch.arange(8 * n + 1)[None].repeat(2, 1)
    kept = whole.clone()
    x, y = whole[:, :-1], whole[:, 1:]
    rows = torch.arange(8 * n).expand(3, -1)
    base = torch.arange(16 * n).view(1, 16 * n).clone()
    window = base[:, 4 * n : 12 * n]
    one = torch.arange(8 * n)[None]
    with cp(buffers=[x, y, rows, window, one, one], buffer_seq_dims=[1, 1, -1, 1, 1, 1]):
        attend()
        assert torch.equal(x, kept[:, :-1][:, index]), rank
        assert torch.equal(y, kept[:, 1:][:, index])
        assert torch.equal(whole, kept), "what the views look at stays"
        assert torch.equal(rows, index.expand(3, -1))
        assert torch.equal(window, (index + 4 * n)[None])
        assert torch.equal(base, torch.arange(16 * n)[None])
        assert torch.equal(one, index[None])
        x.fill_(-1)  # writing into a shard does not reach the original
    assert torch.equal(x, kept[:, :-1])
    assert torch.equal(y, kept[:, 1:])
    assert x.data_ptr() == whole.data_ptr()
    assert y.data_ptr() == whole.data_ptr() + whole.element_size()
    assert rows.stride() == (0, 1)
    assert window.data_ptr() == base.data_ptr() + 4 * n * base.element_size()
    assert one.shape == (1, 8 * n)


def torch_corrupts_aliases() -> bool:
    """What a user has without cpcompat: torch's own context over two views of one tensor."""
    cp = context()
    whole = torch.arange(8 * cp.size + 1)[None].repeat(2, 1)
    kept = whole.clone()
    x, y = whole[:, :-1], whole[:, 1:]
    try:
        with context_parallel(cp.mesh, buffers=[x, y], buffer_seq_dims=[1, 1]):
            pass
    except RuntimeError:
        return True
    return not torch.equal(whole, kept)


def restoring() -> None:
    """Restored buffers are what they were; those in no_restore_buffers keep the shard."""
    cp = context()
    length = 4 * cp.size
    ids, labels = torch.arange(length)[None], torch.arange(length)[None] * 2
    pointer = labels.data_ptr()
    with cp(buffers=[ids, labels], buffer_seq_dims=[1, 1], no_restore_buffers={ids}):
        attend(4)
    assert torch.equal(ids[0], cp.positions(length))
    assert torch.equal(labels, torch.arange(length)[None] * 2)
    assert labels.data_ptr() == pointer
    assert F.scaled_dot_product_attention is SDPA


def exceptions() -> None:
    """An exception in the body comes through unchanged; SDPA and all buffers are as before."""
    cp = context()
    for error in (ValueError("mine"), KeyboardInterrupt(), StopIteration(), GeneratorExit(), SystemExit(3)):
        ids, kept = torch.arange(8 * cp.size)[None], torch.arange(8 * cp.size)[None]
        base = torch.arange(8 * cp.size)[None]
        try:
            with cp(buffers=[ids, kept, base[:, :]], buffer_seq_dims=[1, 1, 1], no_restore_buffers={kept}):
                attend()
                raise error
        except BaseException as caught:
            assert caught is error, caught
        assert F.scaled_dot_product_attention is SDPA
        assert torch.equal(ids, torch.arange(8 * cp.size)[None])
        assert torch.equal(kept, ids), "nobody will use the shard after an error"
    with cp(buffers=[ids], buffer_seq_dims=[1]):  # and the context still works
        attend()


def no_buffers() -> None:
    """Attention is on and nothing is sharded, for None and for empty lists."""
    cp = context()
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 4 * cp.size, 8) for _ in range(3))
    right = SDPA(query, key, value, is_causal=True)
    index = cp.positions(4 * cp.size)
    for arguments in ((), (None, None), ([], []), ((), (), set())):
        with cp(*arguments):
            mine = F.scaled_dot_product_attention(
                query[:, :, index], key[:, :, index], value[:, :, index], is_causal=True
            )
        torch.testing.assert_close(mine, right[:, :, index], rtol=1e-5, atol=1e-6)


def bad_buffers() -> dict[str, tuple[str, str]]:
    """The error of each bad input; every tensor is bit for bit as before."""
    cp = context()
    n = 8 * cp.size

    def good() -> Tensor:
        return torch.arange(n)[None]

    with torch.inference_mode():
        inference = torch.arange(n)[None]
    grad = torch.ones(1, n, requires_grad=True)
    twice = torch.zeros(n, n)
    from torch.distributed.tensor import DTensor, Replicate

    wrapped = DTensor.from_local(torch.zeros(1, n), cp.mesh, [Replicate()])
    cases: dict[str, tuple[list[Any], list[Any], Any]] = {
        "length": ([good(), good()[:, : n - 1]], [1, 1], None),
        "multiple": ([torch.zeros(1, n + 2)], [1], None),
        "zero": ([torch.zeros(1, 0)], [1], None),
        "dims": ([good(), good()], [1], None),
        "dim": ([good()], [2], None),
        "dim kind": ([good()], ["1"], None),
        "scalar": ([torch.tensor(1)], [0], None),
        "grad": ([good(), grad], [1, 1], None),
        "grad view": ([good(), grad * 2], [1, 1], None),
        "device": ([good(), torch.zeros(1, n, device="meta")], [1, 1], None),
        "inference": ([good(), inference], [1, 1], None),
        "no tensor": ([good(), [1, 2]], [1, 1], None),
        "sparse": ([torch.eye(n).to_sparse()], [1], None),
        "wrapper": ([good(), wrapped], [1, 1], None),
        "subset": ([good()], [1], {good()}),
        "twice": ([twice, twice], [0, 1], None),
    }
    found = {}
    for name, (buffers, dims, kept) in cases.items():
        tensors = [t for t in buffers if isinstance(t, Tensor) and not t.is_sparse and not t.is_meta]
        tensors = [t for t in tensors if type(t) is Tensor]
        before = [(t.detach().clone(), t.data_ptr(), t.stride()) for t in tensors]
        try:
            with cp(buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=kept):
                found[name] = ("no error", "")
        except CPError as error:
            found[name] = (type(error).__name__, str(error))
        for tensor, (values, pointer, stride) in zip(tensors, before, strict=True):
            assert torch.equal(tensor, values)
            assert (tensor.data_ptr(), tensor.stride()) == (pointer, stride)
        assert F.scaled_dot_product_attention is SDPA
    with torch.inference_mode():
        with cp(buffers=[inference], buffer_seq_dims=[1]):
            attend()
            assert inference.shape == (1, 8)
        assert inference.shape == (1, n)
    return found


def nested() -> tuple[str, ...]:
    """A block inside another, or inside itself, is refused, and the first goes on; so is one inside torch's own."""
    cp, other = context(), context()
    errors = []
    block = cp()
    with block:
        for inner in (other(), block):
            try:
                with inner:
                    pass
            except CPError as error:
                errors.append(type(error).__name__)
            assert F.scaled_dot_product_attention is not SDPA, "the first block is still open"
            attend()
    token = torch.zeros(1, 2 * cp.size)
    with context_parallel(cp.mesh, buffers=[token], buffer_seq_dims=[1]):
        try:
            with cp():
                pass
        except CPError as error:
            errors.append(type(error).__name__)
    assert F.scaled_dot_product_attention is SDPA
    return tuple(errors)


def different_buffers(when: str, env_says_nothing: bool = True) -> dict[str, Any]:
    """Ranks that hold different batches: an error on all at once at the first entry, by argument or variable."""
    cp = context()
    n = 8 * cp.size
    same, mine = torch.arange(n)[None], torch.arange(n)[None] + (cp.rank == 1)
    keywords: dict[str, Any] = {"fingerprint": when} if env_says_nothing else {}
    outcome: dict[str, Any] = {"errors": []}
    for buffers in ([same, same.clone()], [same, mine], [same, mine]):
        try:
            with cp(buffers=buffers, buffer_seq_dims=[1, 1], **keywords):
                attend()
            outcome["errors"].append(None)
        except CPError as error:
            outcome["errors"].append(type(error).__name__)
            outcome["text"], outcome["buffer"] = str(error), error.buffer
        assert same.shape == mine.shape == (1, n)
    return outcome


def first_entry_differs() -> tuple[str, str]:
    """At the very first entry: other values, and a length that only one rank cannot cut."""
    cp = context()
    mine = torch.arange(8 * cp.size)[None] * (cp.rank + 1)
    names = []
    try:
        with cp(buffers=[mine], buffer_seq_dims=[1]):
            pass
    except CPError as error:
        names.append(type(error).__name__)
    short = torch.zeros(1, 8 * cp.size + (1 if cp.rank == 0 else 0))
    try:
        with cp(buffers=[short], buffer_seq_dims=[1]):
            pass
    except CPError as error:
        names.append(type(error).__name__)
        assert cp.rank == 0 or "rank 0" in str(error)
    return tuple(names)  # type: ignore[return-value]


def global_order() -> None:
    """positions and unshard: global order, every dtype, differentiable with the gradient that averaging needs."""
    cp = context()
    length = 6 * cp.size
    index = cp.positions(length)
    assert index.dtype == torch.int64
    gathered = [torch.empty_like(index) for _ in range(cp.size)]
    dist.all_gather(gathered, index)
    assert torch.equal(torch.cat(gathered).sort().values, torch.arange(length))
    for dtype in DTYPES:
        whole = (torch.arange(2 * length * 3).view(2, length, 3) % 2).to(dtype)
        for dim in (1, -2):
            assert torch.equal(cp.unshard([whole[:, index]], [dim])[0], whole)
    weights = torch.arange(1.0, length + 1)
    local = weights[index].clone().requires_grad_()
    (whole_again,) = cp.unshard([local], [0])
    (whole_again * weights).sum().backward()  # every rank computes the same loss from the whole
    assert torch.equal(whole_again.detach(), weights)
    assert torch.equal(local.grad, weights[index] * cp.size), "a sum over ranks, which DDP's average undoes"
    for bad in (
        lambda: cp.unshard([local], [3]),
        lambda: cp.unshard([local[:3]], [0]),
        lambda: cp.unshard([local], []),
    ):
        try:
            bad()
        except CPError as error:
            assert type(error).__name__ == "BufferInvalid"
        else:
            raise AssertionError("not refused")


def unseen_attention() -> dict[str, Any]:
    """A block without an attention call warns once, at the line of the with statement; one with calls does not."""
    captured = F.scaled_dot_product_attention
    cp = context()
    query = torch.ones(1, 1, 8, 8)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            with cp():
                captured(query, query, query, is_causal=True)
    quiet = context()
    with warnings.catch_warnings(record=True) as none:
        warnings.simplefilter("always")
        with quiet():
            attend()
    return {
        "kinds": [w.category.__name__ for w in seen],
        "file": seen[0].filename.rpartition("/")[2],
        "text": str(seen[0].message),
        "quiet": len(none),
    }


def attention_refusals() -> dict[str, tuple[str, str]]:
    """Calls that CP cannot compute."""
    cp = context()

    def tensor(length: int, heads: int = 2, batch: int = 1) -> Tensor:
        return torch.ones(batch, heads, length, 8)

    sdpa = lambda *args, **keywords: F.scaled_dot_product_attention(*args, **keywords)  # noqa: E731
    cases: dict[str, Callable[[], Any]] = {
        "mask": lambda: attend(attn_mask=torch.ones(8, 8, dtype=torch.bool), is_causal=False),
        "dropout": lambda: attend(dropout_p=0.1),
        "cross": lambda: sdpa(tensor(8), tensor(4), tensor(4)),
        "cached step": lambda: sdpa(tensor(1), tensor(8), tensor(8)),
        "other sequence": lambda: attend(6),
        "heads": lambda: sdpa(tensor(8), tensor(8, 1), tensor(8, 1), is_causal=True),
        "uneven heads": lambda: sdpa(tensor(8, 3), tensor(8, 2), tensor(8, 2), is_causal=True, enable_gqa=True),
        "batches": lambda: sdpa(tensor(8), tensor(8, 2, 2), tensor(8, 2, 2), is_causal=True),
    }
    found = {}
    for name, call in cases.items():
        ids = torch.arange(8 * cp.size)[None]
        try:
            with cp(buffers=[ids], buffer_seq_dims=[1]):
                call()
            found[name] = ("no error", "")
        except CPError as error:
            found[name] = (type(error).__name__, str(error))
        assert ids.shape == (1, 8 * cp.size)
        assert F.scaled_dot_product_attention is SDPA
    try:
        with cp():
            attend(7)
    except CPError as error:
        found["odd"] = (type(error).__name__, str(error))
    return found


def torchs_attention() -> dict[str, Any]:
    """The path of accelerators, as far as it goes without one: torch's attention on, counted, and off again."""
    from cpcompat import torch_cp

    cp = context("alltoall")
    report: dict[str, Any] = {}
    with torch_cp.attention(cp.mesh, "alltoall"):
        report["patched"] = torch_cp.is_patched(F.scaled_dot_product_attention)
    report["restored"] = F.scaled_dot_product_attention is SDPA
    try:
        with torch_cp.attention(cp.mesh, "alltoall"):
            raise KeyError("mine")
    except KeyError:
        report["restored after an exception"] = F.scaled_dot_product_attention is SDPA
    F.scaled_dot_product_attention = lambda *a, **k: SDPA(*a, **k)
    try:
        with torch_cp.attention(cp.mesh, "alltoall"):
            pass
    except CPError as error:
        report["a stranger in SDPA's place"] = type(error).__name__
    finally:
        F.scaled_dot_product_attention = SDPA
    # The whole block over torch's attention: sharded, patched, and all undone although the CPU kernel is refused.
    cp.__class__ = type("OnAccelerator", (CPContext,), {"_device_type": "not cpu"})
    ids = torch.arange(8 * cp.size)[None]
    try:
        with cp(buffers=[ids], buffer_seq_dims=[1]):
            report["inside"] = ids.shape[1]
            attend()
    except Exception as error:
        report["torch says"] = type(error).__name__
    report["after"] = (ids.shape[1], F.scaled_dot_product_attention is SDPA)
    with cp(buffers=[ids], buffer_seq_dims=[1]):
        try:
            attend(is_causal=False)
        except CPError as error:
            report["not causal"] = str(error)
    return report


def backward_after_the_block() -> str:
    """Saved values that were restored since make backward fail, as with torch's own context; nothing silent."""
    cp = context()
    table = torch.nn.Embedding(64, 8)
    ids = torch.arange(8 * cp.size)[None] % 64
    with cp(buffers=[ids], buffer_seq_dims=[1]):
        hidden = table(ids)[None]
        out = F.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"
