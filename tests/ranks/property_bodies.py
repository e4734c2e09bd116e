"""Bodies for lists of buffers of every kind, drawn alike on every rank: sharded rightly, or refused and untouched."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import context_parallel

from cpcompat import CPContext, CPError

SDPA = F.scaled_dot_product_attention
# By name, since no torch has all of them.
DTYPES = [
    name
    for name in (
        *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
]
STRIDES = ("contiguous", "contiguous", "transposed", "sliced", "strided", "offset", "numpy", "windows")
EXPANDED = ("expanded before", "expanded sequence", "expanded after")
KINDS = ("plain", "plain", "plain", "parameter", "buffer", "subclass", "conj", "neg")
MODES = ("good", "spoilt", "wild")
WHOLE = 1 << 50  # more elements than any address space holds, whatever the system promises


class Mine(Tensor):
    """A subclass that adds nothing."""


class Refusing(Tensor):
    """A subclass that lets nobody look at it."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise OSError("this tensor answers nothing")


class Unprintable:
    def __repr__(self) -> str:
        raise OSError("no words for this")


# By words, so that an example that fails can be printed.
STRANGE = {"<unprintable>": Unprintable(), "<10**5000>": 10**5000}


class Left(Exception):
    """What the body of a block raises."""


# --- what is drawn: words and numbers, of which tensors are made ------------------------------------------------------------


class Spec(NamedTuple):
    """One tensor."""

    dtype: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    strides: str
    kind: str
    negative: bool  # whether its dimension is counted from the end
    odd: str = ""  # what it is instead


class Drawn(NamedTuple):
    """One list of buffers, and how it is used."""

    chunks: int
    meta: bool
    inference: str
    specs: tuple[Spec, ...]
    again: tuple[int, ...]  # those that are listed twice, themselves or as a view
    kept: tuple[int, ...] | None
    kept_as: str
    body: str
    fingerprint: str
    fault: str = ""
    place: int = 0
    dims: tuple[Any, ...] | None = None


@st.composite
def specs(draw: st.DrawFn, odd: st.SearchStrategy[str] = st.just("")) -> Spec:  # noqa: B008
    sizes = st.lists(st.integers(0, 3).map(lambda size: size or 2), max_size=2).map(tuple)
    before, after = draw(sizes), draw(sizes)
    if before and draw(st.integers(0, 15)) == 0:
        before = (0, *before[1:])  # no elements at all
    strides = draw(st.sampled_from(STRIDES + EXPANDED))
    kind = draw(st.sampled_from(KINDS))
    return Spec(draw(st.sampled_from(DTYPES)), before, after, strides, kind, draw(st.booleans()), draw(odd))


def lists(mode: str) -> st.SearchStrategy[Drawn]:
    """Good lists; spoilt ones, with one fault each; or wild ones, of which nothing is known."""
    odd = st.sampled_from([""] * 60 + [*ODD, *ODD_PERHAPS])
    members = st.lists(specs(odd if mode == "wild" else st.just("")), min_size=1, max_size=4).map(tuple)
    places = st.lists(st.integers(0, 3), max_size=2).map(tuple)
    return st.builds(
        Drawn,
        st.integers(1, 4),
        st.integers(0, 9).map(lambda number: number == 9),
        st.just("") if mode == "spoilt" else st.sampled_from([""] * 8 + ["entered", "made and entered"]),
        members,
        places,
        st.none() | places,
        st.sampled_from(["set", "list", "tuple"]),
        st.sampled_from(["nothing", "write", "raise"]),
        st.sampled_from(["never"] * 7 + ["always"]),
        st.sampled_from(FAULTS) if mode == "spoilt" else st.just(""),
        st.integers(0, 3),
        st.none() | st.none() | st.lists(DIMS, max_size=4).map(tuple) if mode == "wild" else st.none(),
    )


DIMS = st.one_of(
    st.integers(-4, 4),
    st.booleans(),
    st.none(),
    st.sampled_from(["0", "", "seq", *STRANGE]),
    st.floats(allow_nan=True, width=16),
    st.integers(-2, 2).map(np.int64),
    st.integers(0, 2).map(np.uint8),
    st.sampled_from([2**63, -(2**70)]),
    st.just(1j),
    st.just([0]),
)

# --- tensors ----------------------------------------------------------------------------------------------------------------


def values(count: int, dtype: torch.dtype) -> Tensor:
    """Elements of any bits, NaNs included."""
    raw = (torch.arange(count * dtype.itemsize) * 7 % 251).to(torch.uint8)
    return (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)


