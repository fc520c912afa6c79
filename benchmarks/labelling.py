"""Cost of labelling against the bare matrix product of the same size, same threads, same run.

Labelling is everything between features and answers: search, selection, exact order, coins and votes for
screening and again for aggregation, and the noise. Product and labelling take turns, and the ratio is the median
of the pairs, so that a machine whose speed drifts does not favour one of them. The first labelling, which
compiles, is left out of the times and gives the peak memory (above what is in memory with the features).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.record import Measured
from pl_privknn.neighbors import PoissonNeighbors
from pl_privknn.privacy.mechanisms import Gaussian, NoisyScreening
from pl_privknn.privacy.noise import SystemNoise

CLASSES = 10


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """The ratio, and what it is of."""
    torch.set_num_threads(options.threads)
    table, labels, queries = (
        _fashion_mnist(options) if options.data == "fashion_mnist" else _synthetic(options)
    )
    resident = _resident_bytes()
    neighbors, answer = _labelling(table, labels, options)

    def label() -> Tensor:
        return answer(queries)

    def search() -> object:
        return neighbors.rank(queries)

    left, right = queries.to(options.device), table.to(options.device).T

    def product() -> Tensor:
        made = left @ right
        if made.is_cuda:
            torch.cuda.synchronize(made.device)
        return made

    started = time.perf_counter()
    label()
    first = time.perf_counter() - started
    peak = max(0, _peak_bytes() - resident)
    product()
    products, labellings, searches = [], [], []
    for _ in range(options.repeat):
        products.append(_timed(product))
        labellings.append(_timed(label))
        searches.append(_timed(search))
    ratios = [ours[0] / bare[0] for ours, bare in zip(labellings, products, strict=True)]
    work = [ours[1] / bare[1] for ours, bare in zip(labellings, products, strict=True)]
    result = {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "ratio_of_processor_seconds": round(statistics.median(work), 3),
        "product_seconds": round(statistics.median(seconds for seconds, _ in products), 4),
        "labelling_seconds": round(statistics.median(seconds for seconds, _ in labellings), 4),
        "search_seconds": round(statistics.median(seconds for seconds, _ in searches), 4),
        "milliseconds_per_query": round(
            1000 * statistics.median(seconds for seconds, _ in labellings) / len(queries), 4
        ),
        "first_labelling_seconds": round(first, 3),
        "queries_per_second": round(
            len(queries) / statistics.median(seconds for seconds, _ in labellings), 1
        ),
        "features_mb": round(table.nbytes / 1e6),
        "peak_mb_beside_features": round(peak / 1e6),
    }
    shape = {"queries": len(queries), "records": len(table), "dimensions": table.shape[1]}
    kept = ("data", "k", "sampling_rate", "threads", "repeat", "device")
    yield Measured(result, seeds=[0], settings={**{name: getattr(options, name) for name in kept}, **shape})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--data", choices=("synthetic", "fashion_mnist"), default="synthetic")
    parser.add_argument("--root", default="data", help="where Fashion-MNIST is looked for")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--dimensions", type=int, default=1296, help="of synthetic features")
    parser.add_argument("--k", type=int, default=300)
    parser.add_argument("--sampling-rate", type=float, default=0.15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="where products run, for instance cuda")
    parser.add_argument("--repeat", type=int, default=5)


def _labelling(
    table: Tensor, labels: Tensor, options: argparse.Namespace
) -> tuple[PoissonNeighbors, Callable[[Tensor], Tensor]]:
    """The neighbours, and a function that answers queries as the Private-kNN labeler does."""
    k, rate = options.k, options.sampling_rate
    neighbors = PoissonNeighbors(table, labels, CLASSES, k, rate, device=options.device)
    screening = NoisyScreening(k, 0.6 * k, 0.25 * k, CLASSES, sampling_rate=rate)
    noise = Gaussian(sigma=k / 12, l2_sensitivity=2**0.5, sampling_rate=rate)
    source = SystemNoise()

    def answer(queries: Tensor) -> Tensor:
        ranked = neighbors.rank(queries)
        passed = screening.passes(neighbors.votes(ranked, source.bernoulli).max(dim=1).values, source)
        # Votes are counted for all queries again, as if every one had passed.
        votes = neighbors.votes(ranked, source.bernoulli)
        answers = noise.add_noise(votes, source).argmax(dim=1)
        return torch.where(passed, answers, -1)

    return neighbors, answer


def _synthetic(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Clusters on the positive side, a little like histograms; a class each."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand((CLASSES, options.dimensions), generator=generator) * 0.2
    labels = torch.randint(CLASSES, (options.records + options.queries,), generator=generator)
    features = torch.randn((len(labels), options.dimensions), generator=generator)
    features = features.mul_(0.1).add_(centres[labels]).clamp_(min=0)
    return features[: options.records], labels[: options.records], features[options.records :]


def _fashion_mnist(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """HOG features of Fashion-MNIST: the private training images and the first public ones."""
    from pl_privknn.datamodules import FashionMNISTDataModule
    from pl_privknn.features import HOG

    data = FashionMNISTDataModule(root=options.root)
    data.setup("fit")
    extractor = HOG()
    loader = torch.utils.data.DataLoader(data.private, batch_size=4096)
    parts = [(extractor(images), labels) for images, labels in loader]
    table, labels = torch.cat([part for part, _ in parts]), torch.cat([label for _, label in parts])
    queries = extractor(data.public.images(torch.arange(options.queries)))
    return table[: options.records], labels[: options.records], queries


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock and seconds of processor time, all threads together."""
    started, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - busy


def _resident_bytes() -> int:
    """Memory in use now; where the system does not tell, the peak so far, which shows too small a growth."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return _peak_bytes()
    return pages * resource.getpagesize()


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
