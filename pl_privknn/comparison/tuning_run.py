"""A paid search over settings: candidates are trained one by one, and all but the best are forgotten."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
import yaml

from pl_privknn import _lightning as pl
from pl_privknn._lightning import TRAINS_ALONE
from pl_privknn.comparison.trainings import made_data, made_training
from pl_privknn.comparison.tuning import Tuning
from pl_privknn.config import merged
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.mechanisms.base import noise_guarantee
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.privacy.private_store import FILE_NAME, PrivateStore
from pl_privknn.privacy.redaction import redacted, silenced
from pl_privknn.privacy.store import FolderLock
from pl_privknn.training import NoisySGD
from pl_privknn.training.isolation import Copier, Nobody

_SEARCH, _RESULT, _MODEL, _BEST = "tuning.json", "result.json", "model.ckpt", "best.yaml"
# How many candidates there are, and all but the best of them, must never be seen.
_SECRET = ".candidates"
_SCHEMA = "CREATE TABLE best (only INTEGER PRIMARY KEY CHECK (only = 1), model BLOB NOT NULL);"


class TuningRun:
    """A search in its folder, started or continued; see :func:`~pl_privknn.comparison.tuning.tuning_of`.

    The whole search is one charge, written before the first candidate is trained. What only the search may know (how
    many candidates there are, their scores, the best one so far) lies in a folder that its owner alone may read, and
    is deleted at the end. A candidate that a crash interrupts is trained anew, since nothing of it was shown.

    Args:
        tuning: what to search.
        output: folder of the search.
        ledger_path: a ledger that several runs over the same records share; the folder's own if None.
        max_epsilon: budget of the ledger; a search that passes it is refused before anything is drawn.
        noise: source of all coins and noise.
    """

    def __init__(
        self,
        tuning: Tuning,
        output: Path,
        ledger_path: Path | None = None,
        max_epsilon: float | None = None,
        noise: NoiseSource | None = None,
    ) -> None:
        self.tuning, self.output = tuning, output
        self.noise = default_noise() if noise is None else noise
        self._ledger_path, self._max_epsilon = ledger_path or output / "ledger.sqlite", max_epsilon

    def run(self) -> dict[str, Any]:
        """Search, and return what ``result.json`` says: the best setting, its noisy score, ε.

        Raises:
            BudgetExceeded: if the search does not fit the ledger's budget; nothing was drawn.
            ValueError: for a folder with another search, or with one whose state is lost.
        """
        lock = FolderLock(self.output)
        try:
            if (self.output / _RESULT).is_file():
                self._known()
                shutil.rmtree(self.output / _SECRET, ignore_errors=True)
                return dict(json.loads((self.output / _RESULT).read_text(encoding="utf-8")))
            ledger = Ledger(self._ledger_path, delta=self.tuning.delta, max_epsilon=self._max_epsilon)
            with contextlib.closing(self._paid(ledger)) as store:
                state = store.fact("state")
                with silenced():  # a candidate's words would tell how many there are
                    data = made_data(self.tuning.document["data"])
                    while state["done"] < len(state["drawn"]):
                        self._try_next(store, state, data)
                result = self._finish(store, state, ledger)
            shutil.rmtree(self.output / _SECRET)
            return result
        finally:
            lock.release()

    def _known(self) -> str | None:
        path = self.output / _SEARCH
        if not path.is_file():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["plan"] != json.loads(json.dumps(self.tuning.plan())):
            raise ValueError(
                f"--output {self.output}: holds a search with other settings, and ε was stated for those; repeat it "
                "as it was, or choose another folder for a new search, which costs anew"
            )
        return str(found["run_id"])

    def _paid(self, ledger: Ledger) -> PrivateStore:
        """State the plan, draw what is to be tried, and pay for the search; or continue one that is paid for."""
        charge = Charge(self.tuning.mechanism).with_guarantee(noise_guarantee(self.noise))
        run_id = self._known() or uuid.uuid4().hex
        content = {"run_id": run_id, "plan": self.tuning.plan()}
        write_durably(self.output / _SEARCH, json.dumps(content, indent=2) + "\n")
        run = ledger.run(run_id, [charge], self.tuning.plan())
        store = PrivateStore(self.output / _SECRET / FILE_NAME, _SCHEMA, one_place=False)
        try:
            if store.fact("state") is None:
                if run.num_charges:
                    raise ValueError(
                        f"--output {self.output}: its search is paid for and what it had found is gone; choose "
                        "another folder for a new search, which costs anew"
                    )
                count = self.tuning.mechanism.draw_count(self.noise.stream("count", run_id))
                drawn = (
                    self.noise.stream("settings", run_id).integers(count, len(self.tuning.settings)).tolist()
                )
                store.note("seeded", not self.noise.cryptographic)
                store.note("state", {"drawn": drawn, "done": 0, "setting": None, "score": None})
            if store.fact("seeded") == self.noise.cryptographic:
                came = "from a seed" if store.fact("seeded") else "from the operating system"
                raise ValueError(
                    f"--output {self.output}: the one charge of its search says that all noise comes {came}; go on "
                    "as it began, or choose another folder for a new search, which costs anew"
                )
            if not run.num_charges:
                run.charge(self.tuning.mechanism, noise=self.noise, adjacencies=("add_remove",))
        except BaseException:
            store.close()
            raise
        return store

    def _try_next(self, store: PrivateStore, state: dict[str, Any], data: Any) -> None:
        place = state["done"]
        folder = self.output / _SECRET / "run"
        shutil.rmtree(folder, ignore_errors=True)
        document = self.tuning.candidate(self.tuning.settings[state["drawn"][place]])
        module, callback = made_training(document, data, "a candidate")
        callback.run_dir = folder
        callback.session.noise_source = self.noise.stream("candidate", place)
        callbacks = [] if isinstance(module, NoisySGD) else [callback]
        trainer = pl.package_of(module, data).Trainer(
            **{**document["trainer"], "callbacks": callbacks}, default_root_dir=folder, **TRAINS_ALONE
        )
        trainer.fit(module, data)
        if callback.planned_steps != self.tuning.steps:
            raise ValueError(
                f"trainer: a candidate planned {callback.planned_steps} steps, the search {self.tuning.steps}"
            )
        right = redacted(_right, module, data)
        score = int(self.tuning.score.add_noise(right, self.noise.stream("score", place)))
        state["done"] = place + 1
        with store.writing() as db:
            if state["score"] is None or score > state["score"]:
                buffer = io.BytesIO()
                torch.save({"state_dict": module.state_dict()}, buffer)
                db.execute("INSERT OR REPLACE INTO best VALUES (1, ?)", (buffer.getvalue(),))
                state.update(setting=self.tuning.settings[state["drawn"][place]], score=score)
            store.note("state", state)

    def _finish(self, store: PrivateStore, state: dict[str, Any], ledger: Ledger) -> dict[str, Any]:
        report = ledger.report()
        result = {
            "setting": state["setting"],
            "right_noisy": state["score"],
            "epsilon": report.epsilon,
            "delta": self.tuning.delta,
            "guarantee": report.guarantee.guarantee,
            "noise_multiplier": self.tuning.noise_multiplier,
            "steps": self.tuning.steps,
        }
        write_durably(self.output / _MODEL, store.read("SELECT model FROM best").fetchone()[0])
        document = merged(self.tuning.candidate(state["setting"]), None)
        write_durably(self.output / _BEST, yaml.safe_dump(document, sort_keys=False))
        write_durably(self.output / _RESULT, json.dumps(result, indent=2) + "\n")
        return result


@torch.no_grad()
def _right(module: pl.LightningModule, data: Any) -> torch.Tensor:
    """Number of private records that the module gets right, int64 ``(1,)``; a record moves it by 1.

    Each is predicted alone, on a copy of the module, so that no other record has a say in it.
    """
    copier = Copier(Nobody, lambda: 0)
    total = 0
    for x, y in data.private_batches():
        for image, label in zip(x.split(1), y, strict=True):
            alone = copier.copy(module).eval()
            with contextlib.suppress(Exception):  # a prediction that fails is wrong, and nobody hears of it
                total += int(alone(image.to(module.device)).reshape(-1).argmax()) == int(label)
    return torch.tensor([total])
