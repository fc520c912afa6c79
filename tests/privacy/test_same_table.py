"""A table is recognised by a digest under a secret key, and no other table is taken for it."""

import torch

from pl_privknn.privacy.private_state import PrivateStore, same_table, table_digest

ROWS, LABELS = torch.rand(7, 3), torch.arange(7)


def test_a_digest_is_of_all_values_in_their_order_however_they_are_cut():
    whole = table_digest([ROWS])
    assert table_digest(ROWS.split(2)) == whole
    assert table_digest([ROWS.T.contiguous().T]) == whole
    changed = ROWS.clone()
    changed[6, 2] += 1e-6
    others = [[ROWS.flip(0)], [changed], [ROWS[:6]], [ROWS.double()], [ROWS, LABELS], []]
    digests = [table_digest(other) for other in others]
    assert whole not in digests
    assert len(set(digests)) == len(digests)
    assert table_digest([ROWS], bytes(32)) != whole


def test_a_table_may_change_until_something_was_paid_for_it(tmp_path):
    path = tmp_path / "private.sqlite"
    store = PrivateStore(path)
    assert not same_table(store, "table", [ROWS], begun=True)  # nothing is noted
    assert same_table(store, "table", [ROWS.flip(0)], begun=False)
    assert same_table(store, "table", [ROWS], begun=False)
    store.close()
    store = PrivateStore(path)
    assert same_table(store, "table", ROWS.split(3), begun=True)
    assert not same_table(store, "table", [ROWS.flip(0)], begun=True)
    assert not same_table(store, "another table", [ROWS], begun=True)
    # Without the key, which differs for each table, the digest says nothing of a table that is guessed.
    same_table(store, "the same rows", [ROWS], begun=False)
    digests = [store.fact(name)["digest"] for name in ("table", "the same rows")]
    assert len({*digests, table_digest([ROWS])}) == 3
    store.close()
