"""Bodies that run a loop written with the five calls, and the same loop without context parallelism."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cpcompat import get_cp_context
from cpcompat.errors import CPError

from .equality import gradients, worst

VOCAB, IGNORE = 128, -100
COMMON = {"vocab_size": VOCAB, "attn_implementation": "sdpa", "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **COMMON,
}


def make(name: str, *, tied: bool = True) -> Any:
    """A tiny causal model of transformers, the same on every rank; `tied` is about GPT-2's embedding and head."""
    import transformers as tf

    torch.manual_seed(0)
    if name == "llama":
        return tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL))
    if name == "gpt2":
        fields = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": tied, **COMMON}
        return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **fields))
    if name == "qwen3":
        return tf.Qwen3ForCausalLM(tf.Qwen3Config(head_dim=16, **SMALL))
    assert name == "mixtral", name
    return tf.MixtralForCausalLM(tf.MixtralConfig(num_local_experts=4, sliding_window=None, **SMALL))


def accelerator(cp_size: int, dp_size: int, *, fsdp2: bool = False, steps: int = 1) -> tuple[Any, dict[str, int]]:
    """A real Accelerator, and what get_cp_context has to be told on accelerate 1.9 and older."""
    from accelerate import Accelerator

    try:
        from accelerate.parallelism_config import ParallelismConfig  # noqa: F401
    except ImportError:
        return Accelerator(cpu=True, gradient_accumulation_steps=steps), {"cp_size": cp_size}
    from cpcompat.testing import cpu_parallelism_config, use_fsdp2_on_cpu

    sizes = {"dp_shard_size": dp_size} if dp_size > 1 else {}
    config = cpu_parallelism_config(cp_size, **sizes)
    acc = Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=steps)
    if fsdp2:
        use_fsdp2_on_cpu(acc)
    return acc, {}


