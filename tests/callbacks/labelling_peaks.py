"""A program that writes how much memory labelling takes, in tables; each case is a process of its own."""

import json
import sys
from pathlib import Path

import torch
from forked import in_child

from benchmarks.scale import CLASSES, peak_of_labelling, write
from pl_privknn.labelers import IndKNN, PrivateKNN, ReverseKNN
from pl_privknn.neighbors import search
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger

RECORDS, DIMENSIONS = 120_000, 640  # a table of 307 MB: all else that a process takes varies by some 50 MB


def private_knn():
    return PrivateKNN(15, 0.5, noise=Gaussian(2.0), noise_source=SeededNoise(3))


def reverse_knn():
    return ReverseKNN(1, 2.0)


def ind_knn():
    # Of features drawn from [0, 1), about one record of 100 is so near.
    return IndKNN(0.78, 0.3, budgets={"budget": 20.0}, num_queries=100, noise_source=SeededNoise(3))


#: A teacher, and the gigabytes from which its table is mapped.
CASES = {
    "in memory": (private_knn, None),
    "mapped": (private_knn, 0.1),
    "streamed": (reverse_knn, None),
    "Ind-KNN in memory": (ind_knn, None),
    "Ind-KNN mapped": (ind_knn, 0.1),
}


def main(folder):
    torch.set_num_threads(1)
    search._VALUES_CENTRED_AT_A_TIME = 1 << 18  # what a search holds beside the table would hide it here
    write(folder, RECORDS, DIMENSIONS, 40)
    warm = ind_knn()  # its machine code is loaded before the processes part
    warm.fit(torch.rand(9, 2), torch.arange(9) % CLASSES, CLASSES)
    warm.label(torch.rand(1, 2), FreeLedger())
    for name, (teacher, limit) in CASES.items():

        def job(name=name, teacher=teacher, limit=limit):
            peak, labels = peak_of_labelling(folder / name, folder, teacher(), 20, limit)
            (folder / f"{name}.json").write_text(json.dumps([peak / (4 * RECORDS * DIMENSIONS), labels]))

        assert in_child(job) == 0, name


if __name__ == "__main__":
    main(Path(sys.argv[1]))