def make(spec: Spec, length: int, meta: bool) -> tuple[Any, int]:
    """The tensor of a spec, and its sequence dimension."""
    shape, dim = [*spec.before, length, *spec.after], len(spec.before)
    dtype = getattr(torch, {"conj": "complex64", "neg": "float32"}.get(spec.kind, spec.dtype))
    count = int(np.prod(shape))
    strides = spec.strides
    tensor = values(count, dtype).view(shape)
    if strides == "transposed":
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    elif strides == "sliced":
        around = torch.zeros([size + 2 * length * (at == dim) for at, size in enumerate(shape)], dtype=dtype)
        tensor = around.narrow(dim, length, length).copy_(tensor)
    elif strides == "strided":
        twice = torch.zeros([size * 2 for size in shape], dtype=dtype)
        tensor = twice[(slice(1, None, 2),) * len(shape)].copy_(tensor)
    elif strides == "offset":
        tensor = values(count + 5, dtype)[5:].view(shape)
    elif strides == "numpy":
        with contextlib.suppress(TypeError):  # what numpy has no name for
            tensor = torch.from_numpy(tensor.numpy().copy())
    elif strides == "windows":  # rows that overlap
        shape, dim = [3, length], 1
        tensor = values(length + 2, dtype).unfold(0, length, 1)
    elif strides in EXPANDED:
        at = {"expanded before": 0, "expanded sequence": dim, "expanded after": len(shape) - 1}[strides]
        if shape[at]:
            tensor = tensor.narrow(at, 0, 1).expand(shape)
    if meta:
        tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    kind = "plain" if meta and spec.kind in ("conj", "neg") else spec.kind  # see ODD_PERHAPS
    return dressed(tensor, kind), dim - len(shape) if spec.negative else dim


def dressed(tensor: Tensor, kind: str) -> Tensor:
    if kind == "parameter":
        return nn.Parameter(tensor, requires_grad=False)
    if kind == "buffer" and hasattr(nn, "Buffer"):
        return nn.Buffer(tensor)
    if kind == "subclass":
        return tensor.as_subclass(Mine)
    if kind == "conj":
        return tensor.conj()
    if kind == "neg":
        return torch._neg_view(tensor)
    return tensor


def inference(length: int) -> Tensor:
    with torch.inference_mode():
        return torch.arange(length)[None]


def freed(length: int) -> Tensor:
    tensor = torch.arange(length)[None]
    tensor.untyped_storage().resize_(0)  # as FSDP does
    return tensor


def fake(length: int) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(torch.arange(length)[None])


def masked(length: int) -> Tensor:
    from torch.masked import as_masked_tensor

    return as_masked_tensor(torch.arange(float(length))[None], torch.ones(1, length, dtype=torch.bool))


def wrapped(length: int) -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return DTensor.from_local(torch.zeros(1, length), mesh, [Replicate()])


def recorded(length: int) -> Tensor:
    return torch.ones(1, length, requires_grad=True) * 2


# What can be no buffer, of a length that would do.
ODD: dict[str, Callable[[int], Any]] = {
    "None": lambda n: None,
    "a list": lambda n: [[0] * n],
    "numpy": lambda n: np.zeros((1, n)),
    "a string": lambda n: "x" * n,
    "a number": lambda n: n,
    "a class": lambda n: Tensor,
    "a Mock": lambda n: mock.Mock(spec=Tensor),
    "a Mock with all": lambda n: mock.MagicMock(),
    "0-dim": lambda n: torch.tensor(n),
    "grad": lambda n: torch.ones(1, n, requires_grad=True),
    "parameter": lambda n: nn.Parameter(torch.ones(1, n)),
    "graph": recorded,
    "inference": inference,
    "sparse": lambda n: torch.eye(n)[:1].to_sparse(),
    "sparse rows": lambda n: torch.eye(n)[:1].to_sparse_csr(),
    "mkldnn": lambda n: torch.ones(1, n).to_mkldnn(),
    "nested": lambda n: torch.nested.nested_tensor([torch.ones(n), torch.ones(n)]),
    "jagged": lambda n: torch.nested.nested_tensor([torch.ones(n), torch.ones(n)], layout=torch.jagged),
    "DTensor": wrapped,
    "no storage": freed,
    "uninitialized": lambda n: nn.UninitializedBuffer(),
    "uninitialized parameter": lambda n: nn.UninitializedParameter(),
    "a huge batch": lambda n: torch.zeros(1, n).expand(WHOLE, n),
    "a huge width": lambda n: torch.zeros(1, n, 1, dtype=torch.int64).expand(1, n, WHOLE),
    "refusing": lambda n: torch.zeros(1, n).as_subclass(Refusing),
}
# What may be one, as far as this torch can copy it.
ODD_PERHAPS: dict[str, Callable[[int], Any]] = {
    "other device": lambda n: torch.zeros(1, n, device="meta"),
    "a huge sequence": lambda n: torch.zeros(1, 1).expand(1, WHOLE),
    "a meta view": lambda n: torch.zeros(1, n, device="meta", dtype=torch.complex64).conj(),
    "a huge meta": lambda n: torch.zeros(1, 1, device="meta").expand(1, 2**40),
    "other length": lambda n: torch.zeros(1, n + 1),
    "names": lambda n: torch.zeros((1, n), names=("batch", "sequence")),
    "quantized": lambda n: torch.quantize_per_tensor(torch.ones(1, n), 0.1, 0, torch.qint8),
    "int4": lambda n: values(n, torch.uint8)[None].view(getattr(torch, "int4", torch.uint8)),
    "complex32": lambda n: values(n, torch.complex32)[None],
    "masked": masked,
    "fake": fake,
    "zero": lambda n: torch._efficientzerotensor((1, n)),
    "shared": lambda n: torch.zeros(1, n).share_memory_(),
}


