"""Hundreds of inputs that nobody would write end in one line and exit 2, or in an ε that is not too small."""

import inspect
import json
import math
import random
import warnings

import pytest

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.cli import main
from pl_privknn.cli.common import user_error
from pl_privknn.config import ConfigurationError, instantiate
from pl_privknn.labelers import (
    PATE,
    IndKNN,
    NoisySGDTeacher,
    PreconditionedGradients,
    PrivateKNN,
    ReverseKNN,
    Screening,
)
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import Charge

KINDS = {
    "gaussian": {"sigma": 20.0, "l2_sensitivity": 1.0, "sampling_rate": 1.0},
    "laplace": {"scale": 20.0, "l1_sensitivity": 1.0, "sampling_rate": 1.0},
    "exponential_argmax": {"scale": 20.0, "votes": "swap", "sampling_rate": 1.0},
    "noisy_screening": {"k": 30, "threshold": 18, "sigma": 9.0, "num_classes": 10, "sampling_rate": 0.5},
    "pure_dp": {"epsilon": 0.1, "sampling_rate": 1.0},
    "randomized_response": {"flip_probability": 0.3, "num_values": 2, "differing": 1},
    "shuffle_amplification": {"local_epsilon": 1.0, "num_clients": 1000},
    "negative_binomial": {"shape": 20.0, "ratio": 0.5, "moved": 1},
    "gaussian_dp_stream": {"mu": 0.1},
    "conditional": {"inner": {"mechanism": "gaussian", "sigma": 20.0}, "condition": "it holds"},
}
ODD = [
    None, True, False, 0, -0.0, -1, 2, 1.5, 1e308, -1e308, 1e-308, 1e-301, 5e-324, 1e300, 1e-300, math.nan, math.inf,
    -math.inf, 10**30, -(10**30), 10**400, 2**53 + 1, "1", "", "nan", "ü\x00", "1e-5", "x" * 3000, "a\nb",
    [], {}, [1], {"a": 1}, [[[]]],
]  # fmt: skip
NUMBERS = [
    "0", "1", "2", "-1", "nan", "inf", "-inf", "1e-400", "1e400", "x", "", "1,5", "0x10", "-0.0", "1e-5", "1_0", "１",
    "0.5", "9" * 500,
]  # fmt: skip


def odd_record(rng):
    kind = rng.choice(list(KINDS))
    record = {"mechanism": kind, **KINDS[kind]}
    for _ in range(rng.choice([1, 1, 1, 2])):
        name = rng.choice([*KINDS[kind], "count", "guarantee", "reasons", "mechanism", "extra"])
        large = record.get(name, 1)
        if rng.random() < 0.6 and isinstance(large, int | float):
            record[name] = type(large)(large * 10 ** rng.randint(-2, 9))
        else:
            record[name] = rng.choice(ODD)
    if rng.random() < 0.1:
        del record[rng.choice(list(record))]
    return record


def sane_record(rng, kinds=("gaussian", "gaussian_dp_stream")):
    kind = rng.choice(kinds)
    scale = 10 ** rng.uniform(-1, 1)
    fields = {name: value * scale for name, value in KINDS[kind].items() if name != "sampling_rate"}
    first = next(iter(fields))
    return {"mechanism": kind, first: fields[first], "count": rng.choice([1, 7, 10**4])}


def odd_document(rng):
    """Text: a document of any kind, with something changed in it."""
    records = [sane_record(rng) for _ in range(rng.randint(0, 3))]
    knn = {"class_path": "PrivateKNN", "init_args": {"k": 30, "sampling_rate": 0.5}}
    config = {"labeling": {"labeler": knn, "rounds": 1}, "data": {"class_path": "DigitsDataModule"}}
    kinds = [{"releases": records, "delta": 1e-5}, {"records": records, "adjacency": "add_remove"}]
    document = rng.choice([records, *kinds, config])
    for _ in range(rng.randint(0, 2)):
        document = with_odd_value(rng, document)
    text = json.dumps(document) if rng.random() < 0.8 else json.dumps(document, indent=1).replace('"', "")
    for _ in range(rng.choice([0, 0, 1, 3])):
        place, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        part = rng.choice([text[place : min(end, place + 40)], rng.choice("[]{}&*!:,'\"\x00\t- ")])
        text = rng.choice([text[:place] + text[end:], text[:end] + part + text[end:]])
    return rng.choice(["", "", "", "\ufeff", "# ", "---\n", "&a ", "[" * 3000]) + text


