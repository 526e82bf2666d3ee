"""The places of all tensors of a safetensors checkpoint, read from the headers alone.

A safetensors file is an 8-byte little-endian header length, a JSON header, and the
data section; a tensor's ``data_offsets`` count from the start of the data section.
Every offset that leaves this module is absolute and was checked against the file.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from reprlib import repr as brief
from typing import Any, BinaryIO, NamedTuple, NoReturn

from mlx_flash.errors import CheckpointError, CheckpointNotFoundError, HeaderError
from mlx_flash.files import open_regular, read_regular
from mlx_flash.memory.pagecache import round_up
from mlx_flash.storage.blocks import BLOCK_BYTES, LOGICAL_START, MARGIN, BlockTable, blocks_of, num_blocks

# fmt: off
DTYPE_SIZES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1,
    "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}
"""Item size in bytes of every dtype of the format whose items are whole bytes."""
# fmt: on

INDEX_NAME = "model.safetensors.index.json"
MAX_METADATA_BYTES = 64_000_000
"""The largest index, ``config.json`` or ``generation_config.json`` that is read."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit on the length of a header."""

_LENGTH_BYTES = 8
_MAX_SIZE = 2**63 - 1
_AGAIN = "Hint: download it again, or write it again if it was not downloaded."
_MOST_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor, or a range of its rows: what it is and where its bytes are."""

    name: str  # the tensor's name in the checkpoint
    dtype: str  # the format's name of the dtype, a key of `DTYPE_SIZES`
    shape: tuple[int, ...]  # dimensions, row-major; ``()`` for a scalar
    path: Path  # the file
    offset: int  # first byte, counted from the start of the file
    nbytes: int  # length in bytes

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def itemsize(self) -> int:
        return DTYPE_SIZES[self.dtype]

    def rows(self, start: int, stop: int) -> TensorRecord:
        """Return the record of rows ``start`` to ``stop`` (exclusive) along axis 0."""
        count, *rest = self.shape
        if not 0 <= start <= stop <= count:
            raise ValueError(f"rows {start} to {stop} of {self.name!r}, which has {count}")
        row_bytes = self.nbytes // count if count else 0
        place = self.path, self.offset + start * row_bytes, (stop - start) * row_bytes
        return TensorRecord(self.name, self.dtype, (stop - start, *rest), *place)


class FileIdentity(NamedTuple):
    """The result of ``os.stat`` for a file. Equal identities mean the same bytes.

    Every write, and every change of name, owner or permissions, sets the change time. No program can set it back.
    """

    device: int
    inode: int
    nbytes: int
    modification_time: int  # in nanoseconds
    change_time: int

    def differences(self, other: FileIdentity) -> str:
        named = zip(FileIdentity.__annotations__, self, other, strict=True)
        names = (name for name, mine, its in named if mine != its)
        return ", ".join(names).replace("nbytes", "size").replace("_", " ")


IDENTITY_FIELDS = attrgetter("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
"""Returns the numbers of a :class:`FileIdentity` from a result of ``os.stat``."""


def identity_of(path: Path | str | int) -> FileIdentity:
    """Return the identity of a file or descriptor. Raises: OSError."""
    return FileIdentity(*IDENTITY_FIELDS(os.stat(path)))  # noqa: PTH116


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file, or one of compressed tensors."""

    path: Path  # the file
    identity: FileIdentity  # the file as its header was read
    data_offset: int  # first byte of the data section, ``8 +`` the header's length
    tensors: tuple[TensorRecord, ...]  # the file's tensors by ascending offset
    metadata: Mapping[str, str]  # the header's ``__metadata__``, empty when there is none
    blocks: BlockTable | None = None  # the places of compressed blocks; None where nothing is compressed

    @property
    def nbytes(self) -> int:
        return self.identity.nbytes


