import json
import sys

import torch
from tokenizers import Tokenizer

files = {"tokenizer.json": "", "model.json": ""}
torch.set_grad_enabled(False)
model = torch.export.load("model.pt2", extra_files=files).module()
tokenizer, about = Tokenizer.from_str(files["tokenizer.json"]), json.loads(files["model.json"])
for text in sys.stdin:
    tokens = tokenizer.encode(text.strip(), add_special_tokens=False).ids
    found = model(torch.tensor([tokens]))[0]
    print(about["classes"][int(found.argmax())], f"{float(found.max()):.6f}")
