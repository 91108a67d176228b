"""Keys: what they depend on, that nothing else changes them, and that nothing clashes."""

import subprocess
import sys

import numpy as np
import pytest

from blocktable.core.errors import ConfigError, RequestError
from blocktable.prefix.keys import KEY_BYTES, KeyHasher, MediaItem
from blocktable.prefix.sequence import TokenSequence, as_token_ids

ALGORITHMS = sorted(KEY_BYTES)


def keys(tokens, size=4, seed: str | int = "s", algo="sha256", **extra) -> list[bytes]:
    made = TokenSequence(tokens, KeyHasher(algo, seed, [size]), size, **extra)
    return [key.tobytes() for key in list(made.keys())]


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("extra", ["", ", salt='x', adapter=b'y', media=[(2, 3, 'img')]"])
def test_equal_seed_gives_equal_keys_in_every_process(algo: str, extra: str) -> None:  # case B15
    program = (
        "from blocktable.prefix.keys import KeyHasher;"
        "from blocktable.prefix.sequence import TokenSequence;"
        f"k = KeyHasher('{algo}', SEED, [4]);"
        f"print(TokenSequence(range(16) and list(range(16)), k, 4{extra}).keys().tobytes().hex())"
    )

    def run(seed: str) -> str:
        command = [sys.executable, "-c", program.replace("SEED", seed)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    fixed, other, unset = run("7"), run("8"), run("None")
    assert fixed == run("7")
    width = 2 * KEY_BYTES[algo]
    parts = [{text[i : i + width] for i in range(0, 4 * width, width)} for text in
             (fixed, other, unset, run("None"))]  # fmt: skip
    assert len(set.union(*parts)) == 16  # every key changes with the seed, and without one


def test_known_keys() -> None:
    """The encoding written down once more, so that it cannot drift."""
    import hashlib
    import struct

    def frame(tag: bytes, payload: bytes) -> bytes:
        return tag + struct.pack("<Q", len(payload)) + payload

    root = hashlib.sha256(
        frame(b"domn", b"blocktable.root.1") + frame(b"algo", b"sha256")
        + frame(b"size", struct.pack("<I", 4)) + frame(b"seed", b"i5") + frame(b"salt", b"sx")
    ).digest()  # fmt: skip
    stream = root + b"blocktable.chain.1".ljust(32, b"\0")
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    want = []
    for i in (0, 4):
        stream += struct.pack("<4I", *tokens[i : i + 4])
        want.append(hashlib.sha256(stream).digest())
    assert keys(tokens, seed=5, salt="x") == want


def test_default_needs_no_seed_and_is_not_predictable() -> None:
    assert KeyHasher("sha256", None, [4]).root() != KeyHasher("sha256", None, [4]).root()


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_what_must_differ(algo: str) -> None:  # case B15 and its variants
    made = [
        keys([1, 23], 2, algo=algo), keys([12, 3], 2, algo=algo), keys([123, 0], 2, algo=algo),
        keys([1, 2, 3, 4], 2, algo=algo), keys([1, 2, 3, 4], 4, algo=algo),
        keys([10, 40], 2, algo=algo), keys([41, 9], 2, algo=algo), keys([41, 39], 2, algo=algo),
        keys([1, 23], 2, algo=algo, salt=""), keys([1, 23], 2, algo=algo, salt="a"),
        keys([1, 23], 2, algo=algo, adapter="a"), keys([1, 23], 2, algo=algo, salt=b"a"),
        keys([1, 23], 2, algo=algo, salt="a", adapter="b"),
        keys([1, 23], 2, algo=algo, salt="ab"), keys([1, 23], 2, algo=algo, adapter="ab"),
    ]  # fmt: skip
    flat = [key for part in made for key in part]
    assert len(set(flat)) == len(flat)
    assert len({len(key) for key in flat}) == 1


def test_a_key_chains_its_parent() -> None:
    one, two = keys([1, 2, 3, 4, 9, 9, 9, 9]), keys([1, 2, 3, 5, 9, 9, 9, 9])
    assert one[0] != two[0] and one[1] != two[1]
    assert keys([1, 2, 3, 4, 9, 9, 9])[0] == one[0] and len(keys([1, 2, 3, 4, 9, 9, 9])) == 1


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("size", [1, 3, 4, 16, 17])
def test_growing_gives_the_same_keys_as_hashing_at_once(algo: str, size: int) -> None:
    rng = np.random.default_rng(size)
    tokens = rng.integers(0, 2**31, 100)
    hasher = KeyHasher(algo, 1, [size])
    grown = TokenSequence(tokens[:5], hasher, size)
    for start in range(5, 100, 19):
        grown.keys()
        grown.extend(tokens[start : start + 19])
    whole = TokenSequence(tokens, hasher, size)
    assert (grown.keys() == whole.keys()).all() and len(whole.keys()) == 100 // size
    assert grown.hasher_after(2).digest() == whole.hasher_after(2).digest()


def test_media_identity_is_used_whole() -> None:  # case B17
    tokens = [1] * 8 + [7] * 32 + [2] * 8

    def of(identity: str, offset: int = 8) -> list[bytes]:
        return keys(tokens, 16, media=[MediaItem(offset, 16 if offset == 24 else 32, identity)])

    first, second = of("ffffaaaa1234"), of("ffffbbbb1234")
    assert first == of("ffffaaaa1234")
    assert not set(first) & set(second)
    shifted = of("ffffaaaa1234", 24)
    assert shifted[0] == keys(tokens, 16)[0]  # text before the item still hits
    assert not set(shifted[1:]) & set(first)
    assert len({tuple(of(f"{i:x}1234")) for i in range(100)}) == 100


def test_media_part_and_place_enter_the_key() -> None:
    tokens = [7] * 32
    spans = (
        [], [(0, 16, "a")], [(0, 17, "a")], [(1, 15, "a")], [(0, 8, "a"), (8, 8, "a")],
        [(0, 16, "a"), (16, 16, "b")], [(0, 16, "b"), (16, 16, "a")], [(0, 32, "a")],
    )  # fmt: skip
    made = [keys(tokens, 16, media=media) for media in spans]
    assert len({part[-1] for part in made}) == len(made)


@pytest.mark.parametrize("media", [[(-1, 2, "a")], [(0, 0, "a")], [(30, 3, "a")], [(0, 1, 5)]])
def test_bad_media(media: list) -> None:
    with pytest.raises(RequestError):
        keys([7] * 32, 16, media=media)


@pytest.mark.parametrize("bad", [
    [-1], [2**31], [2**63], [1.5], ["a"], [None], np.array([1.0]), np.array([[1]]),
    np.array([2**40]), np.array([-5]),
])  # fmt: skip
def test_bad_token_ids(bad) -> None:  # case B44
    with pytest.raises(RequestError):
        as_token_ids(bad)


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda t: np.array(t, np.uint16)])
def test_token_ids_in_any_form(kind) -> None:
    got = as_token_ids(kind([0, 5, 65535]))
    assert got.dtype == np.int32 and got.tolist() == [0, 5, 65535]


def test_unknown_algorithm() -> None:
    with pytest.raises(ConfigError, match="md5"):
        KeyHasher("md5", None, [4])
    with pytest.raises(RequestError, match="salt"):
        keys([1, 2], salt=5)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize(
    "bad", [True, False, np.True_, 1.0, 1.5, -1, 2**31, 2**70, "1", None, float("nan")]
)
def test_what_is_no_token_id_is_refused_with_and_without_the_helper(
    bad: object, kind: type, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("blocktable.prefix.sequence.load", lambda: None)
    assert as_token_ids(kind([5, 1, 0])).tolist() == [5, 1, 0]
    with pytest.raises(RequestError):
        as_token_ids(kind([5, bad, 7]))
