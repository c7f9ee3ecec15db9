"""A SentencePiece vocabulary as `tokenizer.json`, for `transformers`.

`transformers` builds T5's tokenizer from `spiece.model` without the byte pieces that
our own vocabularies have: what they encode as bytes becomes unknown there, and an
embedding of such a text differs. This file states the whole tokenizer instead.

Source: github.com/huggingface/tokenizers (format); sentencepiece_model.proto (input).
"""

from __future__ import annotations

import base64
import os
import pathlib
from typing import Any

import sentencepiece
from google.protobuf import empty_pb2, unknown_fields

from tfdpsq.data import io

# Numbers of fields in sentencepiece's messages.
_NORMALIZER, _CHARACTER_MAP = 3, 2
_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


def save(directory: str | os.PathLike, model: bytes) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` into a directory.

    `model` is a SentencePiece unigram model with T5's special pieces first.
    """
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    steps: list[dict[str, Any]] = [
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    ]
    characters = _fields(_fields(model)[_NORMALIZER]).get(_CHARACTER_MAP)
    if characters:
        text = base64.b64encode(characters).decode()
        steps.insert(0, {"type": "Precompiled", "precompiled_charsmap": text})
    spaces = {"type": "Metaspace", "replacement": "\u2581", "split": True}
    spaces["prepend_scheme"] = "always"
    ended = [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": spaces,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": ended,
            "pair": ended,
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "decoder": spaces,
        "model": {
            "type": "Unigram",
            "unk_id": processor.unk_id(),
            "vocab": [[p, processor.get_score(i)] for i, p in enumerate(pieces)],
            "byte_fallback": any(map(processor.is_byte, range(len(pieces)))),
        },
    }
    io.write_json(pathlib.Path(directory, "tokenizer.json"), tokenizer)
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **_SPECIAL}
    about["model_input_names"] = ["input_ids", "attention_mask"]  # T5 has no segments
    io.write_json(pathlib.Path(directory, "tokenizer_config.json"), about)


def _fields(message: bytes) -> dict[int, Any]:
    """Returns the fields of a protocol buffer by number, the last of each."""
    parsed = empty_pb2.Empty.FromString(message)
    return {f.field_number: f.data for f in unknown_fields.UnknownFieldSet(parsed)}
