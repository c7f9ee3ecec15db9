"""A SentencePiece vocabulary as `tokenizer.json`, which needs no sentencepiece to read.

`transformers` builds T5's tokenizer from `spiece.model` without the byte pieces that
our own vocabularies have: what they encode as bytes becomes unknown there, and an
embedding of such a text differs. This file states the whole tokenizer instead.

Source: github.com/huggingface/tokenizers (format); sentencepiece_model.proto (input).
"""

from __future__ import annotations

import base64
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import sentencepiece

from tfdpsq import validation

TOKENIZER_FILE = "tokenizer.json"
_SPACE = "\u2581"
# Fields of sentencepiece's messages, by number.
_NORMALIZER, _CHARACTER_MAP = 3, 2
_SPECIAL = ("<pad>", "</s>", "<unk>")


def tokenizer_json(vocabulary: str | os.PathLike) -> str:
    """Returns the tokenizer of a SentencePiece unigram model as JSON.

    Args:
      vocabulary: the model's file, with T5's special pieces as its first three.

    Raises:
      DataError: it has other special pieces.
    """
    model = pathlib.Path(vocabulary).read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    if tuple(pieces[: len(_SPECIAL)]) != _SPECIAL:
        raise validation.DataError(
            vocabulary,
            f"its first pieces are {', '.join(pieces[: len(_SPECIAL)])}, not "
            f"{', '.join(_SPECIAL)}",
            "Give the vocabulary of a T5",
        )
    normalizer = dict(_fields(dict(_fields(model)).get(_NORMALIZER, b"")))
    steps: list[dict[str, Any]] = [
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    ]
    characters = normalizer.get(_CHARACTER_MAP, b"")
    if characters:
        text = base64.b64encode(characters).decode()
        steps.insert(0, {"type": "Precompiled", "precompiled_charsmap": text})
    spaces = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always"}
    ended = [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": piece,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, piece in enumerate(_SPECIAL)
        ],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": {**spaces, "split": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": ended,
            "pair": ended,
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "decoder": {**spaces, "split": True},
        "model": {
            "type": "Unigram",
            "unk_id": processor.unk_id(),
            "vocab": [[p, processor.get_score(i)] for i, p in enumerate(pieces)],
            "byte_fallback": any(map(processor.is_byte, range(len(pieces)))),
        },
    }
    return json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n"


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields number and content of a protobuf message's fields that have a length."""
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(message):
        key = number()
        kind = key & 7
        if kind == 0:
            number()
        elif kind == 2:
            size = number()
            yield key >> 3, message[place : place + size]
            place += size
        else:
            place += 8 if kind == 1 else 4