def odd_one(name: str, length: int) -> Any:
    try:
        return (ODD | ODD_PERHAPS)[name](length)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # this torch has none
        return None


WRONG_DIMS = {
    "large": 9,
    "small": -9,
    "None": None,
    "string": "1",
    "float": 1.0,
    "10**5000": STRANGE["<10**5000>"],
    "unprintable": STRANGE["<unprintable>"],
}
FAULTS = (
    *(f"is {name}" for name in ODD),
    *("length", "multiple", "empty sequence", "fewer dims", "more dims", "no dims", "no buffers"),
    *("dim too large", "dim too small", "dim None", "dim string", "dim float", "dim 10**5000", "dim unprintable"),
    *("other device", "twice with other dims", "stranger", "stranger of another kind"),
    *("buffers no list", "dims no list", "no_restore no list", "buffers raise"),
)

# --- the oracle -------------------------------------------------------------------------------------------------------------


def bits(tensor: Tensor) -> bytes:
    """The elements in order, bit for bit."""
    whole = (
        tensor.as_subclass(Tensor).detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes()


def memory(tensor: Tensor) -> bytes:
    """Everything in the storage, also what the tensor does not show."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()


LOOKS: tuple[Callable[[Tensor], Any], ...] = (
    lambda t: t.dtype,
    lambda t: t.layout,
    lambda t: t.device,
    lambda t: t.shape,
    lambda t: t.stride(),
    lambda t: t.storage_offset(),
    lambda t: t.data_ptr(),
    lambda t: (t.is_conj(), t.is_neg(), t.is_inference()),
    lambda t: (t.requires_grad, t.grad_fn, t.is_leaf),
    memory,
)


def picture(thing: Any) -> list[Any]:
    """What must be the same afterwards, also of tensors that cannot be asked everything."""
    seen: list[Any] = [type(thing)]
    if isinstance(thing, Tensor) and issubclass(type(thing), Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            for look in LOOKS:
                try:
                    seen.append(look(thing))
                except Exception as error:
                    seen.append(type(error))
    return seen


def version(thing: Any) -> int | None:
    try:
        return thing._version if issubclass(type(thing), Tensor) else None
    except Exception:
        return None


def shard_of(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """Chunks rank and 2 x size - 1 - rank, made of a copy with torch's plain operations."""
    whole = tensor.as_subclass(Tensor).detach().resolve_conj().resolve_neg().clone()
    dim, chunk = int(dim), whole.shape[dim] // (2 * size)
    return torch.cat([whole.narrow(dim, at * chunk, chunk) for at in (rank, 2 * size - 1 - rank)], dim)


class Case(NamedTuple):
    """The arguments of a block, and what is known of them."""

    buffers: Any
    dims: Any
    kept: Any
    tensors: list[Any]  # by themselves, whatever becomes of the list


def case(drawn: Drawn, size: int) -> Case:
    """Make the arguments."""
    length = 2 * size * drawn.chunks
    made = []
    for spec in drawn.specs:
        if spec.odd:
            made.append((odd_one(spec.odd, length), 1))
        else:
            made.append(make(spec, length, drawn.meta))
    for at in drawn.again:
        tensor, dim = made[at % len(made)]
        made.append((tensor if at < 2 else alias(tensor), dim))
    buffers: list[Any] = [tensor for tensor, _ in made]
    dims: list[Any] = [dim for _, dim in made]
    if drawn.dims is not None:
        drawn_dims = [STRANGE.get(dim, dim) if isinstance(dim, str) else dim for dim in drawn.dims]
        dims = [*drawn_dims, *dims[len(drawn_dims) :]] if drawn.place else drawn_dims
    kept: Any = None
    if drawn.kept is not None:
        kept = [buffers[at % len(buffers)] for at in drawn.kept if buffers]
    buffers, dims, kept = spoil(drawn, buffers, dims, kept, length)
    tensors = list(buffers) if isinstance(buffers, list) else []
    if isinstance(kept, list):
        try:
            kept = {"set": set, "list": list, "tuple": tuple}[drawn.kept_as](kept)
        except Exception:  # a member that is not hashable
            kept = list(kept)
    return Case(buffers, dims, kept, tensors)


def spoil(drawn: Drawn, buffers: list[Any], dims: list[Any], kept: Any, length: int) -> tuple[Any, Any, Any]:
    """Put the one fault in."""
    fault, device = drawn.fault, "meta" if drawn.meta else "cpu"
    at = drawn.place % len(buffers) if buffers else 0
    good = torch.zeros(1, length, device=device)
    if fault.startswith("is "):
        buffers.insert(at, odd_one(fault.removeprefix("is "), length))
        dims.insert(at, 1)
    elif fault in ("length", "multiple", "empty sequence"):
        other = {"length": 2 * length, "multiple": length + 1, "empty sequence": 0}[fault]
        buffers, dims = [*([good] if fault == "length" else []), torch.zeros(other, device=device)], [1, 0]
        dims, kept = dims[-len(buffers) :], None
    elif fault == "fewer dims":
        dims = dims[1:]
    elif fault == "more dims":
        dims = [*dims, 0]
    elif fault == "no dims":
        dims = None
    elif fault == "no buffers":
        buffers, kept = None, None
    elif fault.startswith("dim "):
        dims[at] = WRONG_DIMS[fault.split()[-1]]
    elif fault == "other device":
        buffers, dims = [*buffers, torch.zeros(1, length, device="cpu" if drawn.meta else "meta")], [*dims, 1]
    elif fault == "twice with other dims":
        square = torch.zeros(length, length, device=device)
        buffers, dims = [*buffers, square, square], [*dims, 0, 1]
    elif fault == "stranger":
        kept = [*(kept or []), good]
    elif fault == "stranger of another kind":
        kept = [*(kept or []), "labels"]
    elif fault == "buffers no list":
        buffers = 3
    elif fault == "dims no list":
        dims = 1.5
    elif fault == "no_restore no list":
        kept = 7
    elif fault == "buffers raise":
        buffers = mock.MagicMock(__iter__=mock.Mock(side_effect=OSError))
    return buffers, dims, kept


def attempt(cp: CPContext, drawn: Drawn, made: Case) -> str:
    """Enter, look, leave, and look again; "sharded", or the kind of the error."""
    tensors = made.tensors
    before = [picture(thing) for thing in tensors]
    versions = [version(thing) for thing in tensors]
    expected: list[Tensor] | None = None
    block = cp(
        buffers=made.buffers,
        buffer_seq_dims=made.dims,
        no_restore_buffers=made.kept,
        fingerprint=drawn.fingerprint,
    )
    wholes = [alias(thing) for thing in tensors]
    try:
        block.__enter__()
    except CPError as error:
        assert error.evidence, error
        assert error.next_step, error
        if error.__cause__ is None:  # nor was any touched before torch said no
            assert versions == [version(thing) for thing in tensors]
        outcome = type(error).__name__
    else:
        outcome = "sharded"
        expected = [shard_of(whole, dim, cp.rank, cp.size) for whole, dim in zip(wholes, made.dims or (), strict=True)]
        error = Left() if drawn.body == "raise" else None
        try:
            with contextlib.ExitStack() as stack:
                stack.push(block)
                assert F.scaled_dot_product_attention is not SDPA
                for mine, right in zip(tensors, expected, strict=True):
                    same(mine, right)
                if drawn.body == "write":
                    expected = [zeroed(mine, right) for mine, right in zip(tensors, expected, strict=True)]
                if error is not None:
                    raise error
        except Left as caught:
            assert caught is error
    kept = {id(thing) for thing in made.kept or ()} if outcome == "sharded" and drawn.body != "raise" else set()
    for at, (thing, was) in enumerate(zip(tensors, before, strict=True)):
        if id(thing) not in kept:
            assert picture(thing) == was, (outcome, at)
        elif expected is not None:
            same(thing, expected[at])
    return outcome


def alias(thing: Any) -> Any:
    """What keeps looking at the whole while the tensor itself looks at its shard."""
    if not isinstance(thing, Tensor):
        return thing
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return thing.detach()
    except Exception:
        return thing


def zeroed(mine: Tensor, right: Tensor) -> Tensor:
    """Write into a shard; what it holds then."""
    try:
        mine.detach().zero_()
    except (NotImplementedError, RuntimeError):  # an odd kind, which nobody can write into
        return right
    return torch.zeros_like(right)


def same(mine: Tensor, right: Tensor) -> None:
    assert (mine.dtype, mine.shape, mine.device) == (right.dtype, right.shape, right.device)
    assert mine.is_meta or hasattr(mine, "fake_mode") or bits(mine) == bits(right)


def as_torchs(cp: CPContext, tensors: list[Tensor], dims: list[int]) -> bool:
    """Whether torch's own context takes these, contiguous and each by itself; then it cuts them in the same way."""
    theirs, ours = ([tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors] for _ in range(2))
    try:
        positive = [dim % tensor.dim() for tensor, dim in zip(ours, dims, strict=True)]
        with context_parallel(cp.mesh, buffers=theirs, buffer_seq_dims=positive):
            cut = [tensor.clone() for tensor in theirs]
    except Exception:
        F.scaled_dot_product_attention = SDPA
        return False
    with cp(buffers=ours, buffer_seq_dims=dims, fingerprint="never"):
        for mine, right in zip(ours, cut, strict=True):
            if bits(mine) != bits(right):  # torch's index_select changes the bits of a NaN of float16
                torch.testing.assert_close(mine, right, rtol=0, atol=0, equal_nan=True)
    return True


def tried(cp: CPContext, mode: str, drawn: Drawn) -> tuple[str, bool]:
    """What became of one list, and whether it was compared with torch's own context."""
    compared = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about half of the odd kinds, and that nobody attends here
        with torch.inference_mode("made" in drawn.inference):
            made = case(drawn, cp.size)
        with torch.inference_mode("entered" in drawn.inference):
            outcome = attempt(cp, drawn, made)
            assert F.scaled_dot_product_attention is SDPA
            with cp(fingerprint="never"):
                assert F.scaled_dot_product_attention is not SDPA
            assert F.scaled_dot_product_attention is SDPA
            if mode == "good" and not drawn.meta and not drawn.kept:
                compared = as_torchs(cp, made.tensors, made.dims)
    assert mode == "wild" or (outcome == "sharded") == (mode == "good"), outcome
    return "nothing to shard" if outcome == "sharded" and not made.tensors else outcome, compared


def context() -> CPContext:
    return CPContext(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)))


