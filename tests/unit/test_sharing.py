"""Which decoding sequences share blocks, decided on the host before a GPU step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.attention import sharing
from kvboost.attention.sharing import MAX_GROUPS, shared_pieces


@pytest.fixture(autouse=True)
def little_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "LEAST_SAVED_TOKENS", 32)


def pieces(*tables: list[int], before: list[int] | None = None) -> list[tuple[int, int, int]]:
    rows = [np.array(table, dtype=np.int32) for table in tables]
    return shared_pieces(rows, before or [len(table) - 1 for table in tables], 16)


def test_pieces_cover_all_rows_in_order() -> None:
    assert pieces([1, 2, 3], [1, 2, 4], [9, 8], [7, 6, 5], [7, 6, 4]) == [(0, 2, 2), (2, 3, 0), (3, 5, 2)]
    assert pieces([9, 8], [1, 2, 3], [1, 2, 4], [5, 6]) == [(0, 1, 0), (1, 3, 2), (3, 4, 0)]


def test_a_group_shares_what_all_of_it_share() -> None:
    assert pieces([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]) == [(0, 3, 2)]


def test_the_block_of_the_token_that_is_decoded_is_not_shared() -> None:
    """Forks of one sequence have the same last block until one of them writes."""
    assert pieces([1, 2, 3], [1, 2, 3], [1, 2, 3]) == [(0, 3, 2)]
    assert pieces([1, 2, 3], [1, 2, 3], before=[1, 0]) == []


def test_what_does_not_pay_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pieces([1, 2], [3, 4]) == [] and pieces() == [] and pieces([1, 2, 3]) == []
    monkeypatch.setattr(sharing, "LEAST_SAVED_TOKENS", 33)
    assert pieces([1, 2, 3], [1, 2, 4]) == []


def test_only_the_groups_that_save_most_are_kept() -> None:
    tables = [[10 * g, *range(10 * g + 1, 10 * g + 2 + g % 7), 1000 + 2 * g + m] for g in range(1, 60) for m in (0, 1)]
    found = pieces(*tables)
    assert len(found) < MAX_GROUPS and found[0][0] == 0 and found[-1][1] == len(tables)
    assert min(blocks for *_, blocks in found if blocks) >= 7


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 6)), max_size=30))
def test_every_piece_is_shared_in_truth(given: list[tuple[int, int, int]]) -> None:
    """Families of tables with the first blocks of their family, then their own."""
    tables, before = [], []
    for i, (family, common, own) in enumerate(sorted(given)):
        table = [100 * family + 1 + b for b in range(common)] + [10_000 + 10 * i + o for o in range(own + 1)]
        tables.append(np.array(table, dtype=np.int32))
        before.append(len(table) - 1)
    found = shared_pieces(tables, before, 16)
    assert [p[0] for p in found] + ([len(tables)] if found else []) == ([0] if found else []) + [p[1] for p in found]
    for first, end, blocks in found:
        for row in range(first, end):
            assert blocks <= before[row] and (tables[row][:blocks] == tables[first][:blocks]).all()
