"""The script that recomputes the ε of a run's ledger without this package, on runs of the methods of the README."""

import json
import runpy
from pathlib import Path

import pytest

from pl_privknn.labelers import PATE, PreconditionedGradients, PrivateKNN, ReverseKNN, Screening
from pl_privknn.privacy import Budget, Charge, Conditional, Gaussian, Laplace, NoisyScreening, account
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import GaussianDPStream, NegativeBinomial, PureDP
from tests.setup.small_fit import fit_student
from tests.training.training_setup import Lit, fit, training

SCRIPT = Path(__file__).parents[3] / "examples" / "recompute_epsilon.py"
TEACHERS = {
    "screened votes of a sample": lambda: PrivateKNN(
        k=90, sampling_rate=0.8, screening=Screening(threshold=36, noise=Gaussian(25)), noise=Gaussian(14)
    ),
    "votes": lambda: PrivateKNN(k=30, noise=Gaussian(10)),
    "reverse kNN": lambda: ReverseKNN(budget=Budget(1.0, 1e-4)),
    "votes of partitions": lambda: PATE(num_teachers=10, noise=Gaussian(4.0)),
    "sums of gradients": lambda: PreconditionedGradients(budget=Budget(1.0, 1e-4)),
}


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def recomputed(script, capsys):
    def recomputed(path):
        """ε that the script prints, and its exit status."""
        status = script["main"](path)
        (line,) = (one for one in capsys.readouterr().out.splitlines() if one.startswith("recomputed"))
        return float(line.split()[3]), status

    return recomputed


def test_the_script_does_not_import_this_package():
    text = SCRIPT.read_text()
    assert "import pl_privknn" not in text
    assert "from pl_privknn" not in text
    assert len(text.splitlines()) <= 100


@pytest.mark.parametrize("name", TEACHERS)
def test_runs_of_teachers(name, tmp_path, recomputed):
    options = {"queries_per_round": 40, "rounds": 2, "delta": 1e-4} if "votes" in name else {"delta": 1e-4}
    labeling, _ = fit_student(tmp_path, TEACHERS[name](), noise=0.1, **options)
    summary = tmp_path / "run" / "summary.json"
    stated = labeling.report(exact=True).epsilon
    epsilon, status = recomputed(tmp_path / "run")
    assert stated <= epsilon <= 1.05 * stated
    assert (summary.is_file(), status) == (True, 0)
    assert json.loads(summary.read_text())["epsilon"] == pytest.approx(stated)
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "epsilon": 0.85 * stated}))
    assert recomputed(tmp_path / "run") == (epsilon, 1)


def test_a_run_of_noisy_steps(tmp_path, recomputed):
    callback, _ = fit(Lit(), tmp_path, training(noise_multiplier=2.0), epochs=2)
    epsilon, _ = recomputed(tmp_path / "run.sqlite")
    assert callback.epsilon <= epsilon <= 1.001 * callback.epsilon


def ledger(folder, *runs, **budget):
    """A ledger in which each run has planned and charged some releases."""
    made = Ledger(folder / "run.sqlite", Budget(**budget))
    for name, (planned, charged) in enumerate(runs):
        run = made.run(str(name), plan=planned)
        for charge in charged:
            run.charge(charge.mechanism, charge.count)
    report = made.report(exact=True)
    made.close()
    return made.path, report


def test_the_larger_of_planned_and_charged_counts_for_each_run(tmp_path, recomputed):
    sigma, laplace = Gaussian(8.0), Laplace(20.0)
    path, report = ledger(
        tmp_path,
        ([Charge(sigma, 3)], [Charge(sigma, 5), Charge(laplace)]),
        ([Charge(sigma, 7), Charge(Conditional(laplace, "a condition"), 2)], [Charge(sigma, 1)]),
        delta=1e-5,
    )
    counted = account([Charge(sigma, 12), Charge(laplace, 3)], delta=1e-5).epsilon
    assert report.epsilon == pytest.approx(counted, rel=1e-4)
    epsilon, status = recomputed(path)
    assert report.epsilon <= epsilon <= 1.001 * report.epsilon
    assert status == 0


SCREENINGS = Charge(NoisyScreening(k=300, threshold=180, sigma=75, num_classes=10, sampling_rate=0.15), 2000)


@pytest.mark.parametrize(
    "charge",
    [
        Charge(GaussianDPStream(0.4)),
        Charge(PureDP(0.1), 30),
        Charge(Laplace(2.0, sampling_rate=0.3), 20),
        SCREENINGS,
        Charge(NoisyScreening(k=30, threshold=18, sigma=8.0, num_classes=10), 20),
    ],
    ids=lambda charge: charge.mechanism.kind,
)
def test_each_release_has_the_epsilon_of_its_privacy_loss_distribution(charge, tmp_path, recomputed):
    path, report = ledger(tmp_path, ([charge], []), delta=1e-5)
    epsilon, _ = recomputed(path)
    by_pld = report.guarantee.epsilon_pld
    assert report.epsilon <= by_pld <= epsilon <= 1.001 * by_pld


def test_a_plan_with_screenings_is_within_five_percent(tmp_path, recomputed):
    answers = Charge(Gaussian(25.0, 2**0.5, 0.15), 735)
    path, report = ledger(tmp_path, ([SCREENINGS, answers], []), delta=1e-5)
    epsilon, _ = recomputed(path)
    assert report.epsilon <= epsilon <= 1.05 * report.epsilon


def test_a_release_that_it_does_not_know_is_refused(tmp_path, recomputed):
    path, _ = ledger(tmp_path, ([Charge(NegativeBinomial(50.0, 0.9))], []), adjacency="replace_one")
    with pytest.raises(SystemExit, match="negative_binomial: dp_accounting has no such release"):
        recomputed(path)
