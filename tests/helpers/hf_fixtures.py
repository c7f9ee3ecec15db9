"""Records what Hugging Face's T5 computes, for `test_parity.py`.

    pip install -c constraints.txt '.[stack,parity]'
    python -m helpers.hf_fixtures  # from tests/

Writes two models as `transformers` saves them (T5 1.0: relu, tied and scaled head;
T5 1.1: gated gelu, head of its own; heads × key width ≠ hidden in both) and what they
give on padded batches: logits, loss and all gradients by teacher forcing, and greedy
queries. Weights are drawn by NumPy and large, so that attention is sharp, relative
positions matter and norms are no mere ones. Documents and queries are long enough for
every bucket of relative positions. Made with transformers 5.23 and torch 2.13.
"""

import pathlib

import numpy as np

FIXTURES = pathlib.Path(__file__).parents[1] / "generator/checkpoints/fixtures"
SHAPE = {
    "vocab_size": 60,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 3,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
VERSIONS = {
    "1.0": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
EOS, UNKNOWN = 1, 2
NEW_TOKENS = 16
# The first ones by which some greedy queries end and others do not, no two tokens are
# nearly as likely (by 1e-3), and no input of a relu is within 2e-5 of 0, where rounding
# would decide about its gradient.
_SEEDS = {"1.0": 4, "1.1": 3}


def make_model(version):
    """A `T5ForConditionalGeneration` with weights drawn by NumPy."""
    import torch
    import transformers

    config = transformers.T5Config(**SHAPE, **VERSIONS[version])
    model = transformers.T5ForConditionalGeneration(config)
    if version == "1.1":
        # transformers 5 ties the heads of all new T5s, whatever their config says.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        getattr(model, "all_tied_weights_keys", {}).pop("lm_head.weight", None)
    random = np.random.default_rng(_SEEDS[version])
    for name, weight in sorted(model.named_parameters()):
        values = random.normal(size=weight.shape)
        if "layer_norm" in name:
            values = 1.0 + 0.3 * values
        elif name == "shared.weight":
            # A tied head would only repeat what the embedding alone decides.
            values *= 0.3 if version == "1.0" else 1.0
        elif "bias" not in name:
            values *= 1.3 * weight.shape[1] ** -0.5
        with torch.no_grad():
            weight.copy_(torch.tensor(values))
    return model.eval()


def make_inputs(seed, vocabulary_size, document_lengths, query_lengths):
    """Padded documents and queries; queries end in EOS."""
    random = np.random.default_rng(seed)
    made = {}
    for name, lengths in (("document", document_lengths), ("query", query_lengths)):
        lengths = np.array(lengths, np.int32)
        ids = random.integers(3, vocabulary_size, (len(lengths), lengths.max()))
        ids[np.arange(lengths.max()) >= lengths[:, None]] = 0
        made[f"{name}_ids"] = ids.astype(np.int32)
        made[f"{name}_lengths"] = lengths
    made["query_ids"][np.arange(len(lengths)), lengths - 1] = EOS
    return made


def torch_documents(inputs):
    """A batch's documents as `transformers` takes them."""
    import torch

    ids = torch.tensor(inputs["document_ids"], dtype=torch.int64)
    lengths = torch.tensor(inputs["document_lengths"])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}


def teacher_forced(model, inputs):
    """Logits, mean loss over real query tokens, and its gradients by weight."""
    import torch

    labels = torch.tensor(inputs["query_ids"], dtype=torch.int64)
    lengths = torch.tensor(inputs["query_lengths"])
    real = torch.arange(labels.shape[1]) < lengths[:, None]
    model.zero_grad()
    output = model(**torch_documents(inputs), labels=labels.masked_fill(~real, -100))
    output.loss.backward()
    gradients = {n: w.grad.numpy().copy() for n, w in model.named_parameters()}
    return output.logits.detach().numpy(), output.loss.item(), gradients


def greedy(model, inputs):
    """Queries by `generate`, [B, NEW_TOKENS].

    Our decoding never draws padding or the unknown piece, nor EOS first; the same is
    asked for here by `suppress_tokens` and `min_new_tokens`.
    """
    import torch

    with torch.no_grad():
        sequences = model.generate(
            **torch_documents(inputs),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=1,
            suppress_tokens=[0, UNKNOWN],
            do_sample=False,
            num_beams=1,
        )
    ids = sequences[:, 1:].numpy()
    padded = np.zeros((len(ids), NEW_TOKENS), np.int32)
    padded[:, : ids.shape[1]] = ids
    return padded


def main():
    """Writes the fixtures."""
    forced = make_inputs(1, SHAPE["vocab_size"], (100, 9, 41), (120, 6, 37))
    documents = make_inputs(2, SHAPE["vocab_size"], (30, 4, 17, 9, 25, 12), (1,) * 6)
    for version in VERSIONS:
        model = make_model(version)
        directory = FIXTURES / f"t5_{version}"
        model.save_pretrained(directory)
        (directory / "generation_config.json").unlink()
        logits, loss, gradients = teacher_forced(model, forced)
        real = np.arange(logits.shape[1]) < forced["query_lengths"][:, None]
        np.savez_compressed(
            FIXTURES / f"t5_{version}.npz",
            **forced,
            logits=logits[real],
            loss=loss,
            greedy_document_ids=documents["document_ids"],
            greedy_document_lengths=documents["document_lengths"],
            greedy_ids=greedy(model, documents),
            **{f"gradient/{name}": value for name, value in gradients.items()},
        )


if __name__ == "__main__":
    main()
