"""A tiny GPT-2 with one token a letter, for tests that sample and train."""

import json
from pathlib import Path

import jax

from jaxppo import create_model, save_pretrained
from jaxppo.config import make_config

LETTERS = "abcdefghijklmnopqrst"
BOS, EOS, PAD, VOCAB = 20, 21, 22, 24
ARCHITECTURE = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": VOCAB,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "initializer_range": 0.2,
}


def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*LETTERS, "<bos>", "<eos>", "<pad>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


def save_model(folder: Path, seed: int = 0) -> Path:
    """Writes a checkpoint folder with random weights and the tokenizer."""
    model = create_model(ARCHITECTURE)
    save_pretrained(folder, model, model.init(jax.random.key(seed)), make_tokenizer())
    return folder


def make_tiny_config(folder: Path, **overrides):
    """A config of 16 rollouts and 4 optimizer steps a cycle; section__option=value changes it."""
    options = {
        "train.checkpoint_dir": str(folder),
        "train.seq_length": 16,
        "train.total_steps": 16,
        "train.batch_size": 8,
        "train.eval_interval": 8,
        "train.checkpoint_interval": 8,
        "optimizer.kwargs.lr": 1e-2,
        "scheduler.name": "constant",
        "method.num_rollouts": 16,
        "method.chunk_size": 16,
        "method.ppo_epochs": 2,
        "method.gen_kwargs.max_new_tokens": 6,
    }
    options |= {key.replace("__", "."): value for key, value in overrides.items()}
    return make_config(options)


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


PROMPTS = ["ab", "c", "def", "gh", "ijkl", "m", "no", "pqr", "st", "ka"]


def letter_share(outputs, **_):
    """The share of the letters a to d in each output."""
    return [sum(c in "abcd" for c in output) / max(len(output), 1) for output in outputs]


def train_resumably(model_path, folder, reward_fn=letter_share, **overrides):
    """A run in which everything that has a state has one: adaptive KL, running scaling, momenta.

    Four cycles of four steps. Calls of the reward function: 1 evaluation, 2 and 3 cycles,
    4 evaluation and then a checkpoint, 5 and 6 cycles, 7 evaluation.
    """
    from jaxppo import train

    options = {
        "method__target": 0.5,
        "method__horizon": 64,
        "method__init_kl_coef": 0.05,
        "method__scale_reward": "running",
        "method__gen_kwargs__temperature": 0.9,
        "method__gen_kwargs__top_k": 12,
        "train__minibatch_size": 4,
    }
    return train(
        model_path,
        reward_fn,
        PROMPTS,
        metric_fn=lambda outputs, **_: {"letters": [len(output) for output in outputs]},
        config=make_tiny_config(folder, **options | overrides),
    )
