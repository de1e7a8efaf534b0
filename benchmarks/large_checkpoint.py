"""Write a checkpoint of about 65 million random weights, of the demo checkpoint's family and tokenizer, to time with.

python benchmarks/large_checkpoint.py build/large-vl
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "configs" / "models" / "digits-vl"))

from build import build_config, build_model, build_tokenizer, export

TEXT = {
    "hidden_size": 512,
    "intermediate_size": 2560,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 8,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_heads": 6,
    "out_hidden_size": 512,
    "deepstack_visual_indexes": [2, 4],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    tokenizer = build_tokenizer()
    config = build_config(tokenizer)
    for part, values in ((config.text_config, TEXT), (config.vision_config, VISION)):
        for name, value in values.items():
            setattr(part, name, value)
    model = build_model(config)
    export(model, tokenizer, args.folder)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million weights in {args.folder}")


if __name__ == "__main__":
    main()
