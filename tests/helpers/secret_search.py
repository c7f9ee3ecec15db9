"""Searches a directory for secrets, in any form that a file may have.

`find_secrets` takes any directory and any list of secrets.
"""

import base64
import dataclasses
import gzip
import io
import json
import pathlib
import zipfile

import numpy as np

# Shorter patterns occur in weights by chance.
_SHORTEST = 6


@dataclasses.dataclass(frozen=True)
class Secret:
    """What must not be released.

    Attributes:
      name: what findings call it.
      value: an integer of at least 48 bits, a float, a text of at least 12 characters,
        or a list of at least four integers.
    """

    name: str
    value: object


def find_secrets(directory, secrets):
    """Searches all files below a directory, compressed ones too, and their names.

    Args:
      directory: the release.
      secrets: `Secret`s.

    Returns:
      Sorted texts, each "file: secret as form".
    """
    patterns = {}
    for secret in secrets:
        for pattern, form in forms(secret.value).items():
            patterns.setdefault(pattern, f"{secret.name} as {form}")
    index = _Index(patterns)
    found = set()
    for path in sorted(pathlib.Path(directory).rglob("*")):
        name = str(path.relative_to(directory))
        contents = [name.encode()]
        if path.is_file():
            contents += _unpacked(path.read_bytes())
        for content in contents:
            for pattern in index.occurring(content):
                found.add(f"{name}: {patterns[pattern]}")
    return sorted(found)


def forms(value):
    """Returns {bytes: what they are} of the ways to write a secret down."""
    if isinstance(value, int):
        assert value.bit_length() >= 48, "short numbers occur by chance"
        found = _number_forms(value)
    elif isinstance(value, float):
        found = _float_forms(value)
    elif isinstance(value, str):
        assert len(value) >= 12, "short texts occur by chance"
        found = _text_forms(value)
    else:
        found = _sequence_forms(value)
    found = {k: form for k, form in found.items() if len(k) >= _SHORTEST}
    assert found, f"{value!r} is too short to be found"
    return found


def _number_forms(value):
    """The number, and its 32-, 63- and 64-bit words, as TensorFlow keeps seeds."""
    found = {}
    words = {"": (value, max(16, -(-value.bit_length() // 8)))}
    for bits, name in ((64, "64-bit"), (63, "63-bit")):
        for place in range(-(-value.bit_length() // bits)):
            word = value >> (bits * place) & ((1 << bits) - 1)
            if word.bit_length() >= 40:
                words[f" of its {name} word {place}"] = (word, 8)
    for of, (word, size) in words.items():
        for text, form in (
            (str(word), "decimal"),
            (str(word - (1 << 8 * size)), "negative decimal"),
            (f"{word:x}", "hex"),
            (f"{word:X}", "hex"),
        ):
            found.update(_encoded(text.encode(), form + of))
            found[text.encode("utf-16-le")] = f"UTF-16 {form}{of}"
        for order in ("little", "big"):
            raw = word.to_bytes(size, order)
            found.update(_encoded(raw, f"{order}-endian bytes{of}"))
    return found


def _float_forms(value):
    """As JSON, as others print it, and in binary with double precision."""
    found = {}
    texts = {repr(value), str(np.float32(value)), f"{value:.6g}", f"{value:.8g}"}
    for text in texts:
        # A short decimal may be the end of a longer one: look at its neighbours.
        for before in ' :"[=>(':
            for after in ' ,"]}<)s\n':
                found[f"{before}{text}{after}".encode()] = "decimal"
        if len(text) >= 10:
            found.update(_encoded(text.encode(), "decimal"))
    for order in "<>":
        raw = np.array(value, f"{order}f8").tobytes()
        found.update(_encoded(raw, f"{order}f8 bytes"))
    return found


def _text_forms(value):
    """As text, also escaped, and as hex digits the bytes that they stand for."""
    found = {}
    for text, form in (
        (value, "text"),
        (value.upper(), "upper case"),
        (json.dumps(value)[1:-1], "JSON"),
        (value.encode().hex(), "hex of the text"),
    ):
        found = {**_encoded(text.encode(), form), **found}  # The first name stays.
    found[value.encode("utf-16-le")] = "UTF-16"
    try:
        raw = bytes.fromhex(value)
    except ValueError:
        return found
    found.update(_encoded(raw, "bytes"))
    found.update(_encoded(raw[::-1], "reversed bytes"))
    return found


def _sequence_forms(value):
    """The first of the numbers, as arrays hold them and as texts list them."""
    assert len(value) >= 4, "short lists occur by chance"
    found = {}
    for kind in ("<i4", ">i4", "<i8", ">i8"):
        # Of zeros, every file is full.
        raw = np.array(value[:4], kind).tobytes().lstrip(b"\0")
        found.update(_encoded(raw, f"{kind} array"))
    for separator in (", ", ",", " ", "\t", "\n", "\r\n", ";"):
        text = separator.join(map(str, value[:5]))
        found[text.encode()] = "list"
    return found


def _encoded(raw, form):
    """The bytes, and their base64 at each place in a longer one, both alphabets."""
    found = {raw: form}
    for skip in range(3):
        # Characters that also depend on the neighbours are left out.
        first = -(-skip * 8 // 6)
        last = (skip + len(raw)) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            found[encode(bytes(skip) + raw)[first:last]] = f"base64 of {form}"
    return found


def _unpacked(content, depth=3):
    """The content, and that of the files packed into it."""
    found = [content]
    if depth and content.startswith(b"\x1f\x8b"):
        found += _unpacked(gzip.decompress(content), depth - 1)
    if depth and content.startswith(b"PK\x03\x04"):  # npz and keras files, too.
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            for name in packed.namelist():
                found += [name.encode(), *_unpacked(packed.read(name), depth - 1)]
    return found


class _Index:
    """Patterns by their beginnings: thousands are sought in one go.

    Three bytes decide which of a content's places are looked at more closely.
    """

    def __init__(self, patterns):
        self._patterns = {}
        for pattern in patterns:
            start = int.from_bytes(pattern[:_SHORTEST], "little")
            self._patterns.setdefault(start, []).append(pattern)
        self._starts = np.array(sorted(self._patterns), np.uint64)
        self._begins = np.zeros(1 << 24, bool)
        self._begins[self._starts & np.uint64(0xFFFFFF)] = True

    def occurring(self, content):
        """Returns the patterns that a content holds."""
        data = np.frombuffer(content, np.uint8)
        count = len(data) - _SHORTEST + 1
        if count < 1:
            return set()
        three = sum(data[i : i + count].astype(np.uint32) << (8 * i) for i in range(3))
        places = np.nonzero(self._begins[three])[0]
        starts = sum(
            data[places + i].astype(np.uint64) << np.uint64(8 * i)
            for i in range(_SHORTEST)
        )
        starting = np.isin(starts, self._starts)
        return {
            pattern
            for place, start in zip(
                places[starting].tolist(), starts[starting].tolist()
            )
            for pattern in self._patterns[start]
            if content.startswith(pattern, place)
        }
