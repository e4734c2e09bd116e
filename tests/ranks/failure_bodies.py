"""Bodies for the twelve failure modes: each fault without the library, as a user meets it, and with the library."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from cpcompat import CPContext, CPError, CPWarning, diagnose, get_cp_context
from cpcompat import ring as _ring
from cpcompat.hooks import Models, attention_modules, has_mask_hook
from cpcompat.testing import tiny_llama
from ranks.equality import IGNORE, batch, loss_of, make_accelerator, reference, worst
from ranks.hook_bodies import model as make_model

SDPA = F.scaled_dot_product_attention


def context() -> CPContext:
    return CPContext(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)))


def caught(call: Callable[[], Any]) -> tuple[str, str, list[str]]:
    """The kind, words and notes of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "__notes__", [])
    return "no error", "", []


class BareBlock:
    """What a careful user has without the library: buffers cut rightly, and a ring in the place of SDPA; nothing else.

    torch's own context cannot compute the backward pass on CPU, so its ring is cpcompat's; none of the checks is.
    """

    def __init__(self, cp: CPContext, data: dict[str, Tensor]) -> None:
        self.cp, self.data = cp, data

    def __enter__(self) -> dict[str, Tensor]:
        index = self.cp.positions(next(iter(self.data.values())).shape[1])
        ring = self.cp._own_ring()

        def attention(
            query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, is_causal: bool = True, **_: Any
        ) -> Tensor:
            return _ring.attention(ring, query, *_grouped(query, key, value), causal=True, scale=None)

        F.scaled_dot_product_attention = attention
        return {name: tensor[:, index] for name, tensor in self.data.items()}

    def __exit__(self, *exc_info: object) -> None:
        F.scaled_dot_product_attention = SDPA


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def averaged(model: nn.Module) -> dict[str, Tensor]:
    """The sum over ranks of the gradients of each rank's part of the loss."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.grad.clone()
        dist.all_reduce(found[name])
    return found


def ready(*models: nn.Module, argument: bool = False) -> tuple[Any, CPContext]:
    """A real accelerator with models that it has prepared for evaluation, and its context."""
    acc = make_accelerator(2, fsdp2=False)
    for model in models:
        acc.prepare_model(model, evaluation_mode=True)
    return acc, get_cp_context(acc, cp_size=2) if argument else get_cp_context(acc)


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    """Kind and code of what the library raises."""
    try:
        call()
    except CPError as error:
        return type(error).__name__, error.code
    return "no error", ""


def warned(call: Callable[[], Any]) -> list[str]:
    """The codes of what the library warns of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    return [warning.message.code for warning in said if isinstance(warning.message, CPWarning)]


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().abs().max())


def whole_logits(cp: CPContext, model: nn.Module, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """The logits that the bare block gives: no mask gets through, and attention is causal over the whole sequence."""
    data = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}
    if positions is not None:
        data["position_ids"] = positions
    with BareBlock(cp, data) as local, torch.no_grad():
        logits = model(**local, use_cache=False).logits
    return cp.unshard([logits], [1])[0]


def some_ids(rows: int = 1, length: int = 32) -> Tensor:
    return batch(rows, length)["input_ids"]


# --- 1: the context is missing ------------------------------------------------------------------------------------------


def missing(prepare: str) -> dict[str, Any]:
    """``acc.maybe_context_parallel`` as trainers call it, without the library and after `get_cp_context`."""
    acc = make_accelerator(2, fsdp2=False)
    model = tiny_llama()
    if prepare == "prepare":
        model, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        model = acc.prepare_model(model, evaluation_mode=True)
    ids = some_ids()
    with torch.no_grad():
        right = tiny_llama()(input_ids=ids, use_cache=False).logits

    def block() -> Tensor:
        mine, positions = ids.clone(), torch.arange(32)[None]
        with acc.maybe_context_parallel([mine, positions], [1, 1]), torch.no_grad():
            return model(input_ids=mine, position_ids=positions, use_cache=False).logits

    theirs = caught(lambda: acc.maybe_context_parallel([ids.clone()], [1]).__enter__()) if not own(acc) else None
    cp = get_cp_context(acc)
    found = {"without": theirs, "origin": cp.origin}
    if cp.origin == "created":
        found["logits"] = difference(cp.unshard([block()], [1])[0], right)
    return found


