import base64
import io
import json
import math
import re
import shutil
import sqlite3

import numpy as np
import pytest
import torch
from PIL import Image

from pl_privknn._checks import at_most
from pl_privknn.callbacks.loggers import MOST_TESTED, pictures_of
from pl_privknn.cli import main
from pl_privknn.datamodules import EmbeddingsDataModule
from pl_privknn.labelers import ReverseKNN
from pl_privknn.privacy import Budget, Charge, Gaussian, Ledger
from pl_privknn.privacy.card import percent
from pl_privknn.privacy.files import write_json
from pl_privknn.privacy.mechanisms import Laplace, NoNoise
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.report import privacy_card, write_report
from pl_privknn.report.facts import facts_of
from tests.report.report_setup import CLASSES, QUERIES, small_run
from tests.setup.small_fit import easy_images, fit_student

#: All that a page of a run is made of.
FILES = ("summary.json", "config.yaml", "metrics.csv", "run.sqlite", "run.sqlite", "pictures.npz")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "run"
    callback, data = small_run(folder)
    return folder, callback, data, facts_of(folder, exact=False)


def test_the_page_needs_no_network_and_shows_the_promise_and_every_query(run):
    folder, callback, _, facts = run
    page = write_report(folder, exact=False)
    text = page.read_text(encoding="utf-8")
    assert page == folder / "report.html"
    assert not re.search(r"(?:src|href|srcset|action)\s*=\s*[\"'](?!#|data:)", text)
    assert not re.search(r"url\(\s*[\"']?(?!#)|@import|fetch\(|XMLHttpRequest", text)
    assert f"ε = {at_most(callback.epsilon)}" in text
    assert "This run gives no protection" in text  # its noise came from a seed
    queried, wrong = facts["answers"]["counts"]["queried"], len(facts["student"]["mistakes"])
    assert text.count('<img src="data:image/png') == queried + wrong
    assert queried == 2 * QUERIES
    assert "cat" in text
    assert text.count("<svg") == 3  # attacker, growth, reliability


def shown(one):
    return np.array(Image.open(io.BytesIO(base64.b64decode(one["picture"].partition(",")[2]))))


def test_pictures_are_the_asked_public_images_and_no_private_one(run):
    folder, _, data, facts = run
    with sqlite3.connect(folder / "run.sqlite") as store:
        asked = store.execute("SELECT example, label FROM queries ORDER BY round, position").fetchall()
    gallery = facts["answers"]["gallery"]
    assert [one["example"] for one in gallery] == [example for example, _ in asked]
    private = (data.private.images() * 255).round().to(torch.uint8)
    for one, (example, label) in zip(gallery, asked, strict=True):
        picture = torch.from_numpy(shown(one))
        public = (data.public.images([example])[0, 0] * 255).round().to(torch.uint8)
        assert torch.equal(picture, public)
        assert not (private[:, 0] == picture).all(dim=(1, 2)).any()
        assert one["label"] == data.class_names[label]
        assert one["truth"] == data.class_names[int(data.public.truth[example])]
        assert one["right"] == (one["label"] == one["truth"])


def test_accuracies_by_class_and_confusions_agree_with_counting(run):
    folder, callback, data, facts = run
    answered, truth = data.public.labels, data.public.truth
    for place, one in enumerate(facts["answers"]["by_class"]):
        here = answered[(truth == place) & (answered >= 0)].tolist()
        assert (one["count"], one["right"]) == (len(here), here.count(place))
    confusion = np.array(facts["student"]["confusion"]["rows"])
    assert confusion.sum() == 30
    assert confusion.sum(axis=1).tolist() == [10] * CLASSES
    assert confusion.trace() / 30 == pytest.approx(facts["student"]["test_accuracy"], abs=1e-6)
    assert json.loads((folder / "summary.json").read_text())["run"] == callback.run_id


