"""File -> bytes of JSON text.

In: a path. Out: the uncompressed text without byte-order mark, and what had to be said about getting it.
Knows gzip (also of several members, also cut off), zip with one trace inside, and zstd where a decoder is installed.
Knows nothing of what the text means.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from tracetools.errors import TracetoolsError
from tracetools.model import Problem

GZIP_MAGIC = b"\x1f\x8b"
ZIP_MAGIC = b"PK\x03\x04"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
UTF8_BOM = b"\xef\xbb\xbf"
UTF16_BOMS = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}

NO_ZSTD = (
    "{path}: zstd-compressed, and no zstd decoder is installed. "
    "Install one (pip install 'tracetools[zstd]') or unpack the file first (zstd -d FILE)."
)


def read_text(path: Path) -> tuple[bytes, tuple[Problem, ...]]:
    """The JSON text of a trace file as UTF-8 bytes. Raises TracetoolsError where there is none to read."""
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise TracetoolsError(f"{path}: cannot be read: {error.strerror or error}.") from error
    text, problems = _unpack(packed, path)
    text, encoding_problems = _as_utf8(text)
    if not text or text.isspace():
        raise TracetoolsError(f"{path}: is empty. Was the process killed before it wrote its trace?")
    return text, problems + encoding_problems


def _unpack(packed: bytes, path: Path) -> tuple[bytes, tuple[Problem, ...]]:
    if packed.startswith(GZIP_MAGIC):
        return _gunzip(packed, path)
    if packed.startswith(ZIP_MAGIC):
        return _unzip(packed, path), ()
    if packed.startswith(ZSTD_MAGIC):
        return _unzstd(packed, path), ()
    return packed, ()


def _gunzip(packed: bytes, path: Path) -> tuple[bytes, tuple[Problem, ...]]:
    """All members. A file that was cut off gives what is there, and a problem that says so."""
    parts: list[bytes] = []
    rest = packed
    while rest.startswith(GZIP_MAGIC):
        at = len(packed) - len(rest)
        member = zlib.decompressobj(wbits=31)
        try:
            parts.append(member.decompress(rest))
        except zlib.error as error:
            parts.append(_salvage(rest))
            return b"".join(parts), (Problem("gzip_damaged", 1, f"gzip member at byte {at} is damaged: {error}"),)
        if not member.eof:
            return b"".join(parts), (
                Problem("gzip_truncated", 1, f"compressed data ends at byte {len(packed)} in the middle of a member"),
            )
        rest = member.unused_data.lstrip(b"\0")  # tar and tape tools pad with zeros
    if rest:
        where = len(packed) - len(rest)
        return b"".join(parts), (Problem("trailing_bytes", 1, f"{len(rest)} bytes at byte {where} are not gzip"),)
    if not any(parts):
        raise TracetoolsError(f"{path}: the gzip file holds nothing. Was the process killed while it wrote its trace?")
    return b"".join(parts), ()


def _salvage(member: bytes) -> bytes:
    """What a damaged member yields before the damage, fed in small pieces so that good output is kept."""
    decoder = zlib.decompressobj(wbits=31)
    out: list[bytes] = []
    for at in range(0, len(member), 4096):
        try:
            out.append(decoder.decompress(member[at : at + 4096]))
        except zlib.error:
            break
    return b"".join(out)


def _unzip(packed: bytes, path: Path) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            names = [i.filename for i in archive.infolist() if not i.is_dir()]
            if len(names) != 1:
                raise TracetoolsError(
                    f"{path}: the zip archive holds {len(names)} files. Unpack it and give the folder or one file."
                )
            return archive.read(names[0])
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise TracetoolsError(f"{path}: the zip archive is damaged or of an unknown kind: {error}.") from error


def _unzstd(packed: bytes, path: Path) -> bytes:
    if find_spec("zstandard") is None:
        raise TracetoolsError(NO_ZSTD.format(path=path))
    zstandard = import_module("zstandard")
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed), read_across_frames=True) as reader:
            return bytes(reader.read())
    except zstandard.ZstdError as error:
        raise TracetoolsError(f"{path}: the zstd data is damaged: {error}.") from error


def _as_utf8(text: bytes) -> tuple[bytes, tuple[Problem, ...]]:
    if text.startswith(UTF8_BOM):
        return text[len(UTF8_BOM) :], ()
    encoding = UTF16_BOMS.get(text[:2])
    if encoding is None:
        return text, ()
    decoded = text[2:].decode(encoding, "replace").encode()
    return decoded, (Problem("encoding", 1, f"text was {encoding}, read as such"),)