@dataclass(frozen=True)
class Checkpoint:
    """The safetensors files of a model folder."""

    directory: Path  # the folder, as an absolute path like those of its files
    shards: tuple[Shard, ...]  # its files in the order in which mlx-lm loads them
    tensors: Mapping[str, TensorRecord]  # the tensors that mlx-lm ends up with, by name

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.tensors.values())

    @property
    def is_compressed(self) -> bool:
        return any(shard.blocks is not None for shard in self.shards)

    @property
    def ratio(self) -> float:
        """Bytes of the files for each byte of the tensors: 1 where none is compressed."""
        saved = sum(
            sum(r.nbytes for r in shard.tensors) - shard.blocks.stored_bytes for shard in self.shards if shard.blocks
        )
        return 1 - saved / max(self.nbytes, 1)


def read_shard(path: Path) -> Shard:
    """Read and validate the header of one safetensors file; its data is not touched. Raises: CheckpointError.

    Holes between tensors are accepted, although the format forbids them, because MLX loads such files.
    """
    try:
        with open(open_regular(path), "rb", buffering=0) as file:
            identity = identity_of(file.fileno())
            raw = _read_header(file, path)
    except OSError as fault:
        refuse_unreadable(path, "file", fault)
    data_offset, table = _LENGTH_BYTES + len(raw), None
    records, metadata = _records(path, _json_object(path, raw), data_offset, identity.nbytes)
    if is_coded(path) or CODED in metadata:  # a damaged key would make ordinary tensors of the coded bytes
        records, metadata, table = _of_coded(path, records, _json_object(path, metadata.get(CODED, "{}").encode()))
    return Shard(path, identity, data_offset, records, metadata, table)


def _json_object(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys))
    except (ValueError, TypeError, RecursionError) as fault:
        raise HeaderError(f"{path}: the header is not valid UTF-8 JSON: {fault}. {_AGAIN}") from fault


def _records(
    path: Path, header: dict[str, Any], data_offset: int, size: int
) -> tuple[tuple[TensorRecord, ...], Mapping[str, str]]:
    """Return the checked tensors and the metadata of a header."""
    metadata = header.pop("__metadata__", {})
    if metadata is None:
        metadata = {}  # which MLX writes where it has none
    if not isinstance(metadata, dict) or not all(isinstance(item, str) for item in metadata.values()):
        raise HeaderError(f"{path}: __metadata__ must map strings to strings, found {brief(metadata)}")
    records = [_parse_entry(path, name, entry, data_offset) for name, entry in header.items()]
    records.sort(key=attrgetter("offset", "nbytes"))
    _check_layout(path, records, size)
    return tuple(records), metadata


def _of_coded(
    path: Path, coded: tuple[TensorRecord, ...], about: dict[str, Any]
) -> tuple[tuple[TensorRecord, ...], Mapping[str, str], BlockTable]:
    """Return the tensors that a compressed file has the coded bytes of, their metadata, and the table of blocks."""
    header, divided = about.get("header"), about.get("blocks")
    if not isinstance(header, dict) or not isinstance(divided, dict):
        raise HeaderError(f"{path}: {CODED} holds no header and no blocks. {_AGAIN}")
    records, metadata = _records(path, header, LOGICAL_START, _MAX_SIZE)
    if [record.name for record in records] != [each.name for each in coded]:
        raise HeaderError(f"{path}: {CODED} names other tensors than the file has. {_AGAIN}")
    blocks, sizes, at = list[tuple[int, int, int]](), list[int](), coded[0].offset if coded else 0
    for record, stored in zip(records, coded, strict=True):
        found, item = divided.get(record.name), record.itemsize
        match found:
            case [int(block), int(run), *own] if (
                item <= block <= BLOCK_BYTES
                and run > 0
                and not (block | run) % item
                and len(own) == num_blocks(record.nbytes, block, run)
                and all(type(size) is int and 0 < size <= BLOCK_BYTES + MARGIN for size in own)  # true is no size
                and (stored.offset, stored.nbytes) == (at, sum(own))
            ):
                blocks += blocks_of(record.offset, record.nbytes, item, block, run)
                sizes += own
                at = stored.end
            case _:
                raise HeaderError(f"{path}: {record.name!r} cannot have the blocks {brief(found)}. {_AGAIN}")
    return records, metadata, BlockTable(blocks, sizes, at - sum(sizes))


