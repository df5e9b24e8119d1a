"""Reward models: classifiers of the model room as reward functions."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxppo.models import ModelError, load_pretrained

LENGTH_STEP = 32  # texts are padded to a multiple of this, so few shapes are compiled


def reward_model(
    name_or_path,
    *,
    label: int | str | None = None,
    output: str = "probability",
    batch_size: int = 64,
    max_length: int | None = None,
) -> Callable[..., list[float]]:
    """Makes a reward function of a sequence classifier, scored under jit on the device.

    Any family will do, and any tokenizer: texts are tokenised anew with the classifier's own.

    Args:
      name_or_path: a folder or hub id, as for `load_pretrained`.
      label: the output that is the score, by number or by its name in the checkpoint's
        `id2label`; None: the only one there is.
      output: "probability" (softmax over the labels, sigmoid for one) or "logit".
      batch_size: texts in one call.
      max_length: tokens read of each text, special ones included, from the side that its tokenizer
        keeps, as a rule the beginning; None: as many as the model can.

    Returns:
      A function with trlx's call; it scores `samples`, prompt and response together.

    Raises:
      ModelError: not a classifier, no tokenizer, or no such label.
    """
    model, params, tokenizer = load_pretrained(name_or_path)
    if model.score is None:
        raise ModelError(f"{name_or_path} has no score head: a reward model must be a classifier")
    if tokenizer is None:
        raise ModelError(f"{name_or_path} holds no tokenizer, so it can't read text")
    if output not in ("probability", "logit"):
        raise ValueError(f"output {output!r} is unknown; choose 'probability' or 'logit'")
    column = _column(model, name_or_path, label)
    limit = min(max_length or model.config.max_positions, model.config.max_positions)

    @jax.jit
    def score(params, tokens, mask):
        logits = model.score(params, tokens, mask)
        if output == "logit":
            return logits[:, column]
        if logits.shape[1] == 1:
            return jax.nn.sigmoid(logits[:, 0])
        return jax.nn.softmax(logits, axis=-1)[:, column]

    def encode(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        # cut by the tokenizer, which keeps the special tokens it puts around a text
        encoded = tokenizer(list(texts), truncation=True, max_length=limit)["input_ids"]
        rows = [ids or [0] for ids in encoded]
        width = min(limit, -(-max(map(len, rows)) // LENGTH_STEP) * LENGTH_STEP)
        tokens = np.zeros((batch_size, width), np.int32)
        mask = np.zeros((batch_size, width), bool)
        mask[:, 0] = True  # rows that only fill up the batch need a token to be read at
        for i, row in enumerate(rows):
            tokens[i, : len(row)], mask[i, : len(row)] = row, True
        return tokens, mask

    def reward_fn(samples, **_) -> list[float]:
        # the longest together, so that short texts are not padded for their sake
        order = sorted(range(len(samples)), key=lambda i: len(samples[i]))
        scores = np.zeros(len(samples), np.float32)
        pending = []
        for at in range(0, len(order), batch_size):
            rows = order[at : at + batch_size]
            pending.append((rows, score(params, *encode([samples[i] for i in rows]))))
        for rows, result in pending:
            scores[rows] = np.asarray(result)[: len(rows)]
        return scores.tolist()

    reward_fn.__name__ = f"reward_model({name_or_path})"
    return reward_fn


def _column(model, name, label) -> int:
    count = model.config.num_labels
    names = {str(v): int(k) for k, v in (model.hf_config.get("id2label") or {}).items()}
    if label is None and count == 1:
        return 0
    if isinstance(label, int) and 0 <= label < count:
        return label
    if label in names:
        return names[label]
    choices = ", ".join(names) or f"0 to {count - 1}"
    raise ModelError(f"{name} has no label {label!r}; choose one of: {choices}")
