import json
import sys

import numpy as np
import torch
from PIL import Image, ImageOps

files = {"model.json": ""}
torch.set_grad_enabled(False)
model = torch.export.load("model.pt2", extra_files=files).module()
about = json.loads(files["model.json"])
channels, height, width = about["shape"]
for path in sys.argv[1:]:
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB" if channels == 3 else "L")
    pixels = torch.from_numpy(np.array(image.resize((width, height), Image.Resampling.BILINEAR)))
    found = model(pixels.reshape(1, height, width, channels).permute(0, 3, 1, 2))[0]
    print(path, about["classes"][int(found.argmax())], f"{float(found.max()):.6f}")
