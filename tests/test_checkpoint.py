"""Checkpoints read back bit for bit, damage is named, and a failed save harms nothing."""

import gc
import shutil
import signal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxppo import checkpoint
from jaxppo.checkpoint import CheckpointError, forget_after, latest_step, restore, save
from jaxppo.core import KLState

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _collect():
    """Coroutines that Orbax leaves behind a failed read complain here, not in another test."""
    yield
    gc.collect()


class Inner(NamedTuple):
    kl: KLState
    flag: jax.Array


class State(NamedTuple):
    params: dict
    opt_state: tuple
    inner: Inner
    step: jax.Array


def make_state(seed=0, width=3):
    rng = np.random.default_rng(seed)
    # every pattern of bits may come up: NaNs with a payload, infinities, -0, denormals
    bits = rng.integers(0, 2**32, (16, width), np.uint32)
    params = {
        "block": {"kernel": jnp.asarray(bits.view(np.float32))},
        "half": jnp.asarray(rng.integers(0, 2**16, (33,), np.uint16).view(jnp.bfloat16)),
        "odd": jnp.asarray([np.nan, np.inf, -np.inf, -0.0, 1e-45, 0.1], jnp.float32),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lambda step: 1e-3))
    flag = jnp.asarray(rng.integers(0, 2, 5), bool)
    return State(
        params,
        optimizer.init(params),
        Inner(KLState(jnp.float32(0.1)), flag),
        jnp.int32(2**31 - 1),
    )


def empty(state):
    """The structure that is expected, as arrays of other contents."""
    return jax.tree.map(jnp.zeros_like, state)


def assert_bitwise(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def contents(folder):
    return {x: x.read_bytes() for x in sorted(folder.rglob("*")) if x.is_file()}


META = {"progress": {"cycle": 3, "best": 0.1, "first": None, "names": ["é", "a"]}}


def test_everything_reads_back_bit_for_bit(tmp_path):
    state = make_state()
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {
        "float32", "bfloat16", "int32", "bool",
    }  # fmt: skip
    save(tmp_path / "a" / "b", 7, state, META, keep=1)
    found, meta = restore(tmp_path / "a" / "b", 7, empty(state))
    assert_bitwise(found, state)
    assert isinstance(found, State)
    assert isinstance(found.inner.kl, KLState)
    assert meta == META
    shapes = jax.eval_shape(lambda: empty(state))  # shapes alone say as much
    assert_bitwise(restore(tmp_path / "a" / "b", 7, shapes)[0], state)


def test_paths_may_be_relative_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("run", 1, {"x": jnp.arange(3)}, {}, keep=1)
    assert latest_step("run") == 1
    assert restore("run", 1, {"x": jnp.zeros(3, jnp.int32)})[0]["x"].tolist() == [0, 1, 2]


def test_the_newest_stay(tmp_path):
    assert latest_step(tmp_path / "none") is None
    assert latest_step(tmp_path) is None
    for step in (0, 4, 8, 100, 1000):  # as numbers: 8 comes before 100
        save(tmp_path, step, {"x": jnp.full(2, step)}, {"step": step}, keep=2)
        assert latest_step(tmp_path) == step
    assert sorted(x.name for x in tmp_path.iterdir()) == ["100", "1000"]
    for step in (100, 1000):
        state, meta = restore(tmp_path, step, {"x": jnp.zeros(2, jnp.int32)})
        assert (state["x"].tolist(), meta) == ([step, step], {"step": step})


def test_reading_removes_and_changes_nothing(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, {"x": jnp.arange(2)}, {}, keep=3)
    before = contents(tmp_path)
    restore(tmp_path, 2, {"x": jnp.zeros(2, jnp.int32)})
    assert contents(tmp_path) == before


def test_what_is_no_complete_checkpoint_is_not_counted(tmp_path):
    save(tmp_path, 5, {"x": jnp.arange(2)}, {}, keep=1)
    # what a process killed while it saves leaves behind, and what others put there
    shutil.copytree(tmp_path / "5", tmp_path / "9.orbax-checkpoint-tmp")
    for folder in ("9.orbax-checkpoint-tmp-17", "step_10", "11 (copy)", "-12", "²", "١٣", "x"):
        (tmp_path / folder).mkdir()
    for file in ("14", "notes.txt"):
        (tmp_path / file).write_text("not a checkpoint")
    assert latest_step(tmp_path) == 5


def test_a_save_goes_on_beside_unfinished_ones(tmp_path):
    save(tmp_path, 5, {"x": jnp.arange(2)}, {}, keep=2)
    (tmp_path / "9.orbax-checkpoint-tmp").mkdir()
    save(tmp_path, 9, {"x": jnp.arange(2) + 1}, {}, keep=2)
    assert latest_step(tmp_path) == 9
    assert restore(tmp_path, 9, {"x": jnp.zeros(2, jnp.int32)})[0]["x"].tolist() == [1, 2]


def test_saving_a_step_twice_leaves_the_first(tmp_path):
    save(tmp_path, 5, {"x": jnp.arange(2)}, {"n": 1}, keep=1)
    before = contents(tmp_path)
    save(tmp_path, 5, {"x": jnp.arange(2) + 1}, {"n": 2}, keep=1)
    assert contents(tmp_path) == before


def test_later_steps_are_forgotten(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step, {"x": jnp.arange(2)}, {}, keep=3)
    forget_after(tmp_path, 4)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["2", "4"]
    forget_after(tmp_path, 3)
    forget_after(tmp_path, 3)
    assert latest_step(tmp_path) == 2
    forget_after(tmp_path / "none", 3)


def one_sentence(error, folder, step):
    text = str(error)
    assert str(folder / str(step)) in text
    assert "\n" not in text
    assert text.endswith("choose another --workdir or remove it")
    return True


OTHERS = {
    "a wider layer": lambda s: s._replace(params={**s.params, "odd": jnp.zeros(7)}),
    "a transposed layer": lambda s: s._replace(
        params={**s.params, "block": {"kernel": s.params["block"]["kernel"].T}}
    ),
    "a layer more": lambda s: s._replace(params={**s.params, "new": jnp.zeros(2)}),
    "a layer less": lambda s: s._replace(params={"half": s.params["half"]}),
    "another optimizer": lambda s: s._replace(opt_state=optax.sgd(0.1, 0.9).init(s.params)),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_another_models_state_is_refused(tmp_path, change):
    state = make_state()
    save(tmp_path, 1, state, {}, keep=1)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path, 1, change(empty(state)))
    assert one_sentence(caught.value, tmp_path, 1)
    assert contents(tmp_path) == before
    assert_bitwise(restore(tmp_path, 1, empty(state))[0], state)


def cut_data(folder):
    # Orbax keeps arrays in the largest files
    for file in (folder / "state").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def drop(name):
    return lambda folder: shutil.rmtree(folder / name)


DAMAGE = {
    "cut arrays": cut_data,
    "no arrays": drop("state"),
    "no JSON": drop("meta"),
    "torn JSON": lambda folder: (folder / "meta" / "metadata").write_text('{"progr'),
    "an empty folder": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
    "no such step": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_an_error_in_one_sentence(tmp_path, damage):
    state = make_state()
    save(tmp_path, 1, state, META, keep=2)
    save(tmp_path, 2, state, META, keep=2)
    damage(tmp_path / "2")
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path, 2, empty(state))
    assert one_sentence(caught.value, tmp_path, 2)
    assert_bitwise(restore(tmp_path, 1, empty(state))[0], state)  # the one before is whole


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    file = tmp_path / "checkpoints"
    file.write_text("mine")
    assert latest_step(file) is None
    for folder in (file, file / "below"):
        with pytest.raises(
            CheckpointError, match=r"checkpoint 3 can't be written to .*checkpoints"
        ):
            save(folder, 3, {"x": jnp.arange(2)}, {}, keep=1)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("room", [0, 200, 5000])
def test_a_disk_that_fills_up_leaves_the_older_ones(tmp_path, room):
    resource = pytest.importorskip("resource")
    state = {"x": jnp.asarray(np.random.default_rng(0).normal(size=5000))}
    save(tmp_path, 1, state, META, keep=1)
    before = contents(tmp_path / "1")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))  # files can't grow beyond it
    try:
        with pytest.raises(CheckpointError, match="checkpoint 2 can't be written"):
            save(tmp_path, 2, state, META, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path / "1") == before
    assert latest_step(tmp_path) == 1
    save(tmp_path, 2, state, META, keep=1)  # what was left of it is not in the way later
    assert_bitwise(restore(tmp_path, 2, empty(state))[0], state)
    assert [x.name for x in tmp_path.iterdir()] == ["2"]


