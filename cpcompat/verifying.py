"""`verify`: does context parallelism give the right numbers here, with what is installed? Asked of real ranks.

The ranks are started on CPU, or on GPUs where there are enough. Each check is one call on all of them, so that one which
dies or raises costs the others nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .checks import Row, VerifyReport, attention, exceptions, sharding, switch, tokens, versions
from .errors import RankFailed
from .launch import Ranks
from .layouts import LAYOUTS, read
from .resolve import get_cp_context
from .seen import ROTATE_METHODS
from .testing import cpu_parallelism_config, tiny_llama, use_fsdp2_on_cpu
from .versions import installed

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["verify"]

_IGNORE = -100


def verify(nproc: int = 2, *, timeout: float = 120.0) -> VerifyReport:
    """Start ranks with the installed accelerate and torch, and compare everything with the same without CP.

    Call it in a process of its own; in a training script there is `CPContext.verify`.

    Args:
        nproc: how many ranks share the sequence, 2 or more.
        timeout: seconds that each check may take; after one that took longer nothing else is run.

    Returns:
        The report; as text it is a table.

    Raises:
        ValueError: nproc is below 2.
    """
    if nproc < 2:
        raise ValueError(f"context parallelism needs 2 ranks or more, not {nproc}")
    import torch

    gpus = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
    device, backend = ("cuda", "nccl") if gpus >= nproc else ("cpu", "gloo")
    rows: list[Row] = []
    alone: dict[str, str] = {}
    hung = ""
    with Ranks(nproc, timeout=timeout, backend=backend) as ranks:
        for name, body, arguments in _CHECKS:
            if hung:
                rows.append(Row(name, "not run", detail=f"a rank hung before, in: {hung}"))
                continue
            try:
                held = ranks.run(body, name, *arguments)
            except RankFailed as error:
                detail = f"[{error.code}] {error.what.splitlines()[0]}"
                rows.append(Row(name, "FAILED", detail=detail, trace=_trace(error)))
                hung = name if error.exception is None and error.exitcode is None else ""
                continue
            rows.append(Row.merged(held))
        if not hung:
            alone = _ask(ranks)
    return VerifyReport(tuple(rows), versions(), f"{nproc}, on {device} over {backend}", alone)


def _trace(error: RankFailed) -> str:
    """The evidence, which is indented for a message, from the left edge."""
    return error.evidence.replace("\n        ", "\n")


def _ask(ranks: Ranks) -> dict[str, str]:
    """What accelerate makes by itself; a finding, not a check, so nothing that can fail a run."""
    try:
        return ranks.run(_alone)[0]
    except RankFailed as error:
        return {"cannot be asked:": error.what.splitlines()[0]}


# --- on the ranks -------------------------------------------------------------------------------------------------------


def _no_config() -> str:
    """Why there is no ParallelismConfig, or nothing."""
    try:
        import accelerate.parallelism_config  # noqa: F401
    except ModuleNotFoundError:
        return f"{installed('accelerate')} has no ParallelismConfig (1.10 brought it)"
    return ""


def _accelerator(method: str = "allgather", *, fsdp2: bool = False) -> tuple[Any, dict[str, Any]]:
    """A real Accelerator whose ranks all share one sequence, and what `get_cp_context` must be told beside it."""
    import torch.distributed as dist
    from accelerate import Accelerator

    on_cpu, size = dist.get_backend() == "gloo", dist.get_world_size()
    if _no_config():
        return Accelerator(cpu=on_cpu), {"cp_size": size, "rotate_method": method}
    from accelerate.utils import TorchContextParallelConfig

    os.environ["ACCELERATE_ALLOW_CP_STANDALONE"] = "true"  # under DDP, too
    config = cpu_parallelism_config(size, cp_handler=TorchContextParallelConfig(cp_comm_strategy=method))
    acc = Accelerator(cpu=on_cpu, parallelism_config=config)
    if fsdp2:
        use_fsdp2_on_cpu(acc)
    return acc, {}


def _alone() -> dict[str, str]:
    """Where accelerate puts a context by itself."""
    import torch

    def own() -> str:
        return next((str(p) for p in LAYOUTS if p.kind == "context" and callable(read(acc, p.path))), "none")

    acc, _ = _accelerator()
    before = own()
    acc.prepare(torch.nn.Linear(2, 2))
    return {"before prepare()": before, "after prepare()": own()}


def _context(name: str, prepare: bool) -> Row:
    """What `get_cp_context` does, before or after ``prepare()``."""
    import torch

    acc, asked = _accelerator()
    if prepare:
        acc.prepare(torch.nn.Linear(2, 2))
    cp = get_cp_context(acc, **asked)
    wanted = torch.distributed.get_world_size()
    problems = [] if cp.alive else ["its process group is gone"]
    problems += [f"its size is {cp.size}, not {wanted}"] if cp.size != wanted else []
    why = "; asked for by cp_size=" if asked else ""
    return Row.found(name, problems, f"{cp.origin}, cp size {cp.size}, {cp.rotate_method}, {cp.layout}{why}")


def _live(name: str, check: Callable[..., Row], *arguments: Any) -> Row:
    """Run a check of a live context on a fresh accelerator."""
    acc, asked = _accelerator()
    return check(get_cp_context(acc, **asked), *arguments)


def _llama(name: str, fsdp2: bool) -> Row:
    """Loss and every gradient of a tiny Llama with grouped heads, with both rotate methods."""
    if installed("transformers") is None:
        return Row(name, "not run", detail="transformers is not installed")
    missing = _no_config()
    if fsdp2 and missing:
        return Row(name, "not run", detail=f"{missing}, so it gives FSDP2 no device mesh that knows cp")
    found = [_llama_differences(method, fsdp2) for method in ROTATE_METHODS]
    loss, gradients = (max(numbers) for numbers in zip(*found, strict=True))
    limit, gradient_limit = (1e-6, 1e-5) if _on_cpu() else (1e-2, 5e-2)
    return Row.measured(name, loss=(loss, limit), gradients=(gradients, gradient_limit))


def _on_cpu() -> bool:
    import torch.distributed as dist

    return dist.get_backend() == "gloo"


def _llama_differences(method: str, fsdp2: bool) -> tuple[float, float]:
    """Relative differences of the loss and of the gradient that is furthest off."""
    import torch
    import torch.distributed as dist

    acc, asked = _accelerator(method, fsdp2=fsdp2)
    size = dist.get_world_size()
    dtype = torch.float32 if _on_cpu() else torch.bfloat16
    data = _batch(32 * size, acc.device)

    plain = tiny_llama().to(acc.device, dtype)
    expected = _loss(plain, *data)
    torch.autograd.backward(expected)
    expected_loss = float(expected)

    model = tiny_llama().to(acc.device, dtype)
    model, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    cp = get_cp_context(acc, **asked)
    total = data[1].ne(_IGNORE).sum()
    with cp(buffers=list(data), buffer_seq_dims=[1, 1, 1]):
        part = _loss(model, *data, total)
        acc.backward(part * size)  # the wrappers average over the ranks, whose parts add up
    whole = part.detach().clone()
    dist.all_reduce(whole)

    gradients = []
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        grad: Any = ours.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        assert theirs.grad is not None
        gradients.append(float((grad - theirs.grad).abs().max() / theirs.grad.abs().max()))
    return abs(float(whole) - expected_loss) / expected_loss, max(gradients)


def _batch(length: int, device: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, shifted labels and positions of two sequences."""
    import torch

    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 128, (2, length), generator=generator)
    labels = torch.cat((ids[:, 1:], torch.full((2, 1), _IGNORE)), dim=1)
    positions = torch.arange(length).expand(2, -1)
    return ids.to(device), labels.to(device), positions.to(device)


def _loss(model: nn.Module, ids: Tensor, labels: Tensor, positions: Tensor, total: Tensor | None = None) -> Tensor:
    """The mean loss, with `total` labels where these are not all."""
    from torch.nn.functional import cross_entropy

    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    summed = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=_IGNORE, reduction="sum")
    return summed / (labels.ne(_IGNORE).sum() if total is None else total)


_CHECKS: tuple[tuple[str, Callable[..., Row], tuple[Any, ...]], ...] = (
    ("context before prepare()", _context, (False,)),
    ("context after prepare()", _context, (True,)),
    ("tokens, head-tail", _live, (tokens,)),
    ("buffers", _live, (sharding,)),
    *(
        (f"attention, {method}{', GQA' if grouped else ''}", _live, (attention, method, grouped))
        for method in ROTATE_METHODS
        for grouped in (False, True)
    ),
    ("tiny Llama, DDP", _llama, (False,)),
    ("tiny Llama, FSDP2", _llama, (True,)),
    ("exceptions", _live, (exceptions,)),
    ("torch's own switch", _live, (switch,)),
)