def test_shown_test_examples_are_those_that_the_model_gets_wrong(run):
    _, _, data, facts = run
    student, wrong = facts["student"], np.array(facts["student"]["confusion"]["rows"])
    np.fill_diagonal(wrong, 0)
    assert 0 < len(student["mistakes"]) <= min(MOST_TESTED, wrong.sum())
    tested = (data.test.images()[:, 0] * 255).round().to(torch.uint8)
    for one in student["mistakes"]:
        place = (tested == torch.from_numpy(shown(one))).all(dim=(1, 2)).nonzero()[0, 0]
        truth, said = data.class_names.index(one["truth"]), data.class_names.index(one["label"])
        assert int(data.test.labels[place]) == truth
        wrong[truth, said] -= 1
    assert wrong.min() >= 0
    low, high = student["test_interval"]
    assert low < student["test_accuracy"] < high < low + 0.36  # 30 examples


def test_votes_are_close_below_two_standard_deviations_and_persons_are_called_persons(tmp_path):
    teacher = ReverseKNN(noise=Laplace(scale=9.0), noise_source=SeededNoise(1))
    callback, _ = fit_student(
        tmp_path, teacher, 0.1, owners=torch.arange(300) // 2, budget=Budget(unit="person")
    )
    folder = callback.run_dir
    with sqlite3.connect(folder / "run.sqlite") as store:
        scores = torch.tensor(
            [json.loads(row) for (row,) in store.execute("SELECT score FROM queries ORDER BY position")]
        )
    top = scores.topk(2, dim=1).values
    margins = (top[:, 0] - top[:, 1]) / 18  # the difference of two draws of Laplace noise of scale 9
    answers = facts_of(folder, exact=False)["answers"]
    assert [one["margin"] for one in answers["gallery"]] == pytest.approx(margins.tolist(), rel=1e-5)
    assert answers["close"] == int((margins < 2).sum()) > 0
    page = write_report(folder, exact=False).read_text(encoding="utf-8")
    assert "persons detected, at most" in page
    assert "records detected" not in page


def test_vectors_have_no_pictures():
    images, labels, public, truth = easy_images(60, 24)
    data = EmbeddingsDataModule(images.flatten(1), labels, public.flatten(1), truth, num_classes=CLASSES)
    data.setup("fit")
    found = pictures_of(data, [3, 5])
    assert (len(found.examples), len(found.images), found.public, len(found.truth)) == (0, 0, 24, 24)


def test_a_page_is_made_of_these_files_alone_and_a_forged_summary_has_none(run, tmp_path):
    folder, *_ = run
    for name in FILES:
        shutil.copy(folder / name, tmp_path / name)
    copied = write_report(tmp_path, exact=False).read_text(encoding="utf-8")
    assert copied == write_report(folder, exact=False).read_text(encoding="utf-8")
    summary = json.loads((folder / "summary.json").read_text())
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "epsilon": 0.01}))
    with pytest.raises(ValueError, match="the audit fails: epsilon"):
        write_report(tmp_path, exact=False)


def test_markup_in_names_is_text(tmp_path):
    ledger = Ledger(tmp_path / "a<script>b.sqlite")
    ledger.run("first", plan=[Charge(Gaussian(sigma=4.0))])
    ledger.close()
    text = write_report(tmp_path / "a<script>b.sqlite").read_text(encoding="utf-8")
    assert "a<script>b" not in text
    assert "a&lt;script&gt;b" in text
    assert "Nothing has been charged yet" in text


def test_a_run_of_a_comparison_stands_beside_what_was_run_without_privacy(tmp_path):
    kept = {
        "truth/eps_inf/seed_0": (None, 0.95),
        "truth/eps_inf/seed_1": (None, 0.9),
        "knn/eps_inf/seed_0": (math.inf, 0.85),
        "pate/eps_inf/seed_0": (math.inf, 0.8),
        "knn/eps_1/seed_0": (None, 0.7),
    }
    for name, (epsilon, accuracy) in kept.items():
        (tmp_path / name).mkdir(parents=True)
        write_json(tmp_path / name / "summary.json", {"epsilon": epsilon, "test_accuracy": accuracy})
    folder = tmp_path / "knn" / "eps_1" / "seed_0"
    beside = facts_of(folder)["without_privacy"]
    assert sorted(one["accuracy"] for one in beside) == [0.85, 0.95]
    text = write_report(folder).read_text(encoding="utf-8")
    assert "without privacy: the same student on the true labels" in text
    assert "without privacy: the same method without noise" in text
    elsewhere = tmp_path / "alone"
    elsewhere.mkdir()
    write_json(elsewhere / "summary.json", {"epsilon": None, "test_accuracy": 0.7})
    assert facts_of(elsewhere)["without_privacy"] == []
    with pytest.raises(ValueError, match="no privacy card"):
        privacy_card(elsewhere)