def test_steps_below_the_newest_are_saved_too(tmp_path):
    # Orbax alone passes over them without a word
    for step in (5, 3):
        save(tmp_path, step, {"x": jnp.full(2, step)}, {}, keep=2)
    for step in (3, 5):
        like = {"x": jnp.zeros(2, jnp.int32)}
        assert restore(tmp_path, step, like)[0]["x"].tolist() == [step, step]


def test_meta_that_json_lacks_is_an_error(tmp_path):
    save(tmp_path, 1, {"x": jnp.arange(2)}, {}, keep=1)
    with pytest.raises((CheckpointError, TypeError)):
        save(tmp_path, 2, {"x": jnp.arange(2)}, {"f": object()}, keep=1)
    assert latest_step(tmp_path) == 1


def test_fingerprints_tell_parameters_apart_to_the_bit():
    tree = {"a": jnp.arange(4.0), "b": jnp.ones((2, 2), jnp.bfloat16)}
    same = {"a": jnp.arange(4.0), "b": jnp.ones((2, 2), jnp.bfloat16)}
    other = {**tree, "a": tree["a"].at[2].add(1e-6)}
    assert checkpoint.fingerprint(tree) == checkpoint.fingerprint(same)
    assert checkpoint.fingerprint(tree) != checkpoint.fingerprint(other)


def test_an_interrupt_while_saving_comes_afterwards(tmp_path, monkeypatch):
    """The checkpoint is whole, the interrupt is not lost, and the handler is as before."""
    real = checkpoint._manager

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(checkpoint, "_manager", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 3, {"a": jnp.ones(2)}, {}, keep=1)
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    assert checkpoint.latest_step(tmp_path) == 3
    restored, _ = checkpoint.restore(tmp_path, 3, {"a": jnp.zeros(2)})
    np.testing.assert_array_equal(restored["a"], [1, 1])