def every_fault() -> dict[str, str]:
    """Each fault and each odd kind by itself and in the middle of a good list; what becomes of it."""
    cp = context()
    one = Spec("int64", (1,), (), "contiguous", "plain", False)
    usual = Drawn(2, False, "", (one, one, one), (), (0,), "set", "nothing", "never")
    found = {}
    for fault in FAULTS:
        for specs, place, body in (((one,), 0, "nothing"), ((one, one, one), 1, "raise")):
            for fingerprint in ("never", "always"):
                drawn = usual._replace(specs=specs, place=place, body=body, fingerprint=fingerprint, fault=fault)
                found[fault], _ = tried(cp, "spoilt", drawn)
    for odd in ODD_PERHAPS:
        for fingerprint in ("never", "always"):
            for body in ("nothing", "raise", "write"):
                drawn = usual._replace(specs=(one._replace(odd=odd),), body=body, fingerprint=fingerprint)
                found[f"perhaps {odd}"], _ = tried(cp, "wild", drawn)
                tried(cp, "wild", drawn._replace(specs=(one, drawn.specs[0], one)))
    return found


def any_buffers(examples: int) -> dict[str, Any]:
    """Try that many lists; what became of them by mode, and a digest of it all, the same on all ranks."""
    cp = context()
    outcomes: dict[str, Counter[str]] = {mode: Counter() for mode in MODES}
    story = hashlib.sha256()

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.sampled_from(MODES).flatmap(lambda mode: st.tuples(st.just(mode), lists(mode))))
    def holds(example: tuple[str, Drawn]) -> None:
        outcome, compared = tried(cp, *example)
        outcomes[example[0]][outcome] += 1
        outcomes[example[0]]["compared with torch"] += compared
        story.update(repr((example, outcome)).encode())

    holds()
    return {"outcomes": outcomes, "story": story.hexdigest()}
