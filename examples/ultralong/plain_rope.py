"""Give a Llama 3.1 folder the rope of Llama 3, which `yarn` can scale: theta 500000, 8192 positions, no scaling.

    python examples/ultralong/plain_rope.py Llama-3.1-8B

Two scalings on top of each other are refused, and UltraLong replaces Llama 3.1's own. The old config.json stays beside
the new one as config-llama3.1.json.
"""

import json
import sys
from pathlib import Path

POSITIONS = 8192  # that Llama 3 was trained on before Llama 3.1 extended it


def main(folder: Path) -> None:
    file, before = folder / "config.json", folder / "config-llama3.1.json"
    if before.exists():
        sys.exit(f"'{before}' exists: the folder has the plain rope already")
    config = json.loads(file.read_text(encoding="utf-8"))
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    before.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    plain = {name: value for name, value in config.items() if name not in ("rope_scaling", "rope_parameters")}
    plain |= {"rope_theta": theta, "max_position_embeddings": POSITIONS}
    file.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
