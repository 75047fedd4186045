"""What the columns of the Hopper decode kernel's tiles are: the query heads of its KV heads, and
where rows verify drafts, of each of a row's queries.

Column ((h * QUERIES) + i) * GROUP + g is query head g of the tile's KV head h, and query i of its
row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def of_heads(o_q, GROUP: gl.constexpr, QUERIES: gl.constexpr):
    """Which of a tile's query heads a column is, and which query of its row."""
    if QUERIES == 1:
        return o_q, gl.zeros_like(o_q)
    return o_q // (GROUP * QUERIES) * GROUP + o_q % GROUP, o_q // GROUP % QUERIES


@gluon.jit
def query_pointers(
    q, i_head, q_token_stride, q_head_stride, HEADS: gl.constexpr, GROUP: gl.constexpr,
    QUERIES: gl.constexpr, Q: gl.constexpr, D: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """Where the columns' queries lie behind a row's first token [Q, D], each one's place in its
    row, and which columns are any."""
    o_q = gl.arange(0, Q, layout=gl.SliceLayout(1, ROW))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, ROW))
    o_head, o_query = of_heads(o_q, GROUP, QUERIES)
    o_at = (i_head * GROUP + o_head) * q_head_stride + o_query * q_token_stride
    return q + o_at[:, None] + o_d[None, :], o_query, o_q < HEADS * GROUP * QUERIES


@gluon.jit
def of_row(starts, row, token, m_q, m_load, o_query, o_load, QUERIES: gl.constexpr):
    """Of the queries that a tile has columns for, which this row has, as results and as they are
    loaded; and how many positions each sees less than the last."""
    if QUERIES == 1:
        return m_q, m_load, o_query
    num_queries = gl.load(starts + row + 1) - token.to(gl.int32)
    o_back = gl.maximum(num_queries - 1 - o_query, 0)
    return m_q & (o_query < num_queries), m_load & (o_load < num_queries), o_back


@gluon.jit
def causal(m_own, o_position, seen, o_back, QUERIES: gl.constexpr):
    """What each column sees of a tile: its own head's positions, `o_back` fewer than `seen`."""
    if QUERIES == 1:
        return m_own & (o_position < seen)[:, None]
    return m_own & (o_position[:, None] < (seen - o_back)[None, :])
