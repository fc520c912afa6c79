"""Why central trust over clients is refused: what Flower's secure aggregation does."""

import importlib

import pytest

pytest.importorskip("flwr")

import numpy as np
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

secaggplus_mod = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
COUNTS = np.array([0.0, 1.0, 8.0, 9.0, 300.0])


def test_counts_above_eight_come_back_wrong_by_default_and_exact_with_ranges_made_for_them():
    lossy = dequantize(quantize([COUNTS], 8.0, 1 << 22), 8.0, 1 << 22)[0]
    assert np.allclose(lossy, [0, 1, 8, 8, 8], atol=1e-5)
    exact = dequantize(quantize([COUNTS], float(1 << 21), 1 << 22), float(1 << 21), 1 << 22)[0]
    assert np.array_equal(exact, COUNTS)


def test_a_mask_of_32_bytes_is_one_of_a_seed_of_32_bits():
    seed = bytes(range(32))
    folded = np.frombuffer(seed, "<u4")
    short = np.bitwise_xor.reduce(folded).tobytes()  # all that a server has to try out
    shape = [(100,)]
    assert np.array_equal(pseudo_rand_gen(seed, 1 << 32, shape)[0], pseudo_rand_gen(short, 1 << 32, shape)[0])


def test_a_node_hands_out_shares_of_both_secrets_of_a_node_that_is_named_dead_and_alive():
    state = secaggplus_mod.SecAggPlusState()
    state.rd_seed_share_dict, state.sk1_share_dict, state.threshold = {7: b"own mask"}, {7: b"pair masks"}, 1
    asked = {"active_nids": [7], "dead_nids": [7]}
    names = {name: value for name, value in vars(secaggplus_mod.Key).items() if isinstance(value, str)}
    given = secaggplus_mod._unmask(
        state,
        {names["ACTIVE_NODE_ID_LIST"]: asked["active_nids"], names["DEAD_NODE_ID_LIST"]: asked["dead_nids"]},
    )
    assert given[names["SHARE_LIST"]] == [b"own mask", b"pair masks"]
