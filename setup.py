"""Packaging of jaxppo. Every dependency carries its reason."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).parent / "README.md"

setup(
    name="jaxppo",
    version="0.1.0",
    description="Online reinforcement learning of language models in JAX: PPO as pure functions",
    long_description=README.read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["jaxppo", "jaxppo.*"]),
    package_data={
        "jaxppo.assets": ["*.txt", "NOTICE", "*/*.json", "*/*.safetensors"],
    },
    install_requires=[
        "jax>=0.10",  # typed keys, jax.set_mesh, AxisType
        "flax>=0.12",  # Linen modules, struct dataclasses
        "optax>=0.2.5",  # optimizer chains
        "orbax-checkpoint>=0.11.20",  # atomic checkpoints
        "chex>=0.1.90",  # shape and dtype checks at trace time
        "ml-collections>=1.0",  # config files and --config.a.b=c overrides
        "absl-py>=2.1",  # flags of the command line
        "numpy>=2.0",
        "transformers>=5.0",  # configs, tokenizers, chat templates, hub download (no torch)
        "jinja2>=3.1",  # renders chat templates; transformers does not install it
        "tokenizers>=0.22",
        "safetensors>=0.5",
        "rich>=13.7",  # progress bars and tables in the console
    ],
    extras_require={
        "tensorboard": ["tensorboardX>=2.6"],
        "wandb": ["wandb>=0.18"],
        "datasets": ["datasets>=3.0"],  # the IMDB reviews of trlx's example
        "gguf": ["gguf>=0.17"],  # reads the files of llama.cpp
        "sentiment": ["vaderSentiment>=3.3.2"],  # an independent check of the sentiment reward
        "reasoning": ["math-verify>=0.8", "reasoning-gym>=0.1.20"],  # verifiers and tasks
        "judge": ["httpx>=0.27"],  # rewards from a language model behind an endpoint
        "test": [
            "pytest>=8.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.115",
            "ruff>=0.8",
            "tensorboardX>=2.6",
            "vaderSentiment>=3.3.2",
            "gguf>=0.17",
            "httpx>=0.27",
            "math-verify>=0.8",
        ],
        # Models computed by torch as an independent oracle; the newest CPU build will do.
        "parity": ["torch>=2.5", "peft>=0.17"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