def with_odd_value(rng, document):
    """A copy in which one value, at any depth, is another."""
    if rng.random() < 0.15 or not isinstance(document, list | dict) or not document:
        return rng.choice(ODD)
    if isinstance(document, list):
        place = rng.randrange(len(document))
        return [with_odd_value(rng, item) if i == place else item for i, item in enumerate(document)]
    name = rng.choice(list(document))
    if rng.random() < 0.2:
        keys = ["class_path", "init_args", "releases", "records", "labeling", "ü", "a.b"]
        return {**document, rng.choice(keys): rng.choice(ODD)}
    return {**document, name: with_odd_value(rng, document[name])}


def odd_words(rng, path):
    """A command line with one or two values exchanged."""
    plan = ["plan", "run.yaml", "--epsilon", "1", "--num-classes", "3"]
    words = rng.choice(
        [
            ["epsilon", path, "--delta", "1e-5", "--json", "--fast"],
            ["epsilon", path, path, "--delta", "1e-5", "--json", "--adjacency", "add_remove", "--num-classes", "3"],
            ["audit", path, "--delta", "1e-5"],
            ["audit", path, "--head", "00", "--export", "/nowhere/file"],
            [*plan, "--json"],
            [*plan, "--find", "labeling.queries_per_round", "--low", "1", "--high", "99", "--json"],
            [*plan, "--set", "labeling.rounds=2", "--set", "labeling.budget.delta=1e-6"],
            [*plan, "--tie", "labeling.labeler.init_args.screening.noise.sigma=2", "--low", "1e-1"],
            ["compare", path, "--output", "/nowhere", "--set", "a.b=1", "--seeds", "1", "--dry-run"],
            ["compare", "--render", path],
            ["epsilon"], ["plan"], ["audit"], ["bogus", path], ["--bogus"], [path],
        ]
    )  # fmt: skip
    for _ in range(rng.choice([1, 1, 2])):
        place = rng.randrange(len(words))
        change = rng.random()
        if change < 0.7 and place:
            words[place] = rng.choice([*NUMBERS, "/", "/dev/null", "/nowhere", "--json", "--delta", "ü"])
        elif change < 0.85:
            del words[place]
        else:
            words.insert(place, rng.choice(NUMBERS))
        words = words or ["--"]
    return words