def global_batches(rows: int) -> list[dict[str, Tensor]]:
    """Two batches of one optimizer step: odd lengths, rows padded on the right, the second with labels at its ends only."""
    made = []
    for seed, length in enumerate((37, 50)):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
        mask = torch.arange(length) < length - torch.arange(rows)[:, None] * (seed + 2)
        labels = ids.masked_fill(~mask, IGNORE)
        if seed:  # the middle half is a prompt: the second of two cp ranks, or the last of four, has no label
            labels[:, length // 4 - 2 : 3 * length // 4 + 4] = IGNORE
        made.append({"input_ids": ids * mask, "attention_mask": mask.long(), "labels": labels})
    return made


def judge(frozen: Any, batch: dict[str, Tensor]) -> Tensor:
    """A weight for each row, from a frozen model that looks at the whole row, padded on the left."""
    flipped = {name: batch[name].flip(1) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return frozen(**flipped).logits[:, -1, 0].sigmoid()


def summed(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")
    return (losses.sum(dim=1) * weights).sum()


def without(
    name: str, frozen: Any, batches: list[dict[str, Tensor]], *, tied: bool
) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """The loop without context parallelism, over the global batches in one process: loss, gradients, logits."""
    model, seen, total = make(name, tied=tied), [], 0.0
    tokens = sum(int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in batches)
    for batch in batches:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = summed(logits[:, :-1], batch["labels"][:, 1:], judge(frozen, batch)) / tokens
        loss.backward()
        total += float(loss)
        seen.append(logits.detach())
    return total, {key: p.grad for key, p in model.named_parameters()}, seen


def loop(name: str, cp_size: int, dp_size: int, *, fsdp2: bool) -> dict[str, Any]:
    """One optimizer step of two batches written with the five calls, against the same without context parallelism."""
    rows, frozen, batches = 2, make("llama").eval(), global_batches(2 * dp_size)
    tied = not fsdp2  # accelerate 1.14.0 cannot shard tied weights, with CP or without
    loss, grads, logits_without = without(name, frozen, batches, tied=tied)

    acc, asked = accelerator(cp_size, dp_size, fsdp2=fsdp2, steps=len(batches))
    model = make(name, tied=tied)
    model, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    cp = get_cp_context(acc, **asked)
    mine = slice(rows * (dist.get_rank() // cp_size), rows * (dist.get_rank() // cp_size + 1))
    loader = [{key: value[mine] for key, value in batch.items()} for batch in batches]
    for batch in loader:  # to this data rank's own length
        longest = int(batch["attention_mask"].sum(dim=1).max())
        batch.update({key: value[:, :longest] for key, value in batch.items()})
    if cp.rank:  # this rank's loader gives something else
        loader = [{"input_ids": torch.zeros(1, 3, dtype=torch.long)} for _ in batches]

    step = [cp.broadcast_batch(batch) for batch in loader]
    counts = [(batch["labels"][:, 1:] != IGNORE).sum() / cp.size for batch in step]
    values, gathered, labelled = [], [], []
    for batch in step:
        with acc.accumulate(model), cp.batch(batch) as local:
            labels = local.pop("shift_labels")
            with cp.disabled():
                weights = judge(frozen, batch)
            logits = model(**local).logits
            reduced = cp.reduce_loss(summed(logits, labels, weights), counts)
            acc.backward(reduced)
        gathered.append(cp.gather(logits.detach(), 1))
        values.append(float(reduced.detach()))
        labelled.append(int((labels != IGNORE).sum()))
    assert acc.sync_gradients
    return {
        "loss": abs(sum(values) / len(values) - loss) / loss,
        "gradient": worst(gradients(model), grads),
        # Padded tokens see other padded tokens without their mask; nobody uses them.
        "logits": max(
            float(
                ((ours - whole[mine, : ours.shape[1]]).abs() * batch["attention_mask"][..., None]).max() / whole.max()
            )
            for ours, whole, batch in zip(gathered, logits_without, step, strict=True)
        ),
        "wrapper": type(model).__name__,
        "values": values,
        "labelled": labelled,
    }


def _cp(cp_size: int = 2, dp_size: int = 1) -> Any:
    acc, asked = accelerator(cp_size, dp_size)
    cp = get_cp_context(acc, **asked)
    cp.kept = acc  # the context itself does not keep it
    return cp


def _caught(call: Any) -> str:
    try:
        call()
    except CPError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _enter(cp: Any, batch: Any, **options: Any) -> None:
    with cp.batch(batch, **options):
        pass


def _attend(length: int) -> None:
    query = torch.zeros(1, 1, length, 8)
    F.scaled_dot_product_attention(query, query, query, is_causal=True)


def untouched() -> dict[str, Any]:
    """The caller's tensors in the block, after it, and after an error in it."""
    cp = _cp()
    base = torch.arange(40).reshape(2, 20)
    batch = {
        "input_ids": base[:, :13],
        "labels": base[:, :13],
        "extra": base[:, 1:14],
        "name": "x",
        "rows": torch.ones(2),
    }
    before = {k: (v.data_ptr(), v._version, v.shape, v.clone()) for k, v in batch.items() if isinstance(v, Tensor)}

    def same() -> bool:
        now = {k: (v.data_ptr(), v._version, v.shape, v) for k, v in batch.items() if isinstance(v, Tensor)}
        return all(now[k][:3] == before[k][:3] and torch.equal(now[k][3], before[k][3]) for k in before)

    with cp.batch(batch) as local:
        _attend(8)
        inside = same()
        shard = {k: v.clone() for k, v in local.items() if isinstance(v, Tensor)}
    after = same() and all(torch.equal(local[k], v) for k, v in shard.items())
    unpadded = {"input_ids": torch.zeros(1, 8, dtype=torch.long)}
    with cp.batch(unpadded):
        _attend(4)
    assert unpadded["input_ids"]._version == 0
    assert unpadded["input_ids"].shape == (1, 8)
    original = F.scaled_dot_product_attention
    try:
        with cp.batch(batch):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    return {
        "inside": inside,
        "after": after,
        "after an error": same() and F.scaled_dot_product_attention is original,
        "keys": sorted(local),
        "rest": local["rows"] is batch["rows"] and local["name"] == "x",
        "joined": {
            k: v.tolist() for k, v in zip(shard, cp.unshard(list(shard.values()), [1] * len(shard)), strict=True)
        }
        if (shard := {k: v for k, v in shard.items() if v.dim() > 1})
        else {},
    }


def refused_on_one_rank() -> str:
    """A batch that only cp rank 1 cannot take."""
    cp = _cp()
    mask = torch.ones(2, 8)
    if cp.rank:
        mask[0, 0] = 0
    return _caught(lambda: _enter(cp, {"input_ids": torch.zeros(2, 8, dtype=torch.long), "attention_mask": mask}))


def embeddings() -> dict[str, Any]:
    """``inputs_embeds`` with a graph of the caller's: gradients of what made them."""
    model, embed = make("llama"), torch.nn.Embedding(VOCAB, 32)
    ids = torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(0))
    logits = model(inputs_embeds=embed(ids)).logits
    (F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / 24).backward()
    expected, embed.weight.grad = embed.weight.grad, None

    acc, asked = accelerator(2, 1)
    model = acc.prepare_model(make("llama"))
    cp = get_cp_context(acc, **asked)
    with cp.batch({"inputs_embeds": embed(ids), "labels": ids}) as local:
        labels = local.pop("shift_labels")
        logits = model(**local).logits
        loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        acc.backward(cp.reduce_loss(loss_sum, (labels != IGNORE).sum()))
    grad = embed.weight.grad
    dist.all_reduce(grad)  # embed is no model of the accelerator: this is what DDP would do
    return {"gradient": float((grad / 2 - expected).abs().max() / expected.abs().max())}


def losses() -> dict[str, Any]:
    """`reduce_loss` by itself, on two cp ranks times as many data ranks as there are."""
    cp = _cp(2, dist.get_world_size() // 2)
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}

    def run(loss_sum: Tensor, tokens: Any) -> tuple[float, float]:
        leaf = torch.ones((), requires_grad=True)
        loss = cp.reduce_loss(leaf * loss_sum, tokens)
        loss.backward()
        return float(loss.detach()), float(leaf.grad) / world

    sums, tokens = torch.tensor([3.0, 0.0, 5.0, 1.0])[:world], [4, 0, 6, 2][:world]
    expected = float(sums.sum()) / sum(tokens)
    found["mean"] = run(sums[rank], tokens[rank]), (expected, float(sums[rank]) / sum(tokens))
    found["tensor"] = run(sums[rank], torch.tensor(tokens[rank])), found["mean"][1]
    found["share"] = run(sums[rank], sum(tokens) / world), found["mean"][1]
    found["nothing"] = run(torch.zeros(()), 0), (0.0, 0.0)
    logits = torch.zeros(2, 5, requires_grad=True)
    all_ignored = F.cross_entropy(logits, torch.full((2,), IGNORE), reduction="sum")
    cp.reduce_loss(all_ignored, 0).backward()
    found["all ignored"] = (float(logits.grad.abs().max()),), (0.0,)
    half = cp.reduce_loss(torch.tensor(2.0, dtype=torch.bfloat16), 3)
    found["bfloat16"] = (float(half), half.element_size()), (2 / 3, 4)
    found["one element"] = (float(cp.reduce_loss(torch.full((1, 1), 3.0), 2)),), (1.5,)
    return {"numbers": found, "two elements": _caught(lambda: cp.reduce_loss(torch.ones(2), 2))}


def accumulated() -> dict[str, Any]:
    """Steps of several batches with unequal counts, the last one shorter than gradient_accumulation_steps."""
    acc, asked = accelerator(2, 1, steps=3)
    cp = get_cp_context(acc, **asked)
    found = {}
    for length in (3, 2):
        sums, counts = [[1.0, 2.0], [8.0, 0.0], [4.0, 4.0]][:length], [[1, 3], [2, 0], [5, 1]][:length]
        for given in (lambda c: c, torch.tensor):
            leaf = torch.ones((), requires_grad=True)
            values = []
            for pair in sums:
                loss = cp.reduce_loss(leaf * pair[cp.rank], given([count[cp.rank] for count in counts]))
                values.append(float(loss.detach()))
                acc.backward(loss)
            total = sum(map(sum, counts))
            found[f"{length} {given.__name__}"] = (
                (sum(values) / 3, float(leaf.grad) / 2),
                (sum(map(sum, sums)) / total, sum(pair[cp.rank] for pair in sums) / total),
            )
    return found


def miscounted() -> list[list[str]]:
    """What is said where num_tokens is right, a whole batch's count, and one too many for each row."""
    ids = torch.ones(2, 8, dtype=torch.long)
    said = []
    for tokens in (lambda labels: int((labels != IGNORE).sum()), lambda labels: 14, lambda labels: 8):
        cp = _cp()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with cp.batch({"input_ids": ids, "labels": ids}) as local:
                _attend(4)
                labels = local["shift_labels"]
                cp.reduce_loss(torch.ones(()), tokens(labels))
        said.append([f"{w.category.__name__} {w.filename.rsplit('/')[-1]} {w.message}" for w in caught])
        _reset()
    return said


def _reset() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def gathers() -> dict[str, Any]:
    """`gather` of values of a batch, of others, and after a plain block."""
    cp = _cp()
    values = torch.arange(22.0).reshape(2, 11, 1)
    batch = {"input_ids": values[..., 0].long(), "values": values}
    with cp.batch(batch) as local:
        _attend(6)
        mine = local["values"].clone().requires_grad_()
    found = {"values": torch.equal(cp.gather(mine, 1), values), "dim -2": torch.equal(cp.gather(mine, -2), values)}
    (cp.gather(mine, 1) * values).sum().backward()
    whole = torch.cat((values, torch.zeros(2, 1, 1)), dim=1)
    found["gradient"] = torch.equal(mine.grad / 2, whole[:, cp.positions(12)])
    found["bool"] = torch.equal(cp.gather(mine > 4, 1), values > 4)
    found["stranger"] = _caught(lambda: cp.gather(torch.zeros(2, 4), 1)).split("\n")[0]
    plain = torch.arange(12)
    with cp([plain], [0]):
        _attend(6)
        shard = plain.clone()
    found["plain"] = torch.equal(cp.gather(shard, 0), plain)
    return found


def switched_off() -> dict[str, Any]:
    """`disabled` in and out of a block, nested, left by an error, and outliving its block."""
    original, cp = F.scaled_dot_product_attention, _cp()
    ids = {"input_ids": torch.ones(1, 8, dtype=torch.long)}
    found = {}
    with cp.disabled():
        found["outside"] = F.scaled_dot_product_attention is original
    with cp.batch(ids):
        _attend(4)
        inside = F.scaled_dot_product_attention
        with cp.disabled():
            found["off"] = F.scaled_dot_product_attention is original
            _attend(7)
            with cp.disabled():
                found["nested"] = F.scaled_dot_product_attention is original
            found["still off"] = F.scaled_dot_product_attention is original
        found["on again"] = F.scaled_dot_product_attention == inside != original
        try:
            with cp.disabled():
                raise KeyError
        except KeyError:
            found["after an error"] = F.scaled_dot_product_attention == inside
        found["another block"] = _caught(lambda: _enter(cp, ids)).split(":")[0]
        found["on still"] = F.scaled_dot_product_attention == inside
        other = type(cp)(cp.mesh)
        found["another context"] = _caught(other.disabled().__enter__).split(":")[0]
        with cp.disabled():
            found["a block in it"] = _caught(lambda: _enter(cp, ids)).split(":")[0]
    found["left"] = F.scaled_dot_product_attention is original
    block, off = cp.batch(ids), cp.disabled()
    block.__enter__()
    _attend(4)
    off.__enter__()
    block.__exit__(None, None, None)
    off.__exit__(None, None, None)
    found["outlived"] = F.scaled_dot_product_attention is original
    return found


def sent() -> dict[str, Any]:
    """`broadcast_batch` of everything a collator may give."""
    cp = _cp()
    theirs = {
        "input_ids": torch.arange(6).reshape(2, 3).T,
        "mask": torch.tensor([True, False]),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(7.0, requires_grad=True),
        "empty": torch.zeros(0, 3),
        "names": ["a", "b"],
        "none": None,
    }
    batch = theirs if cp.rank == 0 else {"input_ids": torch.zeros(9, 9)}
    got = cp.broadcast_batch(batch)
    assert got is not None
    found: dict[str, Any] = {"keys": list(got) == list(theirs), "names": got["names"], "none": got["none"]}
    for name, value in theirs.items():
        if isinstance(value, Tensor):
            found[name] = torch.equal(got[name], value) and got[name].dtype is value.dtype
    found["same tensors"] = all(got[name] is batch[name] for name in batch) if cp.rank == 0 else len(batch) == 1
    found["end"] = cp.broadcast_batch(None if cp.rank == 0 else batch)
    found["no mapping"] = _caught(lambda: cp.broadcast_batch([1])).split("\n")[0]
    found["no pickle"] = _caught(lambda: cp.broadcast_batch({"f": lambda: 0})).split("\n")[0]
    found["sparse"] = _caught(lambda: cp.broadcast_batch({"s": torch.eye(2).to_sparse()})).split("\n")[0]
    return found


def padding_and_no_causality() -> list[str]:
    """Attention that is not causal over a batch with and without padding."""
    cp = _cp()
    said = []
    for length in (8, 7):
        with cp.batch({"input_ids": torch.ones(1, length, dtype=torch.long)}):
            query = torch.zeros(1, 1, 4, 8)
            said.append(_caught(lambda query=query: F.scaled_dot_product_attention(query, query, query)).split("\n")[0])
    return said


def guide(blocks: list[tuple[int, str]], path: str) -> int:
    """Run the guide's blocks of code in one namespace, one accelerate state after the other."""
    names: dict[str, Any] = {}
    for line, code in blocks:
        exec(compile("\n" * line + code, path, "exec"), names)
        _reset()
    return len(blocks)