def make_head(header: object, alignment: int = 1, nbytes: int = 0) -> bytes:
    """Return the start of a safetensors file, up to its data: at least so many bytes, and a multiple of others."""
    text = json.dumps(header, separators=(",", ":")).encode()
    length = max(round_up(_LENGTH_BYTES + len(text), alignment), nbytes) - _LENGTH_BYTES
    text = text[:-1].ljust(length - 1) + text[-1:]  # blanks behind it could hide that the length is damaged
    return length.to_bytes(_LENGTH_BYTES, "little") + text


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read and validate the headers of all shards of a folder, as mlx-lm without an index. Raises: CheckpointError."""
    found = find_shards(directory)
    directory = directory.absolute()  # a program may change its folder
    shards = tuple(read_shard(directory / path.name) for path in found)
    tensors: dict[str, TensorRecord] = {}
    for shard in shards:
        tensors.update({record.name: record for record in shard.tensors})
    return Checkpoint(directory, shards, tensors)


def _read_header(file: BinaryIO, path: Path) -> bytes:
    length = int.from_bytes(_read_exactly(file, path, _LENGTH_BYTES, "header length"), "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderError(
            f"{path}: the first 8 bytes promise a header of {length} bytes, the format allows {MAX_HEADER_BYTES}: "
            "this is no safetensors file. Hint: it may be a Git LFS pointer or an error page; download it again."
        )
    raw = _read_exactly(file, path, length, "header")
    if not raw.startswith(b"{"):
        raise HeaderError(f"{path}: the header must start with '{{', it starts with {raw[:8]!r}. {_AGAIN}")
    return raw


def _read_exactly(file: BinaryIO, path: Path, count: int, what: str) -> bytes:
    raw = file.read(count)
    if len(raw) < count:
        raise HeaderError(f"{path}: read {len(raw)} of {count} bytes of the {what}: the file is truncated. {_AGAIN}")
    return raw


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"duplicate key {key!r}")
    return result


def _parse_entry(path: Path, name: str, entry: Any, data_offset: int) -> TensorRecord:
    where = f"{path}: tensor {name!r}"
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if (
            len(entry) == 3 and dtype in DTYPE_SIZES and len(shape) <= _MOST_DIMENSIONS
        ):
            sizes = [*shape, begin, end]
            if {*map(type, sizes)} == {int} and min(sizes) >= 0 and max(sizes) <= _MAX_SIZE:  # true is no size
                bound = DTYPE_SIZES[dtype] * math.prod([dimension or 1 for dimension in shape])
                needed = 0 if 0 in shape else bound
                if bound > _MAX_SIZE or end - begin != needed:
                    raise HeaderError(
                        f"{where}: {dtype} of shape {brief(shape)} takes {bound} bytes, "
                        f"its data_offsets [{begin}, {end}] span {end - begin}"
                    )
                return TensorRecord(name, dtype, tuple(shape), path, data_offset + begin, needed)
    raise HeaderError(
        f"{where}: its entry must hold exactly dtype (one of {', '.join(DTYPE_SIZES)}), shape and two data_offsets, "
        f"all sizes from 0 to 2**63 - 1, found {brief(entry)}"
    )


def _check_layout(path: Path, records: list[TensorRecord], size: int) -> None:
    ends = [record.offset + record.nbytes for record in records]
    if max(ends, default=0) > size:
        raise HeaderError(
            f"{path}: tensor {records[ends.index(max(ends))].name!r} needs {max(ends)} bytes of file, found {size}: "
            f"the file is truncated. {_AGAIN}"
        )
    for left, right in pairwise([record for record in records if record.nbytes]):
        if right.offset < left.offset + left.nbytes:
            raise HeaderError(
                f"{path}: tensor {right.name!r} starts at byte {right.offset}, inside tensor {left.name!r}, "
                f"which ends at byte {left.end}"
            )


def absent_shards(directory: Path) -> list[str]:
    """Return the files that a folder's index names and that are not there. None are if there is no readable index."""
    try:
        named = json.loads(read_regular(directory / INDEX_NAME, MAX_METADATA_BYTES))["weight_map"].values()
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return []
    present = {path.name for path in directory.iterdir() if path.exists()}
    return sorted({name for name in named if isinstance(name, str) and name.isprintable()} - present)