def run(words, capsys):
    """The exit status and what was printed; fails on an exception and on a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            status = main(words)
        except SystemExit as stopped:
            status = stopped.code or 0
        except BaseException as error:
            raise AssertionError(f"{words}: {type(error).__name__}: {error}") from error
    printed = capsys.readouterr()
    assert status in (0, 1, 2), words
    if status == 2:
        assert printed.err.startswith("privknn"), words
        assert printed.err.count("\n") == 1, (words, printed.err)
        assert len(printed.err) < 2000, words
    else:
        assert not printed.err or printed.err.startswith("Next: privknn "), words
    return status, printed.out


def check_epsilon(out, what):
    epsilon = json.loads(out)["epsilon"]
    assert isinstance(epsilon, int | float), what
    assert epsilon >= 0, what  # false for NaN
    return epsilon


def test_records(tmp_path, capsys):
    rng, path, accepted = random.Random(1), tmp_path / "records.json", 0
    for _ in range(100):
        records = [odd_record(rng)]
        path.write_text(json.dumps(records))
        status, out = run(["epsilon", str(path), "--delta", "1e-5", "--json", "--fast"], capsys)
        if status == 0:
            check_epsilon(out, records)
            accepted += 1
    assert 8 < accepted < 70


def test_a_list_costs_at_least_its_dearest_record(tmp_path, capsys):
    rng, path, known = random.Random(2), tmp_path / "records.json", {}
    for number in range(30):
        # Gaussian releases compose in closed form; a few lists go through the grids.
        kinds = ("gaussian", "laplace", "pure_dp") if number < 6 else ("gaussian", "gaussian_dp_stream")
        records = [sane_record(rng, kinds) for _ in range(rng.randint(2, 4))]
        path.write_text(json.dumps(records))
        status, out = run(["epsilon", str(path), "--delta", "1e-5", "--json", "--fast"], capsys)
        assert status == 0
        for record in records:
            key = json.dumps(record)
            if key not in known:
                known[key] = account([Charge.from_record(record)], delta=1e-5, exact=False).epsilon
            # Two upper bounds, on two grids.
            assert check_epsilon(out, records) >= known[key] * (1 - 1e-3)


def test_documents(tmp_path, capsys):
    rng, statuses = random.Random(3), []
    for number in range(200):
        path = tmp_path / f"document{number % 2}.{rng.choice(['json', 'yaml'])}"
        path.write_bytes(odd_document(rng).encode("utf-8", "surrogatepass"))
        words = ["epsilon", str(path), "--json", "--fast", *rng.choice([[], ["--delta", "1e-5"]])]
        status, out = run(words, capsys)
        if status == 0:
            check_epsilon(out, path.read_text())
        statuses.append(status)
    assert statuses.count(0) > 5
    assert statuses.count(2) > 60


def test_command_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "records.json"
    path.write_text(json.dumps([{"mechanism": "gaussian", "sigma": 20.0}]))
    (tmp_path / "run.yaml").write_text(
        "labeling: {queries_per_round: 9, labeler: {class_path: PrivateKNN, init_args: {k: 30, sampling_rate: 1.0, "
        "screening: {threshold: 18, sigma: 40}, noise: {class_path: Gaussian, init_args: {sigma: 20}}}}}"
    )
    rng = random.Random(4)
    for _ in range(150):
        words = odd_words(rng, str(path))
        status, out = run(words, capsys)
        if status == 0 and "--json" in words and words[0] in ("epsilon", "plan"):
            check_epsilon(out, words)


def told_or_made(make, *arguments):
    """An error must be one that the command line tells in a line."""
    try:
        make(*arguments)
    except Exception as error:
        if user_error(error) is None:
            pytest.fail(f"{make}: {type(error).__name__}: {error}")


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (PrivateKNN, {"k": 30, "sampling_rate": 0.5}),
        (Screening, {"threshold": 10, "noise": {"sigma": 5}}),
        (ReverseKNN, {"k": 1, "budget": {"epsilon": 1.0}}),
        (IndKNN, {"budget": {"epsilon": 2.0}, "num_queries": 100, "threshold": 0.1, "noise": {"sigma": 0.6}}),
        (NoisySGDTeacher, {"sampling_rate": 0.2, "expected_batch_size": 20, "noise_multiplier": 2.0}),
        (PreconditionedGradients, {"noise_multiplier": 2.0, "releases": 3}),
        (PATE, {"num_teachers": 10}),
        (PrivateLabeler, {}),
    ],
)
def test_arguments(make, given):
    rng, lines = random.Random(5), []
    instantiate({"it": given}, {"it": make})  # what is given is right
    for name in inspect.signature(make).parameters:
        for value in rng.sample(ODD, 8):
            try:
                made = instantiate({"it": {**given, name: value}}, {"it": make}).it
            except ConfigurationError as error:
                lines.append(str(error))
                continue
            if hasattr(made, "plan") and hasattr(made, "adjacencies"):
                told_or_made(made.plan, 20, 10, 3)
    assert len(lines) > 6
    assert not any("\n" in line for line in lines)
