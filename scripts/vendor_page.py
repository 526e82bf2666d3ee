"""Fetch the libraries of the server's page from npm, at fixed versions, with their licences.

    python scripts/vendor_page.py

The files are those of npm, unchanged. ``SHA256SUMS`` lists them, so ``sha256sum --check SHA256SUMS`` compares them, and
``git diff`` shows any difference after another run of this script. Needs ``npm``.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "mlx_flash" / "server" / "web" / "vendor"

LANGUAGES = "bash cpp css diff go ini java json makefile python rust shell sql typescript xml yaml"
"""Languages that code is highlighted in. TypeScript's grammar includes JavaScript's, and C++'s includes C's."""

PACKAGES = {
    "marked@18.2.1": {"lib/marked.esm.js": "marked.esm.js"},  # MIT
    "dompurify@3.5.0": {"dist/purify.min.js": "purify.min.js"},  # MPL-2.0 or Apache-2.0; LICENSE is the latter
    "temml@0.13.5": {"dist/temml.min.js": "temml.min.js"},  # MIT
    "@highlightjs/cdn-assets@11.12.0": {  # BSD-3-Clause
        "es/core.min.js": "core.min.js",
        **{f"es/languages/{name}.min.js": f"languages/{name}.min.js" for name in LANGUAGES.split()},
    },
}
"""Packages of npm, and the names that their files get here. ``LICENSE`` of each is copied too."""


def vendor(package: str, names: dict[str, str], folder: Path) -> None:
    """Copy files of a package.

    Args:
        package: name and version.
        names: paths in the package, and in the folder.
        folder: takes the files.
    """
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", "--silent", package], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as files:
            for source, name in {"LICENSE": "LICENSE", **names}.items():
                data = files.extractfile(f"package/{source}")
                assert data is not None, f"{source} in {package} is no file"
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data.read())


def main() -> None:
    """Write all files anew."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for package, names in PACKAGES.items():
        vendor(package, names, FOLDER / package.rpartition("@")[0].removeprefix("@").partition("/")[0])
    paths = sorted(path for path in FOLDER.rglob("*") if path.is_file())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(FOLDER)}\n" for path in paths]
    (FOLDER / "SHA256SUMS").write_text("".join(sums))


if __name__ == "__main__":
    main()
