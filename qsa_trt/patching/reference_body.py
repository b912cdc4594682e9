"""The ONNX local function `QsaAttention`: the whole paged contract in plain ops, for runtimes without the plugin.

A patched file carries this function once, shared by all layers. onnxruntime inlines it; TensorRT ignores it where the
plugin is registered. It defines the result and is not fast: it scores and attends over all M*P keys under a mask.

One body serves every geometry (the node's attributes are read at run time), both modes and the surfaces fp16, bf16 and
fp32. All arithmetic is fp32 (onnxruntime's CPU provider has no bf16 MatMul); `_Body.h` rounds to the surface dtype
where the contract does. The pool is only ever sliced, gathered and scattered in its own dtype, so that slots that are
not written keep their bits. Stale values reach a result only through Where or under a softmax weight of exactly zero.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from qsa_plugin.contract import (
    ATTRIBUTES,
    INPUTS,
    ONNX_DOMAIN,
    ONNX_OPSET,
    OUTPUTS,
    PAGE_SIZE,
    PLUGIN_NAME,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
)
from qsa_plugin.errors import InputError

from .op_builder import FunctionBuilder, Value

#: Opsets of the default domain for which the ops below mean what the body expects, and which onnxruntime runs.
OPSETS = range(17, 25)
#: First ONNX IR version with local functions.
_FUNCTIONS_IR = 8


def reference_function(
    opset: int, *, name: str = PLUGIN_NAME, domain: str = ONNX_DOMAIN, with_selection: bool = False
) -> onnx.FunctionProto:
    """Build the local function for models of one opset.

    Args:
        opset: version of the default ONNX domain that the model imports, 17 to 24.
        name: operator name of the nodes that call the function.
        domain: operator domain of these nodes.
        with_selection: add a third output `selection`, bool [B, S, M*P]: the tokens of each live row's index list.

    Raises:
        InputError: the opset is not supported.
    """
    if opset not in OPSETS:
        raise InputError(
            "opset of the default ONNX domain",
            opset,
            f"{OPSETS[0]} to {OPSETS[-1]}",
            "export the model again with such an opset, or patch it without the reference body",
        )
    outputs = [t.name for t in OUTPUTS] + (["selection"] if with_selection else [])
    required = [a.name for a in ATTRIBUTES if a.default is None]
    defaults = {a.name: a.kind(a.default) for a in ATTRIBUTES if a.default is not None}
    plugin = {"plugin_version": PLUGIN_VERSION, "plugin_namespace": PLUGIN_NAMESPACE}
    return helper.make_function(
        domain,
        name,
        [t.name for t in INPUTS],
        outputs,
        _Body(with_selection).build(),
        [helper.make_opsetid("", opset)],
        required,
        [helper.make_attribute(k, v) for k, v in (defaults | plugin).items()],
        doc_string="Qwen Sparse Attention over a paged pool, in plain ops; node names tell the step.",
    )


def add_reference_function(
    model: onnx.ModelProto, *, name: str = PLUGIN_NAME, domain: str = ONNX_DOMAIN, with_selection: bool = False
) -> None:
    """Add the function and the import of its domain to `model`, in place; what is there already stays.

    Raises:
        InputError: the model's opset is not supported.
    """
    imports = {o.domain: o.version for o in model.opset_import}
    if not any((f.domain, f.name) == (domain, name) for f in model.functions):
        opset = imports.get("", imports.get("ai.onnx", 0))
        model.functions.append(reference_function(opset, name=name, domain=domain, with_selection=with_selection))
    if domain not in imports:
        model.opset_import.append(helper.make_opsetid(domain, ONNX_OPSET))
    model.ir_version = max(model.ir_version, _FUNCTIONS_IR)


class _Body:
    """The contract step by step: each method appends the nodes of one step.

    Notation of the shapes: B batch, S tokens of this call, Hq and Hkv heads, G = Hq/Hkv, D head size, Ih indexer heads,
    Id indexer head dim, R compress ratio, T = M*P tokens that a sequence can hold, C blocks that this call can
    complete, L live tokens of this call, r = rotary/2. Integers are int64; those of shape [1] stand for sizes.
    """

    def __init__(self, with_selection: bool) -> None:
        self.with_selection = with_selection
        self.b = FunctionBuilder()
        (
            self.qkv,
            self.index_qk,
            self.past,
            self.context_lengths,
            self.rope_table,
            self.start_index,
            self.page_table,
            self.q_gamma,
            self.k_gamma,
            self.index_q_gamma,
            self.index_k_gamma,
        ) = (self.b.input(t.name) for t in INPUTS)

    def build(self) -> list[onnx.NodeProto]:
        """All nodes, in topological order."""
        self.b.step("attributes")
        self.read_attributes()
        self.b.step("mode")
        self.find_mode()
        self.b.step("pages")
        self.find_pages()
        self.b.step("project")
        self.split_projections()
        self.b.step("main")
        q, k = self.norm_main_heads()
        self.b.step("indexer_query")
        index_q = self.norm_indexer_query()
        self.b.step("block_keys")
        block_keys = self.pool_block_keys()
        self.b.step("write")
        main, state = self.write_pool(k, block_keys)
        self.b.step("scores")
        scores = self.score_blocks(index_q, state)
        self.b.step("select")
        selected = self.select_tokens(scores)
        self.b.step("attend")
        self.attend(q, main, selected)
        return self.b.nodes

    # Small parts that several steps share.

    def h(self, x: Value) -> Value:
        """Round fp32 to the surface dtype, and back."""
        return self.fp32(self.surface(x))

    def fp32(self, x: Value) -> Value:
        return self.b.op("Cast", x, to=TensorProto.FLOAT)

    def int64(self, x: Value) -> Value:
        return self.b.op("Cast", x, to=TensorProto.INT64)

    def surface(self, x: Value) -> Value:
        return self.b.op("CastLike", x, self.qkv)

    def inverse_rms(self, x: Value, width: Value) -> Value:
        """1 / sqrt(mean(x^2) + eps) over the last dim, of size `width`."""
        mean = self.b.sum(x * x, -1, keepdims=True) / self.fp32(width)
        return self.b.op("Reciprocal", self.b.op("Sqrt", mean + self.eps))

    def cos_sin(self, positions: Value) -> tuple[Value, Value]:
        """Rows of the rope table at positions [B, X]: cos and sin, each [B, X, 1, r]."""
        inside = self.b.op("Min", positions, self.max_positions - 1)  # padding may lie past the table
        rows = self.b.op("Gather", self.b.squeeze(self.rope_table, 0), inside)  # [B, X, 2r]
        half = self.b.dim(self.rope_table, 2) // 2
        cos, sin = self.b.split(self.b.unsqueeze(rows, 2), [half, half], axis=3)
        return cos, sin

    def rope(self, x: Value, width: Value, cos_sin: tuple[Value, Value]) -> Value:
        """Rotate the leading dims of x [B, X, heads, width] in pairs (i, i + r)."""
        cos, sin = cos_sin
        half = self.b.dim(self.rope_table, 2) // 2
        left, right, rest = self.b.split(x, [half, half, width - half * 2], axis=3)
        return self.b.op("Concat", left * cos - right * sin, right * cos + left * sin, rest, axis=3)

    def rows_of(self, rows: Value, tokens: Value) -> Value:
        """Pool rows of tokens [B, X]; a token past the page table gets some legal row, which is never written."""
        return self.b.op("GatherElements", rows, self.b.op("Min", tokens, self.capacity - 1), axis=1)

    # The steps.

    def read_attributes(self) -> None:
        b = self.b
        self.q_heads = b.attribute("num_q_heads", int)
        self.kv_heads = b.attribute("num_kv_heads", int)
        self.head_size = b.attribute("head_size", int)
        self.index_heads = b.attribute("indexer_n_heads", int)
        self.index_dim = b.attribute("indexer_head_dim", int)
        self.budget = b.attribute("indexer_budget", int)
        self.ratio = b.attribute("indexer_compress_ratio", int)
        self.eps = b.attribute("rms_norm_eps", float)
        scale = b.attribute("attention_scale", float)
        usual = b.op("Reciprocal", b.op("Sqrt", self.fp32(self.head_size)))
        self.scale = b.op("Where", scale > 0.0, scale, usual)

    def find_mode(self) -> None:
        """Positions of this call's tokens. The length of `kvcache_start_index` selects the mode.

        In decode the tensors do not come apart into [batch, seq, ...] unless the start index has B elements and S is 1:
        a run-time error of some Reshape or Split.
        """
        b, start = self.b, self.b.dim(self.start_index, 0)
        decode = start > 0
        self.batch = b.op("Where", decode, start, b.dim(self.qkv, 0))
        self.seq = b.op("Where", decode, 1, b.dim(self.qkv, 1))
        context = b.reshape(self.int64(self.context_lengths), self.batch, 1)  # [B, 1]
        self.first = b.op("Where", decode, b.op("Max", context - 1, 0), 0)  # [B, 1] position of the call's first token
        self.end = b.op("Min", context, self.first + self.seq)  # [B, 1] length after this call
        self.position = self.first + b.arange(self.seq)  # [B, S]

    def find_pages(self) -> None:
        """Pool rows of every token of every sequence, and which tokens of this call are live.

        A sequence that does not fit its page table or the rope table, or with a live page id out of range, has none.
        """
        b = self.b
        self.max_positions = b.dim(self.rope_table, 1)
        pages, slots = b.dim(self.past, 1), b.dim(self.page_table, 2)  # N, M
        self.capacity = slots * PAGE_SIZE  # T
        table = self.int64(self.page_table)  # [B, 2, M]
        lowest = b.unsqueeze(b.op("Concat", 0, pages, axis=0), 1)  # [2, 1] of the K and of the V plane
        in_range = (table >= lowest) & (table < lowest + pages)
        used = b.arange(slots) * PAGE_SIZE < b.unsqueeze(self.end, 2)  # [B, 1, M]
        strays = b.sum(self.int64(used & ~in_range), 1, 2)
        in_pool = b.unsqueeze(strays, 1) <= 0  # [B, 1]
        self.fits = in_pool & (self.end <= b.op("Min", self.capacity, self.max_positions))  # [B, 1]
        self.live = (self.position < self.end) & self.fits  # [B, S]
        page_start = b.unsqueeze(b.op("Where", in_range, table, 0) * PAGE_SIZE, 3)
        rows = b.reshape(page_start + b.arange(PAGE_SIZE), 0, 2, -1)  # [B, 2, T]
        self.k_rows, self.v_rows = (b.reshape(x, 0, -1) for x in b.split(rows, [1, 1], axis=1))

    def split_projections(self) -> None:
        """Heads of the packed activations, in the surface dtype."""
        b = self.b
        heads = b.reshape(self.qkv, self.batch, self.seq, -1, self.head_size)
        self.raw_q, self.raw_k, self.raw_v = b.split(heads, [self.q_heads, self.kv_heads, self.kv_heads], axis=2)
        heads = b.reshape(self.index_qk, self.batch, self.seq, -1, self.index_dim)
        self.raw_index_q, self.raw_index_k = b.split(heads, [self.index_heads, 1], axis=2)
        self.here = self.cos_sin(self.position)

    def norm_main_heads(self) -> tuple[Value, Value]:
        """Contract step 1: q [B, S, Hq, D] and k [B, S, Hkv, D], normed and roped, rounded to the surface."""
        roped = []
        for raw, gamma in ((self.raw_q, self.q_gamma), (self.raw_k, self.k_gamma)):
            x = self.fp32(raw)
            normed = self.h(self.h(x * self.inverse_rms(x, self.head_size)) * self.fp32(gamma))
            roped.append(self.h(self.rope(normed, self.head_size, self.here)))
        return roped[0], roped[1]

    def norm_indexer_query(self) -> Value:
        """Contract step 2: indexer queries [B, S, Ih, Id], rounded once."""
        x = self.fp32(self.raw_index_q)
        normed = x * self.inverse_rms(x, self.index_dim) * (self.fp32(self.index_q_gamma) + 1.0)
        return self.h(self.rope(normed, self.index_dim, self.here))

    def pool_block_keys(self) -> Value:
        """Contract step 3: keys [B, C, Id] of the blocks that this call may complete.

        The raw keys of such a block come from this call's activations or, in decode, from the pool's K tails too.
        """
        b = self.b
        main, state = b.split(self.past, [self.head_size, self.index_dim], axis=4)
        self.past_main = b.reshape(main, -1, self.kv_heads, self.head_size)  # [2*N*P, Hkv, D]
        self.past_state = b.reshape(state, -1, self.index_dim)  # [2*N*P*Hkv, Id]: head 0 of a row is every Hkv-th
        count = (self.seq + self.ratio - 1) // self.ratio  # C
        self.block = self.first // self.ratio + b.arange(count)  # [B, C]
        token = b.reshape(b.unsqueeze(self.block * self.ratio, 2) + b.arange(self.ratio), 0, -1)  # [B, C*R]
        stored = b.op("Gather", self.past_state, self.rows_of(self.k_rows, token) * self.kv_heads)  # [B, C*R, Id]
        nth = b.op("Max", b.op("Min", token - self.first, self.seq - 1), 0)  # its number among this call's tokens
        fresh = b.op("GatherND", b.squeeze(self.raw_index_k, 2), b.unsqueeze(nth, 2), batch_dims=1)
        raw = b.op("Where", b.unsqueeze(token < self.first, 2), self.fp32(stored), self.fp32(fresh))
        # CumSum adds in token order; the order of ReduceSum is the runtime's choice.
        sums = b.op("CumSum", b.reshape(raw, self.batch, -1, self.ratio, self.index_dim), b.scalar(2))  # [B, C, R, Id]
        mean = self.h(b.op("Gather", sums, -1, axis=2) / self.fp32(self.ratio))  # [B, C, 1, Id]
        normed = mean * self.inverse_rms(mean, self.index_dim) * (self.fp32(self.index_k_gamma) + 1.0)
        roped = self.rope(normed, self.index_dim, self.cos_sin(self.block * self.ratio))
        return b.squeeze(self.surface(roped), 2)

    def write_pool(self, k: Value, block_keys: Value) -> tuple[Value, Value]:
        """Write keys, values and indexer state of live tokens; the halves of the new pool, shaped as the old ones."""
        b = self.b
        k_row, v_row = self.rows_of(self.k_rows, self.position), self.rows_of(self.v_rows, self.position)  # [B, S]
        k = self.surface(k)
        main = self.scatter(self.past_main, [(self.live, k_row, k), (self.live, v_row, self.raw_v)])

        incomplete = self.live & ((self.position // self.ratio + 1) * self.ratio > self.end)  # [B, S]
        complete = ((self.block + 1) * self.ratio <= self.end) & self.fits  # [B, C]
        first_row = self.rows_of(self.v_rows, self.block * self.ratio)  # [B, C]
        raw_k = b.squeeze(self.raw_index_k, 2)
        state = self.scatter(
            self.past_state,
            [(incomplete, k_row * self.kv_heads, raw_k), (complete, first_row * self.kv_heads, block_keys)],
        )

        rows = b.op("Concat", main, b.reshape(state, -1, self.kv_heads, self.index_dim), axis=2)  # [2*N*P, Hkv, D+Id]
        b.output(OUTPUTS[1].name, "Reshape", rows, b.op("Shape", self.past))
        return main, state

    def scatter(self, rows: Value, writes: list[tuple[Value, Value, Value]]) -> Value:
        """Write `updates` [B, X, ...] to the rows `targets` [B, X] where `chosen` [B, X]; the others are dropped."""
        b = self.b
        targets, updates = [], []
        for chosen, target, update in writes:
            where = b.op("Transpose", b.op("NonZero", chosen), perm=[1, 0])  # [L, 2]
            targets.append(b.op("GatherND", target, where))
            updates.append(b.op("GatherND", update, where))
        row_ids = b.op("Concat", *targets, axis=0)  # [L of all writes]
        return b.op("ScatterND", rows, b.unsqueeze(row_ids, 1), b.op("Concat", *updates, axis=0))

    def score_blocks(self, index_q: Value, state: Value) -> Value:
        """Contract step 4: scores [B, S, T/R], -1 for NaN and for blocks past the row, which have the highest ids."""
        b = self.b
        v_rows = b.reshape(self.v_rows, self.batch, -1, self.ratio)
        first_rows = b.op("Gather", v_rows, b.scalar(0), axis=2)  # [B, T/R]
        keys = self.fp32(b.op("Gather", state, first_rows * self.kv_heads))  # [B, T/R, Id]
        queries = b.reshape(index_q, self.batch, -1, self.index_dim)  # [B, S*Ih, Id]
        dots = b.op("MatMul", queries, b.op("Transpose", keys, perm=[0, 2, 1]))  # [B, S*Ih, T/R]
        positive = b.op("Where", dots <= 0.0, 0.0, dots)  # max(0, dot) that keeps NaN
        heads = b.reshape(positive, self.batch, self.seq, self.index_heads, -1)
        scores = b.sum(heads, 2) / b.op("Sqrt", self.fp32(self.index_dim))  # [B, S, T/R], 0 or more
        self.visible_blocks = b.unsqueeze((self.position + 1) // self.ratio, 2)  # [B, S, 1]
        self.visible = b.arange(self.capacity // self.ratio) < self.visible_blocks  # [B, S, T/R]
        return b.op("Where", self.visible & (scores >= 0.0), scores, -1.0)

    def select_tokens(self, scores: Value) -> Value:
        """Contract step 5 as a mask [B, S, T]: tokens of the best blocks (ties: the lower id) and the causal tail."""
        b = self.b
        count = b.op("Min", self.budget // self.ratio, self.capacity // self.ratio)
        best = b.top_k(scores, count)  # [B, S, budget/R]
        none, each = b.fill(False, b.op("Shape", scores)), b.fill(True, b.op("Shape", best))
        chosen = b.op("ScatterElements", none, best, each, axis=2) & self.visible  # [B, S, T/R]
        token = b.arange(self.capacity)  # [T]
        in_block = b.op("Gather", chosen, token // self.ratio, axis=2)
        in_tail = (token >= self.visible_blocks * self.ratio) & (token <= b.unsqueeze(self.position, 2))
        return in_block | in_tail

    def attend(self, q: Value, main: Value, selected: Value) -> None:
        """Contract step 6: softmax attention under the mask, exact zeros in padding rows."""
        b = self.b
        q = b.reshape(q, self.batch, self.seq, self.kv_heads, -1, self.head_size)
        q = b.op("Transpose", q, perm=[0, 2, 3, 1, 4])  # [B, Hkv, G, S, D]
        k = b.op("Transpose", self.fp32(b.op("Gather", main, self.k_rows)), perm=[0, 2, 3, 1])  # [B, Hkv, D, T]
        v = b.op("Transpose", self.fp32(b.op("Gather", main, self.v_rows)), perm=[0, 2, 1, 3])  # [B, Hkv, T, D]
        logits = b.op("MatMul", q, b.unsqueeze(k, 2)) * self.scale
        weights = b.op("Softmax", b.op("Where", b.unsqueeze(selected, 1, 2), logits, float("-inf")), axis=-1)
        # A weight of zero does not cancel a NaN or infinity of a token outside the list: take these out of the
        # product, and give NaN back to the rows whose lists do hold one.
        finite = b.op("Abs", v) < float("inf")
        values = b.op("MatMul", weights, b.unsqueeze(b.op("Where", finite, v, 0.0), 2))  # [B, Hkv, G, S, D]
        poison = b.op("MatMul", self.fp32(b.unsqueeze(selected, 1)), self.fp32(~finite))  # [B, Hkv, S, D]
        values = b.op("Where", b.unsqueeze(poison, 2) > 0.0, float("nan"), values)
        values = b.op("Transpose", values, perm=[0, 3, 1, 2, 4])  # [B, S, Hkv, G, D]
        out = b.reshape(values, self.batch, self.seq, self.q_heads, self.head_size)
        out = b.op("Where", b.unsqueeze(self.live, 2, 3), out, 0.0)
        b.output(OUTPUTS[0].name, "CastLike", out, self.qkv)
        if self.with_selection:
            b.output("selection", "And", selected, b.unsqueeze(self.live, 2))
