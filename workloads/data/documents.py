"""Documents on disk: which files are the text, in which order, and a fingerprint of them."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import msgspec

FINGERPRINT_BYTES = 64 * 2**20

# Tests and installed packages vary from one installation to the next; so do the recorded build
# settings of the interpreter itself.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
SKIPPED_PREFIXES = ("config-", "_sysconfigdata", "sitecustomize", ".")


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of text: its name below the source's folder, and its ``size`` in bytes."""

    name: str
    path: str
    size: int


def standard_library(seed: int) -> list[Document]:
    """Return the ``.py`` files of the running interpreter's standard library, shuffled by ``seed``.

    The order is that of a hash of seed and name: the same on every machine and in every version
    of any random number generator.

    Raises:
        ValueError: if this interpreter carries no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in walk(root, skipped_folders=SKIPPED_FOLDERS, skipped_prefixes=SKIPPED_PREFIXES)
        if path.suffix == ".py"
    ]
    documents = measure(root, paths)
    if not documents:
        raise ValueError(
            f"no Python sources in {root}: set workload.data to synthetic or to a path of text"
        )
    return sorted(documents, key=lambda document: _shuffle_key(seed, document.name))


def user_files(source: str) -> list[Document]:
    """Return the file ``source``, or every file below the folder ``source``, sorted by name.

    Files and folders whose name begins with a dot are left out, and so are empty files.

    Raises:
        ValueError: if there is nothing there, it cannot be read, or it holds no text.
    """
    root = Path(source)
    if not root.exists():
        raise ValueError(
            f"workload.data={source}: no such file or folder; "
            "give an existing path, or one of text, synthetic"
        )
    paths = [root] if root.is_file() else list(walk(root, skipped_prefixes=(".",)))
    for path in paths:
        if not os.access(path, os.R_OK):
            raise ValueError(f"workload.data={source}: {path} is not readable; check its mode")
    documents = measure(root.parent if root.is_file() else root, paths)
    if not documents:
        raise ValueError(
            f"workload.data={source}: no text in it ({len(paths)} files, none with content); "
            "give a file or a folder with text"
        )
    return sorted(documents, key=lambda document: document.name)


def walk(
    root: Path,
    *,
    skipped_folders: frozenset[str] = frozenset(),
    skipped_prefixes: tuple[str, ...] = (),
) -> Iterator[Path]:
    """Yield the regular files below ``root``; skipped folders are not even entered.

    Raises:
        ValueError: if a folder cannot be listed.
    """
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = [
            name
            for name in folders
            if name not in skipped_folders and not name.startswith(skipped_prefixes)
        ]
        for name in files:
            path = Path(folder, name)
            if not name.startswith(skipped_prefixes) and path.is_file():
                yield path


def measure(root: Path, paths: list[Path]) -> list[Document]:
    """Return the files that are not empty as documents named relative to ``root``."""
    documents = (
        Document(name=path.relative_to(root).as_posix(), path=str(path), size=path.stat().st_size)
        for path in paths
    )
    return [document for document in documents if document.size > 0]


def read(document: Document, start: int, size: int) -> bytes:
    """Return ``size`` bytes of the document from ``start`` on.

    Raises:
        ValueError: if the file cannot be read or became shorter since it was measured.
    """
    try:
        with open(document.path, "rb") as file:
            file.seek(start)
            content = file.read(size)
    except OSError as error:
        raise ValueError(f"cannot read {document.path}: {error.strerror}") from error
    if len(content) != size:
        raise ValueError(
            f"{document.path} had {document.size} bytes at the start of the run and now has "
            f"{start + len(content)}; leave the data alone while a run reads it"
        )
    return content


def fingerprint(documents: list[Document]) -> str:
    """Return a sha256 over every name and size and over the first 64 MiB of content, in order."""
    digest = hashlib.sha256()
    budget = FINGERPRINT_BYTES
    for document in documents:
        digest.update(f"{document.name}\0{document.size}\0".encode(errors="surrogateescape"))
        size = min(document.size, budget)
        if size:
            digest.update(read(document, 0, size))
        budget -= size
    return digest.hexdigest()


def _shuffle_key(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}:{name}".encode(errors="surrogateescape")).digest()


def _refuse(error: OSError) -> None:
    raise ValueError(f"cannot list {error.filename}: {error.strerror}; check its mode")