STOCK_PATTERN = "model*.safetensors"
"""Names of the shards that mlx-lm loads."""

COMPRESSED_NAME = "compressed-{number:05}-of-{count:05}.safetensors"
PLAIN_NAME = "uncompressed-{number:05}-of-{count:05}.safetensors"
"""Names of the files of a compressed copy. mlx-lm finds no shard there, and says so."""

CODED = "mlx-flash"
"""Key of a compressed file's metadata that tells what it has the coded bytes of (:mod:`mlx_flash.storage.blocks`)."""

_OWN = re.compile(r"(compressed|uncompressed)-(\d{5})-of-(\d{5})\.safetensors")
_HINT = "Hint: copy the folder again, or pack the model again."


def is_coded(path: Path) -> bool:
    """Return whether a file has the name of a compressed one, which may go on (``.partial``)."""
    return path.name.startswith(COMPRESSED_NAME.partition("{")[0])


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files that a folder has, of either kind."""
    own = (path for path in directory.glob("*compressed-*") if _OWN.fullmatch(path.name))
    return sorted([*directory.glob(STOCK_PATTERN), *own])


def find_shards(directory: Path) -> list[Path]:
    """Return the weight files of a model, in the order in which mlx-lm loads them. Raises: CheckpointError."""
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as fault:
        refuse_unreadable(directory, "folder", fault)
    if old := next((name for name in names if Path(name).match("compressed-*.flash")), None):
        raise CheckpointError(
            f"{directory / old} was made by an earlier version of `mlx-flash pack`, in a format that is not read any "
            "more. Hint: pack the model again."
        )
    own = [name for name in names if _OWN.fullmatch(name)]
    if own:
        return _compressed(directory, names, own)
    # The call of mlx_lm.utils.load_model, unsorted and unescaped: where two shards hold a
    # tensor of one name, the later shard wins, so the order must be the same.
    paths = [Path(found) for found in glob.glob(str(directory / STOCK_PATTERN))]  # noqa: PTH207
    is_pattern = glob.escape(str(directory)) != str(directory)
    if is_pattern and {path.parent for path in paths} != {directory}:
        raise CheckpointNotFoundError(
            f"{directory}: mlx-lm takes '*', '?' and '[' in this path for a pattern, which matches other folders "
            "or none. Hint: rename the folder."
        )
    if not paths:
        raise CheckpointNotFoundError(
            f"no {STOCK_PATTERN} in {directory}, which holds {brief(names)}. "
            "Hint: give the folder of the downloaded safetensors weights."
        )
    return paths


def _compressed(directory: Path, names: list[str], own: list[str]) -> list[Path]:
    stock = next((name for name in names if Path(name).match(STOCK_PATTERN)), None)
    if stock is not None:
        raise CheckpointError(f"{directory} has both {own[0]} and {stock}. Hint: remove one kind, or pack again.")
    kinds = {match[1]: int(match[3]) for match in map(_OWN.fullmatch, own) if match}
    wanted = {f"{kind}-{i:05}-of-{n:05}.safetensors" for kind, n in kinds.items() for i in range(1, n + 1)}
    if missing := wanted.difference(own):
        raise CheckpointNotFoundError(f"{directory} lacks {min(missing)}, a part of a compressed copy. {_HINT}")
    if sorted(kinds) != ["compressed", "uncompressed"] or wanted != {*own}:
        raise CheckpointNotFoundError(
            f"{directory} holds {brief(own)}, which are not the files of one compressed copy. {_HINT}"
        )
    return [directory / name for name in own]


def refuse_unreadable(path: Path, kind: str, fault: OSError) -> NoReturn:
    """Raise the error for a file or folder that the system cannot read."""
    if isinstance(fault, FileNotFoundError | NotADirectoryError):
        raise CheckpointNotFoundError(f"{path}: no such {kind}. Hint: check the path, or download it again.") from fault
    reason = fault.strerror or fault
    hint = "check its permissions" if isinstance(fault, PermissionError) else "download it again"
    raise CheckpointError(f"{path}: cannot read this {kind}: {reason}. Hint: {hint}.") from fault