def own(acc: Any) -> bool:
    return hasattr(acc, "_cp_context")


# --- 2: the mask is thrown away -----------------------------------------------------------------------------------------

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding window": ("mistral", {"sliding_window": 8}),
    "chunks": (
        "llama4_text",
        {
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention"],
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "linear attention": (
        "qwen3_next",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
}


def layers(name: str, argument: bool) -> dict[str, Any]:
    """A model whose layers see less than the sequence: logits of the bare block, and what the library says."""
    kind, fields = LAYERS[name]
    model, ids = make_model(kind, **fields).eval(), some_ids()
    with torch.no_grad():
        right = model(input_ids=ids, use_cache=False).logits
    wrong = difference(whole_logits(context(), model, ids), right)

    def enter() -> None:
        _, cp = ready(model, argument=argument)
        with cp([ids.clone()], [1]):
            pass

    return {"wrong": wrong, "refused": refusal(enter)}


def masks() -> dict[str, Any]:
    """Packed rows and padding on the left and right: logits of real tokens in the bare block, and of the library."""
    cp, model, ids = context(), tiny_llama().eval(), some_ids()
    Models().refresh([model])
    documents = torch.cat((torch.arange(12), torch.arange(20)))[None]
    mask = torch.ones(1, 32, dtype=torch.long)
    mask[0, :7] = 0
    with torch.no_grad():
        packed = torch.cat([tiny_llama()(input_ids=part, use_cache=False).logits for part in ids.split([12, 20], 1)], 1)
        left = tiny_llama()(input_ids=ids, attention_mask=mask, use_cache=False).logits
        right = tiny_llama()(input_ids=ids, attention_mask=mask.flip(1), use_cache=False).logits
    bare = whole_logits(cp, model, ids)

    def enter(**batch: Tensor) -> Tensor:
        with cp.batch({"input_ids": ids, **batch}) as local, torch.no_grad():
            return model(**local, use_cache=False).logits

    return {
        "packed, wrong": difference(whole_logits(cp, model, ids, documents), packed),
        "packed": refusal(lambda: enter(position_ids=documents)),
        "left, wrong": difference(bare[:, 7:], left[:, 7:]),
        "left": refusal(lambda: enter(attention_mask=mask)),
        "right": difference(cp.gather(enter(attention_mask=mask.flip(1)), 1)[:, :-7], right[:, :-7]),
    }


def other_names(kind: str, argument: bool) -> dict[str, Any]:
    """A model whose attention is not called self_attn: who hooks it, accelerate or the library; and a mask in the block."""
    model = make_model(kind)
    acc = make_accelerator(2, fsdp2=False)
    model, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found: dict[str, Any] = {"accelerate": sum(has_mask_hook(module) for module in model.modules())}
    cp = get_cp_context(acc, **({"cp_size": 2} if argument else {}))
    found["cpcompat"] = sum(has_mask_hook(module) for _, module in attention_modules(model))

    def masked() -> None:
        ids, mask = some_ids(), torch.ones(1, 16, dtype=torch.long)
        mask[0, -3:] = 0
        with cp([ids], [1]), torch.no_grad():
            model(input_ids=ids, attention_mask=mask)

    found["masked"] = refusal(masked)
    return found


# --- 3: evaluation ------------------------------------------------------------------------------------------------------


def evaluation(argument: bool) -> dict[str, Any]:
    """Loss and logits of a batch, put together as evaluation loops do, and as the library does."""
    acc, cp = ready(argument=argument)
    data = {"input_ids": some_ids(2), "labels": some_ids(2)}
    model = tiny_llama().eval()
    Models().refresh([model])
    with torch.no_grad():
        right = tiny_llama()(**data, use_cache=False)
    with cp.batch(data) as local, torch.no_grad():
        labels = local.pop("shift_labels")
        logits = model(**local, use_cache=False).logits
        summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        counted = (labels != IGNORE).sum()
        loss = cp.reduce_loss(summed, counted)
    shards = [torch.empty_like(logits) for _ in range(cp.size)]
    dist.all_gather(shards, logits)
    parts = summed / (62 / cp.size)  # each rank's share, as if it were a mean over the whole batch
    dist.all_reduce(parts)
    return {
        "joined in rank order": difference(torch.cat(shards, 1), right.logits),
        "gathered by accelerate": tuple(acc.gather(logits).shape),
        "logits": difference(cp.gather(logits, 1), right.logits),
        "shape": tuple(cp.gather(logits, 1).shape),
        "added up": float(parts / right.loss),
        "loss": float(loss / right.loss),
    }


# --- 4: CP is not on ----------------------------------------------------------------------------------------------------


def not_on(argument: bool) -> dict[str, Any]:
    """A size in the environment, and no switch: what accelerate does, and what the library says."""
    from accelerate import Accelerator

    acc = Accelerator(cpu=True)
    model, ids = acc.prepare_model(tiny_llama(), evaluation_mode=True), some_ids()
    found: dict[str, Any] = {}
    if not argument:
        with acc.maybe_context_parallel(buffers=[ids], buffer_seq_dims=[1]), torch.no_grad():
            found["tokens on each rank"] = model(input_ids=ids).logits.shape[1]
    found["refused"] = refusal(lambda: get_cp_context(acc))
    return found


def sizes_differ() -> dict[str, Any]:
    """A product of sizes that is not the number of processes; accelerate's own words, and the doctor's."""
    os.environ.update(
        ACCELERATE_USE_PARALLELISM_CONFIG="true",
        PARALLELISM_CONFIG_CP_SIZE="2",
        WORLD_SIZE=str(dist.get_world_size()),
    )
    kind, text, _ = caught(lambda: make_accelerator(2, fsdp2=False))
    (finding,) = diagnose().found("error")
    return {"kind": kind, "text": text, "code": finding.code, "evidence": finding.evidence}


# --- 5: different batches -----------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from some_ids(16)


def loaders(kind: str, argument: bool) -> dict[str, Any]:
    """The first batch of a prepared loader on each rank; what the library says, and its cure."""
    acc, cp = ready(argument=argument)
    torch.seed()
    rows = some_ids(16)
    if kind == "own":
        loader: Any = [rows[torch.randperm(16)[:2]]]
    else:
        dataset: Any = Stream() if kind == "iterable" else list(rows)
        loader = acc.prepare(DataLoader(dataset, batch_size=2, shuffle=kind == "shuffled"))
    (ids, *_) = loader
    held: list[Any] = [None] * cp.size
    dist.all_gather_object(held, ids.tolist())

    def enter(ids: Tensor) -> None:
        with cp([ids], [1]):
            F.scaled_dot_product_attention(*[torch.ones(1, 1, 16, 8)] * 3, is_causal=True)

    found = {"different": held[0] != held[1], "refused": refusal(lambda: enter(ids.clone()))}
    sent = cp.broadcast_batch({"input_ids": ids})
    assert sent is not None
    found["cured"] = refusal(lambda: enter(sent["input_ids"].clone()))
    return found


def different_batches() -> dict[str, Any]:
    """Gradients where each rank holds a batch of its own, against those of rank 0's batch."""
    cp = context()
    mine, total = batch(2, 64, seed=cp.rank), 2 * 63
    gradients = []
    for seed in range(cp.size):
        gradients.append(reference(tiny_llama(), batch(2, 64, seed=seed))[1])
    model = tiny_llama()
    Models().refresh([model])
    with BareBlock(cp, mine) as local:
        loss_of(model, local, total).backward()
    found = averaged(model)

    def enter() -> None:
        with cp(list(mine.values()), [1, 1, 1]):
            pass

    return {"wrong": min(worst(found, right) for right in gradients), "refused": refusal(enter)}


# --- 6: the sequence length ---------------------------------------------------------------------------------------------


def lengths(length: int) -> dict[str, Any]:
    """A length that cannot be cut: torch's own context, and the library's."""
    cp = context()
    theirs = torch.arange(length)[None]

    def torchs() -> list[int]:
        with context_parallel(cp.mesh, buffers=[theirs], buffer_seq_dims=[1]):
            return theirs[0].tolist()

    kind, text, _ = caught(torchs)
    found: dict[str, Any] = {"torch": (kind, text), "shard": torchs() if kind == "no error" else None}
    ours = torch.arange(length)[None]
    try:
        cp([ours], [1]).__enter__()
    except CPError as error:
        found["refused"] = (type(error).__name__, error.code)
        found["facts"] = (error.length, error.multiple, error.padded_length)
    with cp.batch({"input_ids": ours}) as local:
        F.scaled_dot_product_attention(*[torch.ones(1, 1, local["input_ids"].shape[1], 8)] * 3, is_causal=True)
        found["batch"] = local["input_ids"].shape[1] * cp.size
    return found


# --- 7: attention never goes through CP ---------------------------------------------------------------------------------


def unseen(how: str) -> dict[str, Any]:
    """Logits where attention misses the block, against those without CP, and what the library warns of."""
    cp, ids = context(), some_ids()
    model = tiny_llama(attn_implementation="eager" if how == "eager" else "sdpa").eval()
    with torch.no_grad():
        right = tiny_llama()(input_ids=ids, use_cache=False).logits
    if how == "captured":
        from transformers import AttentionInterface

        def captured(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
            return SDPA(query, *_grouped(query, key, value), is_causal=True).transpose(1, 2), None

        AttentionInterface.register("captured", captured)
        model.set_attn_implementation("captured")
    found: dict[str, Any] = {}

    def block() -> None:
        data = {"input_ids": ids.clone(), "position_ids": torch.arange(32)[None]}
        with cp(list(data.values()), [1, 1]), torch.no_grad():
            mask = torch.full((16, 16), -torch.inf).triu(1)[None, None] if how == "eager" else None
            found["logits"] = model(**data, attention_mask=mask, use_cache=False).logits

    found["warned"] = warned(block)
    found["wrong"] = difference(cp.unshard([found.pop("logits")], [1])[0], right)
    return found


def sharded_twice() -> dict[str, Any]:
    """Two layers that both shard: torch's context inside a block that cut already, and the library's inside torch's."""
    cp, ids = context(), torch.arange(32)[None]
    found: dict[str, Any] = {}
    with BareBlock(cp, {"ids": ids}) as local:
        shard = local["ids"]
        with context_parallel(cp.mesh, buffers=[shard], buffer_seq_dims=[1]):
            found["tokens"] = shard.shape[1]
    with context_parallel(cp.mesh, buffers=[ids], buffer_seq_dims=[1]):
        found["refused"] = refusal(lambda: cp([ids], [1]).__enter__())
    return found


# --- 8: labels and positions --------------------------------------------------------------------------------------------


def labels_and_positions() -> dict[str, Any]:
    """Labels shifted in the shard, and no positions, in the bare block; and a whole batch through the library."""
    cp, model = context(), tiny_llama().eval()
    Models().refresh([model])
    data = {"input_ids": some_ids(2), "labels": some_ids(2)}
    with torch.no_grad():
        right = tiny_llama()(**data, use_cache=False)
    found: dict[str, Any] = {}
    with BareBlock(cp, {**data, "position_ids": torch.arange(32).expand(2, -1)}) as local, torch.no_grad():
        targets = torch.tensor(local["labels"][:, 1:].numel())
        dist.all_reduce(targets)
        found["targets"] = (int(targets), 2 * 31)
        ours = model(**local, use_cache=False).loss.clone()
        dist.all_reduce(ours)
        found["loss, wrong"] = abs(float(ours / cp.size - right.loss))
    with BareBlock(cp, data) as local, torch.no_grad():
        logits = model(input_ids=local["input_ids"], use_cache=False).logits
    found["logits, wrong"] = difference(cp.unshard([logits], [1])[0], right.logits)

    with cp.batch(data) as local, torch.no_grad():
        labels = local.pop("shift_labels")
        logits = model(**local, use_cache=False).logits
        summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        loss = cp.reduce_loss(summed, (labels != IGNORE).sum())
    found["loss"] = abs(float(loss - right.loss))
    found["logits"] = difference(cp.gather(logits, 1), right.logits)
    return found


def expanded(rows: int) -> dict[str, bool]:
    """Positions made with ``expand``, as the Trainer makes them: cut by torch's own context, and by the library."""
    cp = context()
    index = cp.positions(32).expand(rows, -1)
    found = {}
    for name, make in {
        "torch": lambda buffers: context_parallel(cp.mesh, buffers=buffers, buffer_seq_dims=[1]),
        "cpcompat": lambda buffers: cp(buffers, [1]),
    }.items():
        positions = torch.arange(32).expand(rows, -1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CPWarning)
            with make([positions]):
                found[name] = torch.equal(positions, index)
    return found


# --- 9: the loss's scale ------------------------------------------------------------------------------------------------


def loss_scale() -> dict[str, Any]:
    """The loss of a batch with unequally many labels: mean of means, a sum over ranks, and an empty shard."""
    cp = context()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 32, 8, generator=generator)
    labels = torch.randint(8, (1, 32), generator=generator)
    found: dict[str, Any] = {}
    for name, hidden in {"unequal": slice(4, 14), "one shard empty": slice(8, 24)}.items():
        target = labels.clone()
        target[:, hidden] = IGNORE
        right = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORE)
        index = cp.positions(32)
        mine, of_mine = logits[:, index].flatten(0, 1), target[:, index].flatten()
        mean = F.cross_entropy(mine, of_mine, ignore_index=IGNORE)
        dist.all_reduce(mean)
        summed = F.cross_entropy(mine, of_mine, ignore_index=IGNORE, reduction="sum")
        ours = cp.reduce_loss(summed, (of_mine != IGNORE).sum())
        found[name] = {
            "mean of means": float(mean / cp.size - right),
            "sum of means": float(mean / right),
            "ours": float(ours - right),
        }
    return found


# --- 10: no usable kernel -----------------------------------------------------------------------------------------------


def on_cpu(causal: bool) -> dict[str, Any]:
    """Attention with gradients on CPU in float32: torch's own context, and the library's ring."""
    cp = context()
    torch.manual_seed(0)
    whole = torch.randn(1, 2, 32, 8, requires_grad=True)
    index = cp.positions(32)
    right = SDPA(whole, whole, whole, is_causal=causal)
    right.sum().backward()

    def torchs() -> None:
        x = whole.detach()[:, :, index]
        with context_parallel(cp.mesh, buffers=[torch.zeros(1, 4 * cp.size)], buffer_seq_dims=[1]):
            F.scaled_dot_product_attention(x, x, x, is_causal=True)

    kind, text, _ = caught(torchs)
    F.scaled_dot_product_attention = SDPA  # up to torch 2.12 it stays patched
    mine = whole.detach()[:, :, index].requires_grad_()
    with cp():
        out = F.scaled_dot_product_attention(mine, mine, mine, is_causal=causal)
        out.sum().backward()
    return {
        "torch": (kind, text),
        "forward": difference(out, right[:, :, index]),
        "backward": difference(mine.grad, whole.grad[:, :, index]),
    }


# --- 11: backward or recompute outside the block ------------------------------------------------------------------------


def checkpointed(reentrant: bool) -> nn.Module:
    model = tiny_llama()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    model.enable_input_require_grads()
    Models().refresh([model])  # masks are dropped, as accelerate's own hook does it
    return model


def backward_outside(reentrant: bool) -> dict[str, Any]:
    """Backward after the block of a checkpointed Llama, with the bare block and with cpcompat's."""
    data = batch(2, 64)
    total = 2 * 63
    _, right = reference(tiny_llama(), data)
    cp = context()
    found: dict[str, Any] = {}

    def run(block: Any, model: nn.Module, inside: bool) -> dict[str, Tensor]:
        with block as local:
            loss = loss_of(model, local or mine, total)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return averaged(model)

    for inside in (True, False):
        mine = {name: tensor.clone() for name, tensor in data.items()}
        for name, make in (
            ("bare", lambda: BareBlock(cp, data)),
            ("cpcompat", lambda mine=mine: cp(list(mine.values()), [1, 1, 1], set(mine.values()))),
        ):
            key = f"{name}, {'inside' if inside else 'outside'}"
            try:
                found[key] = worst(run(make(), checkpointed(reentrant), inside), right)
            except RuntimeError as error:
                found[key] = (type(error).__name__, str(error))
    return found


def recompute_elsewhere() -> dict[str, Any]:
    """Reentrant checkpointing around attention: nested, in `disabled`, in the next block, without any graph."""
    cp = context()
    query = torch.ones(1, 1, 8, 8, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def once(x: Tensor) -> Tensor:
        return checkpoint(attend, x, use_reentrant=True)

    def twice(x: Tensor) -> Tensor:
        return checkpoint(once, x, use_reentrant=True)

    found: dict[str, Any] = {}
    for name, layer in (("once", once), ("nested", twice)):
        with cp():
            out = layer(query)
        found[name] = caught(lambda out=out: out.sum().backward())[0]
    with cp():
        out = once(query)
        with cp.disabled():
            found["disabled"] = caught(lambda: out.sum().backward())[0]
    with cp():
        out = once(query)
    with cp():
        found["the next block"] = caught(lambda: out.sum().backward())[0]
    with cp(), torch.no_grad():
        once(query)
    with cp():
        with cp.disabled():
            out = once(query)
        attend(query)
    found["in disabled only"] = caught(lambda: out.sum().backward())[0]
    found["outside alone"] = caught(lambda: once(query).sum().backward())[0]
    return found


# --- notes on torch's own exceptions ------------------------------------------------------------------------------------


def notes() -> dict[str, tuple[str, str, list[str]]]:
    """Every exception of torch that gets a note, raised by torch itself inside a block; and some that get none."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cp = context()
    query = torch.ones(1, 1, 8, 8)

    def attend(**keywords: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, query, query, **{"is_causal": True, **keywords})

    def mixed() -> None:
        torch.ones(2) @ DTensor.from_local(torch.ones(2, 2), cp.mesh, [Replicate()])

    def no_kernel() -> None:
        with cp.disabled(), sdpa_kernel(SDPBackend.FLASH_ATTENTION), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attend(dropout_p=0.1)

    def no_strategy() -> None:
        x = DTensor.from_local(query, cp.mesh, [Replicate()])
        with cp.disabled():
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.0, True)

    def not_causal() -> None:
        import torch.distributed.tensor.experimental._attention as module

        module._templated_ring_attention(
            *((cp.group, 2) if "group" in module._templated_ring_attention.__code__.co_varnames else (cp.mesh, 2)),
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
            query=query,
            key=query,
            value=query,
            is_causal=False,
        )

    def recompute() -> None:
        x = query.clone().requires_grad_()

        def layer(x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

        out = checkpoint(layer, x, use_reentrant=False)
        with cp.disabled():
            out.sum().backward()

    def whole_mask() -> None:
        mask = torch.zeros(1, 1, 8 * cp.size, 8 * cp.size)
        (query @ query.transpose(2, 3) + mask).softmax(-1)

    def eager_model() -> None:
        tiny_llama(attn_implementation="eager")(ids, attention_mask=torch.zeros(1, 1, 8 * cp.size, 8 * cp.size))

    def other_sizes() -> None:
        torch.ones(3) + torch.ones(8)

    def other_error() -> None:
        raise ValueError("mine")

    found = {}
    for case in (
        mixed,
        no_kernel,
        no_strategy,
        not_causal,
        recompute,
        whole_mask,
        eager_model,
        other_sizes,
        other_error,
    ):
        ids = torch.arange(8 * cp.size)[None]

        def block(case: Callable[[], None] = case, ids: Tensor = ids) -> None:
            with cp(buffers=[ids], buffer_seq_dims=[1]):
                case()

        found[case.__name__] = caught(block)
        assert F.scaled_dot_product_attention is SDPA
    return found


# --- 12: unsafe mechanics -----------------------------------------------------------------------------------------------


def mechanics() -> dict[str, Any]:
    """What torch's own context does where the library's is safe or says no."""
    cp = context()

    def torchs(buffers: Any, body: Callable[[], Any] = lambda: None) -> Any:
        dims = [1] * len(buffers)
        with context_parallel(cp.mesh, buffers=buffers, buffer_seq_dims=dims):
            return body()

    def fail() -> None:
        raise KeyError("the user's")

    found: dict[str, Any] = {}
    for name, make in {"torch": torchs, "cpcompat": lambda b, body: ours(cp, b, body)}.items():
        ids = torch.arange(32)[None]
        found[f"exception, {name}"] = caught(lambda make=make, ids=ids: make([ids], fail))[0]
        found[f"left, {name}"] = (F.scaled_dot_product_attention is SDPA, ids.shape[1])
        F.scaled_dot_product_attention = SDPA
    _reset_torch()

    found["empty, torch"] = caught(lambda: torchs([]))[0]
    found["empty, cpcompat"] = caught(lambda: ours(cp, []))[0]

    graph = torch.ones(1, 32, requires_grad=True)
    found["grad, torch"] = caught(lambda: torchs([graph]))[1]
    F.scaled_dot_product_attention = SDPA
    _reset_torch()
    found["grad, cpcompat"] = refusal(lambda: ours(cp, [graph]))

    for name, make in {"torch": torchs, "cpcompat": lambda b: ours(cp, b)}.items():
        text = torch.arange(33)[None].repeat(2, 1)
        kept = text.clone()
        kind = caught(lambda make=make, text=text: make([text[:, :-1], text[:, 1:]]))[0]
        found[f"views, {name}"] = (kind, torch.equal(text, kept))
        F.scaled_dot_product_attention = SDPA
        _reset_torch()
        base = torch.arange(64)[None]
        seen = base.clone()
        view = base[:, 16:48]

        def look(base: Tensor = base, seen: Tensor = seen) -> bool:
            return torch.equal(base, seen)

        found[f"base, {name}"] = torchs([view], look) if name == "torch" else ours(cp, [view], look)

    def patched() -> bool:
        return F.scaled_dot_product_attention is not SDPA

    def nest() -> bool:
        torchs([torch.zeros(1, 32)])
        return patched()

    found["nested, torch"] = torchs([torch.zeros(1, 32)], nest)
    F.scaled_dot_product_attention = SDPA
    _reset_torch()
    found["nested, cpcompat"] = ours(cp, [torch.zeros(1, 32)], lambda: (refusal(lambda: ours(cp, [])), patched()))
    return found


def ours(cp: CPContext, buffers: list[Tensor], body: Callable[[], Any] = lambda: None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CPWarning)
        with cp(buffers, [1] * len(buffers)):
            return body()


def _reset_torch() -> None:
    """Undo what torch's context leaves behind after an error, up to 2.12: load balancing and the dispatcher."""
    with context_parallel(context().mesh, buffers=[torch.zeros(1, 32)], buffer_seq_dims=[1]):
        pass
    F.scaled_dot_product_attention = SDPA
