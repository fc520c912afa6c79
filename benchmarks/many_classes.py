"""Data sets of 22 to 100 classes for ``recipes``, from Debian's and Python's packages.

Debian packages may be unpacked anywhere: their files are looked for below ``root`` and then below ``/usr/share``.
"""

from __future__ import annotations

import ast
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

_SHARE = Path("/usr/share")
_DOCUMENTED = "matplotlib", "numpy", "scipy", "skimage", "sklearn", "torch"
_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_FONTS = "comic-neue", "crosextra", "freefont", "hack", "lato", "liberation2", "linux-libertine", "roboto"


def embedded(texts: Sequence[str]) -> Tensor:
    """WordLlama embeddings of texts, float32 ``(n, 256)``."""
    import wordllama

    model = wordllama.WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)
    return torch.from_numpy(model.embed(list(texts))).float()


def drawn(pairs: Iterable[tuple[str, str]], least: int, most: int) -> tuple[list[str], Tensor]:
    """Distinct texts of classes with at least ``least``, at most ``most`` of a class, and their classes, shuffled."""
    generator = random.Random(0)
    known = sorted(dict(pairs).items())
    generator.shuffle(known)
    sizes, seen, kept = Counter(label for _, label in known), Counter[str](), []
    for text, label in known:
        seen[label] += 1
        if sizes[label] >= least and seen[label] <= most:
            kept.append((text, label))
    names = sorted({label for _, label in kept})
    return [text for text, _ in kept], torch.tensor([names.index(label) for _, label in kept])


def glosses(root: str) -> Iterator[tuple[str, str]]:
    """Definitions of nouns and verbs with their lexicographer file, of Debian's ``wordnet-base``."""
    for name in ("data.noun", "data.verb"):
        for line in _found(root, f"wordnet/{name}").read_text(encoding="utf-8").splitlines():
            if not line.startswith(" "):
                head, gloss = line.split("|", 1)
                yield re.split('; "|"', gloss)[0].strip(), head.split()[1]


def fortunes(root: str) -> Iterator[tuple[str, str]]:
    """Sayings with their file, of Debian's ``fortunes`` and ``fortunes-min``."""
    for file in sorted(_found(root, "games/fortunes").glob("*.u8")):
        for text in file.read_text(encoding="utf-8").split("\n%\n"):
            yield " ".join(text.split())[:600], file.stem


def docstrings(root: str) -> Iterator[tuple[str, str]]:
    """First paragraphs of docstrings with their subpackage, of installed Python packages."""
    for package in _DOCUMENTED:
        top = Path(str(find_spec(package).origin)).parent  # type: ignore[union-attr]
        for file in sorted(top.rglob("*.py")):
            parts = file.relative_to(top).parts
            if len(parts) < 2 or "tests" in parts or parts[0].startswith("_"):
                continue
            try:
                tree = ast.parse(file.read_text(encoding="utf-8"))
            except SyntaxError:  # examples of a newer Python
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                    first = " ".join(text.split("\n\n")[0].split())
                    if len(first) > 20:
                        yield first, f"{package}.{parts[0]}"


def sections(root: str) -> Iterator[tuple[str, str]]:
    """Names and short descriptions with their section, of Debian's list of packages (``apt-cache dumpavail``)."""
    for stanza in _found(root, "debian-packages.txt").read_text(encoding="utf-8").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Description|Section): (.*)", stanza, re.MULTILINE))
        if len(fields) == 3:
            yield f"{fields['Package']}: {fields['Description']}", fields["Section"].split("/")[-1]


def characters(root: str, records: int) -> tuple[Tensor, Tensor]:
    """Letters and digits in many fonts, turned and moved, images of 28 pixels; by Debian's ``fonts-*``."""
    places = [_found(root, "fonts/truetype"), _found(root, "fonts/opentype")]
    files = [
        file for name in _FONTS for place in places for file in sorted(place.glob(f"{name}/**/*.[ot]tf"))
    ]
    fonts = [ImageFont.truetype(str(file), size) for file in files for size in (18, 22, 26)]
    generator, images, labels = random.Random(0), [], []
    for _ in range(records):
        labels.append(generator.randrange(len(_CHARACTERS)))
        image = Image.new("L", (36, 36))
        place = 18 + generator.uniform(-2, 2), 18 + generator.uniform(-2, 2)
        font = generator.choice(fonts)
        ImageDraw.Draw(image).text(place, _CHARACTERS[labels[-1]], 255, font, anchor="mm")
        turned = image.rotate(generator.uniform(-15, 15), Image.Resampling.BILINEAR).crop((4, 4, 32, 32))
        images.append(np.asarray(turned))
    noise = torch.randn(records, 28, 28, generator=torch.Generator().manual_seed(0))
    return (torch.from_numpy(np.stack(images)) / 255 + 0.2 * noise).clamp(0, 1)[:, None], torch.tensor(labels)


def scripts(root: str) -> tuple[Tensor, Tensor]:
    """Glyphs of 16 pixels, doubled, with their script, of Debian's ``unifont``."""
    pairs = []
    for line in _found(root, "unifont/unifont.hex").read_text(encoding="ascii").splitlines():
        code, bits = line.split(":")
        pairs.append((bits, unicodedata.name(chr(int(code, 16)), "").partition(" ")[0]))
    glyphs, labels = drawn([pair for pair in pairs if pair[1]], 80, 300)
    rows = [np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8)).reshape(16, -1) for bits in glyphs]
    whole = np.stack([np.pad(row, ((0, 0), ((16 - row.shape[1]) // 2,) * 2)) for row in rows])
    return torch.from_numpy(whole.repeat(2, 1).repeat(2, 2))[:, None].float(), labels


def pairs_of_digits(images: Tensor, labels: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Two digits side by side, of 100 classes; parts of these sizes share no digit (the digits are cut in thirds)."""
    generator, found = torch.Generator().manual_seed(0), []
    for count, rows in zip(counts, torch.arange(len(labels)).chunk(len(counts)), strict=True):
        found.append(rows[torch.randint(len(rows), (count, 2), generator=generator)])
    left, right = torch.cat(found).T
    return torch.cat([images[left], images[right]], dim=3), 10 * labels[left] + labels[right]


def _found(root: str, name: str) -> Path:
    for file in (Path(root) / name, _SHARE / name):
        if file.exists():
            return file
    raise FileNotFoundError(f"{name}: neither below {root} nor {_SHARE}; {__doc__}")
