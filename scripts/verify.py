"""Receipts of exactness for small random models of each kind: dense and mixture, bf16 and 4 bits.

Each is built if need be, and compared with mlx-lm twice by ``mlx-flash verify``: with the model in memory, and layer by
layer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = "--layers 6 --hidden-size 512 --intermediate-size 1024 --heads 8 --kv-heads 4 --vocab-size 4000"
MIXTURE = f"--architecture qwen3_moe {SMALL} --experts 16 --experts-per-token 2"
MODELS = {
    "dense-bf16": SMALL,
    "dense-4bit": f"{SMALL} --quantize-bits 4",
    "mixture-fp32": f"{MIXTURE} --dtype float32",
    "mixture-4bit": f"{MIXTURE} --quantize-bits 4",
}
"""Flags of ``make_random_model.py``. MLX's CPU back end has no bf16 experts."""


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a Python program of this checkout."""
    print("$", *command, flush=True)
    return subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def main() -> int:
    """Return 0 when everything was identical."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "models" / "verify", help="for models and receipts")
    folder = parser.parse_args().folder
    failed = []
    for name, flags in MODELS.items():
        model, receipt = folder / name, folder / f"{name}.json"
        if not (model / "config.json").exists():
            run("scripts/make_random_model.py", model, *flags.split()).check_returncode()
        verify = ("-m", "mlx_flash", "verify", "--model", model, "--ram-budget-gb", "min", "--json", "--reference")
        done = [run(*verify, reference) for reference in ("resident", "layers")]
        receipt.write_text(done[0].stdout)
        if any(each.returncode for each in done):
            failed.append(name)
    print(f"{len(MODELS) - len(failed)} of {len(MODELS)} identical" + f"; not {', '.join(failed)}" * bool(failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
