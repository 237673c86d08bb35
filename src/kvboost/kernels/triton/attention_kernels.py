# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Device code of paged attention: one kernel that attends a tile of queries, and one that merges splits of the keys.

A tile holds the rows (token, query head) of one KV head: `BLOCK_M // HEADS` consecutive tokens of one sequence, and for
each the `HEADS` query heads that share the KV head, so that a key is read once for all of them. A token being decoded
is a tile with one token. Scores are kept in units of log2(e), because the hardware computes powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvboost.kernels.triton.early import fetch_ahead, wait_for_kernel_before

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_rows(pointers, inside, columns, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Rows `[N, BLOCK]` of which DIM columns exist; rows that are not `inside` read as zeros."""
    if MASKED or BLOCK != DIM:
        mask = (columns < DIM)[None, :]
        if MASKED:
            mask = mask & inside[:, None]
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _accumulate(
    q, acc, peak, total, row_position, row_slope, keys, values, table, begin, end, window, scale, cap,
    key_block_stride, key_token_stride, value_block_stride, value_token_stride,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax of a tile over the keys `[begin, end)`. Not MASKED: all of them exist and every row sees them."""
    columns = tl.arange(0, BLOCK_D)
    columns_v = tl.arange(0, BLOCK_DV)
    for start in range(begin, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        inside = position < end
        if MASKED:
            block = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
        else:
            block = tl.load(table + position // PAGE).to(tl.int64)
        key_rows = block * key_block_stride + (position % PAGE) * key_token_stride
        k = _load_rows(keys + key_rows[:, None] + columns[None, :], inside, columns, DIM, BLOCK_D, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if CAPPED:  # cap * tanh(x); `scale` holds the factor two of exp(2x) and 1 / cap
            scores = cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
        if SLOPED:
            scores += row_slope[:, None] * (position[None, :] - row_position[:, None]).to(tl.float32)
        if MASKED:
            seen = (position[None, :] <= row_position[:, None]) & inside[None, :]
            if WINDOWED:
                seen = seen & (position[None, :] > row_position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet: -inf minus -inf is not a number.
        safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
        weights = tl.exp2(scores - safe_peak[:, None])
        shrink = tl.exp2(peak - safe_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        value_rows = block * value_block_stride + (position % PAGE) * value_token_stride
        v = _load_rows(values + value_rows[:, None] + columns_v[None, :], inside, columns_v, DIM_V, BLOCK_DV, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _fetch_rows(
    rows, table, begin, end, block_stride, token_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Have the first tile of the keys `[begin, end)`, or of their values, brought near while the kernel before runs: 0.6 us of
    the 6.9 that attention to 1k keys takes in a layer of Qwen2.5-32B."""
    position = begin + tl.arange(0, BLOCK_N)
    inside = position < end
    block = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
    row = rows + block * block_stride + (position % PAGE) * token_stride
    LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth
    column = tl.arange(0, BLOCK // LINE if BLOCK > LINE else 1) * LINE
    fetch_ahead(row[:, None] + column[None, :], inside[:, None] & (column < DIM)[None, :])


@triton.jit
def _sequence_of(tile, query_start, num_seqs, TOKENS: tl.constexpr):
    """The sequence a tile belongs to. Sequence s owns the tiles from `query_start[s] // TOKENS + s` on: enough for its
    tokens wherever they begin, and known without a table."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_seqs", "decode_seqs", "splits", "first_split", "all_splits", "window"])
def attention_kernel(
    query, keys, values, out, partial, partial_lse,
    positions, query_start, tables, table_start, kv_begin, kv_len, sinks, slopes,
    num_seqs, decode_seqs, splits, first_split, all_splits, window, scale, cap, num_heads,
    query_token_stride, query_head_stride, out_token_stride, out_head_stride,
    key_block_stride, key_token_stride, key_head_stride, value_block_stride, value_token_stride, value_head_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr,
    DECODE: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid `(sequences, KV heads x head tiles, splits)` with DECODE, else `(tiles, KV heads x head tiles, splits)`.

    With DECODE it serves the leading sequences of one token, without it all others. SPLIT: keys are shared out among
    `splits` programs, which leave normalised results and their log2-sum-exp2 for `merge_kernel`, as number `first_split` and
    on of `all_splits`. kv_begin: where the keys of a sequence begin, or None for 0.
    """
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    if DECODE:
        seq = tl.program_id(0)
        first = 0
    else:
        tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tokens see the most keys: begin with them
        seq = _sequence_of(tile, query_start, num_seqs, TOKENS)
        first = (tile - tl.load(query_start + seq) // TOKENS - seq) * TOKENS
    row_begin = tl.load(query_start + seq)
    count = tl.load(query_start + seq + 1) - row_begin
    single = (row_begin == seq) & (count == 1) & (seq < decode_seqs)
    length = tl.load(kv_len + seq)
    low = tl.load(positions + row_begin + first, mask=first < count, other=0).to(tl.int32)
    high = tl.load(positions + row_begin + tl.minimum(first + TOKENS, count) - 1, mask=first < count, other=0).to(
        tl.int32
    )
    table = tables + tl.load(table_start + seq)
    split = tl.program_id(2)
    kv_head = tl.program_id(1) // tl.cdiv(GROUP, HEADS)
    keys += kv_head.to(tl.int64) * key_head_stride
    values += kv_head.to(tl.int64) * value_head_stride
    begin = 0
    if kv_begin is not None:
        begin = tl.load(kv_begin + seq)
    if WINDOWED:
        begin = tl.maximum(begin, low - window + 1)
    end = tl.minimum(high + 1, length)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), splits), BLOCK_N) * BLOCK_N
        begin = begin + split * share
        end = tl.minimum(end, begin + share)
    # Who stands where was on the device before the step; queries and the newest keys and values come from the kernel before.
    # Programs without rows wait, too: who comes after them relies on their having waited.
    if EARLY and DECODE:
        _fetch_rows(keys, table, begin, end, key_block_stride, key_token_stride, DIM, BLOCK_D, BLOCK_N, PAGE)
        _fetch_rows(values, table, begin, end, value_block_stride, value_token_stride, DIM_V, BLOCK_DV, BLOCK_N, PAGE)
    wait_for_kernel_before(EARLY)
    if DECODE:
        if not single:
            return
    else:
        if (first >= count) | single:
            return

    head_begin = tl.program_id(1) % tl.cdiv(GROUP, HEADS) * HEADS
    row = tl.arange(0, BLOCK_M)
    token = first + row // HEADS
    head_of_group = head_begin + row % HEADS
    valid = (row < TOKENS * HEADS) & (token < count) & (head_of_group < GROUP)
    token = (row_begin + token).to(tl.int64)
    head = kv_head * GROUP + head_of_group

    if SPLIT:
        entry = (token * num_heads + head) * all_splits + first_split + split
        if (begin >= end) & (split > 0):
            tl.store(partial_lse + entry, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=valid)
            return

    columns = tl.arange(0, BLOCK_D)
    columns_v = tl.arange(0, BLOCK_DV)
    q_rows = query + token * query_token_stride + head * query_head_stride
    q = _load_rows(q_rows[:, None] + columns[None, :], valid, columns, DIM, BLOCK_D, True)
    row_position = tl.load(positions + token, mask=valid, other=-1).to(tl.int32)
    row_slope = row_position
    if slopes is not None:
        row_slope = tl.load(slopes + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:  # a logit that takes part in the softmax and has no value: the first split counts it
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        if first_split + split == 0:
            peak = sink
            total = total + 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    masked_from = begin
    # A second loop, without masks, is worth its instructions where a program sees many keys.
    if not (WINDOWED or (DECODE and SPLIT)):
        masked_from = begin + tl.maximum(tl.minimum(low + 1, end) - begin, 0) // BLOCK_N * BLOCK_N
        acc, peak, total = _accumulate(
            q, acc, peak, total, row_position, row_slope, keys, values, table, begin, masked_from, window, scale, cap,
            key_block_stride, key_token_stride, value_block_stride, value_token_stride,
            DIM, DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE, False, False, CAPPED, slopes is not None, PRECISION,
        )  # fmt: skip
    acc, peak, total = _accumulate(
        q, acc, peak, total, row_position, row_slope, keys, values, table, masked_from, end, window, scale, cap,
        key_block_stride, key_token_stride, value_block_stride, value_token_stride,
        DIM, DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE, True, WINDOWED, CAPPED, slopes is not None, PRECISION,
    )  # fmt: skip

    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    store = valid[:, None] & (columns_v < DIM_V)[None, :]
    if SPLIT:
        lse = tl.where(total > 0.0, peak + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(partial_lse + entry, lse, mask=valid)
        tl.store(partial + entry[:, None] * DIM_V + columns_v[None, :], result, mask=store)
    else:
        out_rows = out + token * out_token_stride + head * out_head_stride
        tl.store(out_rows[:, None] + columns_v[None, :], result.to(out.dtype.element_ty), mask=store)


@triton.jit(do_not_specialize=["num_seqs", "decode_seqs", "splits"])
def merge_kernel(
    out, partial, partial_lse, query_start, num_seqs, decode_seqs, splits, out_token_stride, out_head_stride,
    DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SPLITS: tl.constexpr, DECODE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid `(rows, query heads)`: the mean of the splits of one row, weighted by what each has seen."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    leading = row < decode_seqs
    single = tl.load(query_start + row, mask=leading, other=-1) == row
    single = single & (tl.load(query_start + row + 1, mask=leading, other=-1) == row + 1)
    rows = tl.load(query_start + num_seqs)
    wait_for_kernel_before(EARLY)
    if DECODE:
        if not single:
            return
    else:
        if single | (row >= rows):
            return
    entry = (row.to(tl.int64) * tl.num_programs(1) + head) * splits
    split = tl.arange(0, BLOCK_SPLITS)
    columns = tl.arange(0, BLOCK_DV)
    # Both are read at once, and so is what a split without keys did not write: it may be anything, and is left out.
    lse = tl.load(partial_lse + entry + split, mask=split < splits, other=float("-inf"))
    inside = (split < splits)[:, None] & (columns < DIM_V)[None, :]
    part = tl.load(partial + (entry + split)[:, None] * DIM_V + columns[None, :], mask=inside, other=0.0)
    peak = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    part = tl.where((lse > float("-inf"))[:, None], part, 0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(part * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    target = out + row.to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(target + columns, result.to(out.dtype.element_ty), mask=columns < DIM_V)