def refused(name):
    raise AssertionError(f"{name} is no JSON")


def ledger_of(folder, charge):
    made = Ledger(folder / "run.sqlite")
    made.run("first", plan=[charge])
    made.close()
    return folder / "run.sqlite"


def test_an_infinite_epsilon_is_a_string_in_the_file_of_a_card(tmp_path):
    path = ledger_of(tmp_path, Charge(NoNoise()))
    write_report(path)
    card = json.loads((tmp_path / "privacy_card.json").read_text(), parse_constant=refused)
    assert (card["epsilon"], card["guarantee"]) == ("inf", "none")
    assert privacy_card(path)["epsilon"] == math.inf


def test_a_release_with_hardly_any_noise_has_a_report(tmp_path):
    path = ledger_of(tmp_path, Charge(Gaussian(sigma=1e-200)))
    page = write_report(path).read_text(encoding="utf-8")
    assert "ε = ∞" in page
    assert "</b>budget" not in page  # the ledger has none


def test_what_is_no_run_and_no_ledger_is_one_line(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("x")
    for path, word in (
        (tmp_path, "is no run's folder"),
        (tmp_path / "none", "nothing at"),
        (tmp_path / "notes.txt", "ledger"),
    ):
        assert main(["report", str(path)]) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert word in lines[0]


def test_card_and_page_say_that_people_in_the_public_and_test_parts_are_not_protected(run):
    folder, *_ = run
    page = write_report(folder, exact=False).read_text(encoding="utf-8")
    assert "People in the public, validation and test parts are not protected." in page
    card = (folder / "privacy_card.md").read_text(encoding="utf-8")
    assert "* people in the public, validation and test parts: ε protects the private records alone" in card


def test_the_card_has_the_terms_of_the_standard(run):
    folder, callback, _, facts = run
    wanted = privacy_card(folder, exact=False)
    write_report(folder, exact=False)
    card = json.loads((folder / "privacy_card.json").read_text(encoding="utf-8"))
    assert card == wanted
    assert (card["epsilon"], card["delta"], card["adjacency"]) == (callback.epsilon, 1e-5, "add_remove")
    assert card["mechanisms"] == facts["planned"]
    assert card["mechanisms"][0]["count"] == 2 * QUERIES
    assert card["guarantee"] == "none"
    assert "seed" in card["reason"]
    assert card["trust_model"].startswith("central model")
    assert {"unit_of_privacy", "composition", "tuning", "known_exclusions"} <= card.keys()
    summary = json.loads((folder / "summary.json").read_text())
    detected = [rate["true_positive_rate"] for rate in card["attacker"]["rates"]]
    assert detected == pytest.approx([summary[f"tpr_at_fpr_{rate}"] for rate in (0.001, 0.01, 0.1)])
    assert card["attacker"]["right_guesses"] == pytest.approx((1 + summary["advantage"]) / 2)
    for rate, found in zip((0.001, 0.01, 0.1), detected, strict=True):
        assert found <= math.exp(card["epsilon"]) * rate + card["delta"] + 1e-9
    text = (folder / "privacy_card.md").read_text(encoding="utf-8")
    assert f"| ε | {at_most(callback.epsilon)} |" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "50.0 %"), (0.12341, "12.4 %"), (0.9999, "99.990 %"), (1.0, "100.0 %"), (1 - 1e-10, "100 %")],
)  # fmt: skip
def test_shares_are_never_rounded_down_nor_up_to_certainty(value, text):
    assert percent(value) == text
