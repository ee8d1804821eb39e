"""The workloads: equal models, different batches, exact resumption, learning, their data and their full sizes."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from PIL import Image

import asyncoll
from tests.support.cases import SIZES, looped
from trainers.settings import Settings
from trainers.workloads import WORKLOADS, Digits, Hyperplane, Workload
from trainers.workloads.base import Epochs, bucketed, shuffled
from trainers.workloads.classification import Cifar, ImageNet
from trainers.workloads.images import CifarImages, FolderImages, GeneratedImages
from trainers.workloads.language import Bert, Language, TextWorkload
from trainers.workloads.maze import NAME, Maze
from trainers.workloads.navigation import Navigation, play
from trainers.workloads.text import MARKS, MASK, PAD, sequences
from trainers.workloads.transformer import LanguageModel, MaskedModel, Shape
from trainers.workloads.video import LSTMClassifier, Video, video_frames


class SmallHyperplane(Hyperplane):
    DIMENSIONS, POINTS, HELD_OUT = 64, 1024, 256


SMALL: dict[str, Callable[..., Workload]] = {**WORKLOADS, "hyperplane": SmallHyperplane}


def parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def vector(module: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def train(workload: Workload, steps: int, learning_rate: float, momentum: float) -> None:
    optimizer = workload.optimizer(learning_rate, momentum)
    for _ in range(steps):
        optimizer.zero_grad()
        workload.loss().backward()
        optimizer.step()


# -- all workloads -------------------------------------------------------------------------------


@looped("name", WORKLOADS)
def test_a_workload_says_what_it_is(name: str) -> None:
    workload = WORKLOADS[name]
    assert workload.name == name
    assert workload.summary.endswith(".")
    assert "\n" not in workload.summary
    assert workload.metric
    Settings.of("allreduce_sgd", name)  # which takes its defaults


@looped("name", WORKLOADS)
def test_models_are_equal_and_batches_differ(name: str) -> None:
    ranks = [SMALL[name](rank, 3, 4, 7) for rank in range(3)]
    other = SMALL[name](0, 3, 4, 8)
    assert all(torch.equal(vector(rank.model), vector(ranks[0].model)) for rank in ranks)
    assert not torch.equal(vector(other.model), vector(ranks[0].model))
    assert len({float(workload.loss().detach()) for workload in (*ranks, other)}) == 4
    assert all(workload.weight > 0 for workload in ranks)


@looped("name", WORKLOADS)
def test_a_workload_says_whether_weights_differ(name: str) -> None:
    workload = SMALL[name](0, 1, 4, 0)
    weights = set()
    for _ in range(41 if name == "navigation" else 3):  # 41: five rollouts
        workload.loss()
        weights.add(workload.weight)
    assert workload.is_weighted is (len(weights) > 1)


@looped(
    ("name", "batch", "steps", "learning_rate", "momentum", "least"),
    [
        ("digits", 32, 60, 0.5, 0.0, 0.8),  # chance: 0.1
        ("digits-wide", 32, 30, 0.5, 0.0, 0.6),
        ("hyperplane", 32, 60, 0.1, 0.0, 0.8),  # chance: 0
        ("video", 16, 50, 1e-2, 0.9, 0.25),  # chance: 0.08
        ("cifar", 16, 60, 0.1, 0.9, 0.2),  # chance: 0.1
        ("imagenet", 8, 60, 0.03, 0.9, 0.2),  # chance: 0.1
        ("navigation", 16, 250, 1e-2, 0.9, 0.15),  # random moves: 0.03
    ],
)
def test_it_is_learnt(name: str, batch: int, steps: int, learning_rate: float, momentum: float, least: float) -> None:
    workload = SMALL[name](0, 1, batch, 0)
    before = workload.score()
    train(workload, steps, learning_rate, momentum)
    assert before < 0.2
    assert workload.score() > least


@looped("kind", [Language, Bert])
def test_text_is_learnt(kind: type[TextWorkload], tmp_path: Path) -> None:
    """Better than by the frequencies of single bytes: here eight in cycles of different step and length."""
    cycles = ["".join("abcdefgh"[step * k % 8] for k in range(length)) for length in range(16, 60) for step in range(8)]
    (tmp_path / "cycles.txt").write_text("\n\n".join(cycles))
    workload = kind(0, 1, 16, 0, data=tmp_path)
    train(workload, 60, 1e-2, 0.9)
    assert workload.score() > 1 - 0.8 * math.log(8) / math.log(MARKS)


@looped("name", WORKLOADS)
def test_a_resumed_run_has_the_same_bits(name: str) -> None:
    def steps(workload: Workload, count: int) -> list[tuple[float, float]]:
        seen = []
        for _ in range(count):
            loss = workload.loss()
            gradients = torch.autograd.grad(loss, list(workload.model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(workload.model.parameters(), gradients, strict=True):
                    parameter -= 0.01 * gradient
            seen.append((float(loss.detach()), workload.weight))
        return seen

    unbroken = SMALL[name](1, 3, 4, 7)
    steps(unbroken, 5)
    file = io.BytesIO()
    torch.save([unbroken.model.state_dict(), unbroken.state_dict()], file)
    expected = steps(unbroken, 11)  # more than a rollout has losses

    resumed = SMALL[name](1, 3, 4, 7)
    model, stream = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    resumed.model.load_state_dict(model)
    resumed.load_state_dict(stream)
    assert steps(resumed, 11) == expected
    assert torch.equal(vector(resumed.model), vector(unbroken.model))


@looped("name", WORKLOADS)
def test_the_state_of_another_stream_is_refused(name: str) -> None:
    state = SMALL[name](1, 3, 4, 7).state_dict()
    for rank, size, batch, seed, words in (
        (0, 3, 4, 7, "rank 1 instead of 0"),
        (1, 4, 4, 7, "size 3 instead of 4"),
        (1, 3, 5, 7, "batch 4 instead of 5"),
        (1, 3, 4, 8, "seed 7 instead of 8"),
    ):
        with pytest.raises(asyncoll.UsageError, match=words):
            SMALL[name](rank, size, batch, seed).load_state_dict(state)
    with pytest.raises(asyncoll.UsageError, match="workload 'other' instead of"):
        SMALL[name](1, 3, 4, 7).load_state_dict({**state, "workload": "other"})


@looped("name", WORKLOADS)
def test_scoring_changes_nothing(name: str) -> None:
    scored, other = (SMALL[name](0, 1, 4, 3) for _ in range(2))
    random = torch.random.get_rng_state()
    assert scored.score() == scored.score()
    assert torch.equal(torch.random.get_rng_state(), random)
    assert scored.model.training
    assert all(torch.equal(*pair) for pair in zip(scored.model.buffers(), other.model.buffers(), strict=True))
    assert float(scored.loss().detach()) == float(other.loss().detach())


@looped("name", sorted({*WORKLOADS} - {"navigation"}))
def test_a_batch_above_the_share_is_a_usage_error(name: str) -> None:
    with pytest.raises(asyncoll.UsageError, match=r"a batch of 64 is more than a rank's share of \d+ samples"):
        WORKLOADS[name](0, 5000, 64, 0)


@looped("name", sorted({*WORKLOADS} - {"language", "bert", "cifar", "imagenet"}))
def test_data_for_a_workload_that_reads_none_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(asyncoll.UsageError, match=f"{name} reads no files: leave out --data"):
        WORKLOADS[name](0, 1, 4, 0, data=tmp_path)


@looped("name", ["language", "bert", "cifar", "imagenet"])
def test_missing_data_are_told_with_the_remedy(name: str, tmp_path: Path) -> None:
    for data in (tmp_path, tmp_path / "missing"):
        with pytest.raises(asyncoll.UsageError, match=r"put .* or leave out --data|unpack .* or leave out --data"):
            WORKLOADS[name](0, 1, 4, 0, data=data)


@looped("name", ["digits", "digits-wide"])
def test_a_full_size_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(asyncoll.UsageError, match=f"{name} has one size only: leave out --full"):
        WORKLOADS[name](0, 1, 4, 0, full=True)


def test_generated_data_are_told() -> None:
    synthetic = {name for name in WORKLOADS if SMALL[name](0, 1, 4, 0).is_synthetic}
    assert synthetic == {"video", "cifar", "imagenet", "navigation"}


@looped(
    ("build", "count"),
    [
        (lambda: Cifar.network(True, 10), 467_194),  # Li et al., PPoPP 2020, table 1
        (lambda: ImageNet.network(True, 1000), 25_559_081),  # likewise
        (lambda: LSTMClassifier(Video.FULL), 34_663_525 + 4 * 2048),  # and torch's second bias
        (lambda: Language.network(Language.FULL), 61_362_176 + 2048),
        (lambda: Bert.network(Bert.FULL), 133_547_324 - 768 * 769 - 2 * 769 - 2 * 768),  # pooler, second task, segments
        (lambda: Navigation.network(True), 8_475_084),
        (lambda: Language.network(Language.SMALL), 215_616),
        (lambda: Bert.network(Bert.SMALL), 270_531),
        (lambda: LSTMClassifier(Video.SMALL), 30_028),
        (lambda: Cifar.network(False, 10), 20_034),
        (lambda: ImageNet.network(False, 10), 130_962),
        (lambda: Navigation.network(False), 12_485),
    ],
)
def test_networks_have_the_stated_size(build: Callable[[], torch.nn.Module], count: int) -> None:
    with torch.device("meta"):
        assert parameters(build()) == count


@looped(
    ("name", "module", "words"),
    [
        ("navigation", "gymnasium", r"navigation needs gymnasium: pip install 'asyncoll\[trainers\]'"),
        ("imagenet", "PIL", "a folder of images needs Pillow: pip install pillow"),
    ],
)
def test_a_missing_package_is_told(
    name: str, module: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(asyncoll.UsageError, match=words):
        WORKLOADS[name](0, 1, 4, 0, **({"data": tmp_path} if name == "imagenet" else {}))


# -- orders of samples ---------------------------------------------------------------------------


@looped("size", SIZES)
def test_ranks_share_all_samples_of_an_epoch(size: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 500, 1000)
    for epoch in range(2):
        mine = [shuffled(1000, rank, size, 5)(epoch) for rank in range(size)]
        assert sorted(np.concatenate(mine)) == list(range(1000))
        mine = [bucketed(lengths, 7, rank, size, 5)(epoch) for rank in range(size)]
        assert len(set(np.concatenate(mine))) == sum(map(len, mine)) == 1000 // 7 // size * size * 7
        for batch in np.concatenate(mine).reshape(-1, 7):
            assert lengths[batch].max() <= 1.2 * lengths[batch].min() + 7
    assert not np.array_equal(*(bucketed(lengths, 7, 0, size, 5)(epoch) for epoch in range(2)))


@looped(("own", "batch"), [(10, 3), (9, 3), (3, 3), (7, 1)])
def test_epochs_follow_each_other_and_leave_out_the_rest(own: int, batch: int) -> None:
    epochs = Epochs(lambda epoch: 100 * epoch + np.arange(own), batch)
    steps = own // batch
    for count in range(3 * steps):
        epoch, step = divmod(count, steps)
        assert epochs.position == (epoch, step)
        assert list(epochs.next_rows()) == [100 * epoch + step * batch + k for k in range(batch)]
    epochs.position = (1, steps - 1)
    assert epochs.next_rows()[0] == 100 + (steps - 1) * batch
    assert epochs.next_rows()[0] == 200


def test_digits_are_those_of_the_shared_permutation() -> None:
    whole, half = Digits(0, 1, 8, 5), Digits(1, 2, 4, 5)
    for _ in range(3):
        assert torch.equal(whole.next_batch()[0][1::2], half.next_batch()[0])


# -- hyperplane ----------------------------------------------------------------------------------


def points_of_an_epoch(size: int, batch: int) -> torch.Tensor:
    """All points that `size` ranks see in one epoch, in an order of their own."""
    shares = [SmallHyperplane(rank, size, batch, seed=5) for rank in range(size)]
    rows = [torch.cat(share.next_batch(), dim=1) for share in shares for _ in range(1024 // size // batch)]
    points = torch.cat(rows)
    return points[points[:, 0].argsort()]


def test_the_points_do_not_depend_on_the_number_of_ranks() -> None:
    alone = points_of_an_epoch(1, 128)
    assert len(alone) == len(alone[:, 0].unique()) == 1024
    assert torch.equal(points_of_an_epoch(4, 64), alone)
    assert torch.equal(points_of_an_epoch(8, 128), alone)


def test_the_hyperplane_has_the_papers_size() -> None:
    share = Hyperplane(rank=5, size=256, batch=8, seed=0)
    assert parameters(share.model) == 8193
    x, y = share.next_batch()
    assert (x.shape, y.shape) == ((8, 8192), (8, 1))
    assert Hyperplane.POINTS == 32768


# -- text ----------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Two files of 200 paragraphs each, of different words and lengths."""
    for name in ("one.txt", "two.py"):
        paragraphs = [f"{name} number {n} " + "some words " * (n % 60) for n in range(200)]
        (tmp_path / name).write_text("\n\n".join(paragraphs))
    (tmp_path / "ignored.bin").write_bytes(b"nothing of this is read\n\n" * 100)
    return tmp_path


def test_the_paragraphs_are_those_of_the_files(texts: Path) -> None:
    train, held_out = sequences(texts, MARKS, 10_000)
    parts = [
        [
            bytes(map(int, part.tokens[start : start + length]))
            for start, length in zip(part.starts, part.lengths, strict=True)
        ]
        for part in (train, held_out)
    ]
    expected = [text for name in ("one.txt", "two.py") for text in (texts / name).read_bytes().split(b"\n\n")]
    assert sorted(parts[0] + parts[1]) == sorted(text for text in expected if len(text) >= 16)
    assert not set(parts[0]) & set(parts[1])
    assert 0.01 < len(parts[1]) / len(expected) < 0.1


def test_long_paragraphs_are_cut_and_batches_padded(texts: Path) -> None:
    whole, _ = sequences(texts, MARKS, 10_000)
    cut, _ = sequences(texts, MARKS, 64)
    assert cut.lengths.max() == 64
    assert np.array_equal(cut.tokens, whole.tokens)
    assert cut.lengths.sum() >= whole.lengths.sum() - len(whole.lengths)  # last pieces of one byte are left out
    batch = cut.padded(np.array([0, 1, 2, 3]))
    assert batch.shape == (4, max(cut.lengths[:4]))
    for row, length in zip(batch, cut.lengths, strict=False):
        assert torch.all(row[:length] < 256)
        assert torch.all(row[length:] == PAD)


def test_frequent_words_are_tokens_and_others_are_spelled(texts: Path) -> None:
    by_bytes, _ = sequences(texts, MARKS, 10_000)
    by_words, _ = sequences(texts, MARKS + 2, 10_000)
    text = bytes(map(int, by_bytes.tokens))
    assert set(by_words.tokens[by_words.tokens >= MARKS]) == {MARKS, MARKS + 1}
    spelled = b"".join({MARKS: b"some", MARKS + 1: b"words"}.get(int(t), bytes([min(t, 255)])) for t in by_words.tokens)
    assert spelled == text
    assert b"number" in text


def test_a_text_of_ones_own_is_read(texts: Path) -> None:
    for workload in (Language(0, 1, 4, 0, data=texts), Bert(0, 1, 4, 0, data=texts)):
        workload.loss().backward()
        assert not workload.is_synthetic
        with pytest.raises(asyncoll.UsageError, match="sequences"):
            WORKLOADS[workload.name](0, 1, 4, 0).load_state_dict(workload.state_dict())


def test_steps_of_language_differ_in_length() -> None:
    workload = Language(0, 1, 8, 0)
    tokens = []
    for _ in range(20):
        workload.loss()
        tokens.append(workload.weight)
    assert max(tokens) > 5 * min(tokens)


def test_what_comes_later_does_not_change_predictions() -> None:
    torch.manual_seed(0)
    model = LanguageModel(Shape(50, 16, 2, 4, 32))
    tokens = torch.randint(50, (3, 20))
    torch.testing.assert_close(model(tokens)[:, :11], model(tokens[:, :11]))
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 50
    assert not torch.allclose(model(changed)[:, 10], model(tokens)[:, 10])


def test_padding_does_not_change_masked_predictions() -> None:
    torch.manual_seed(0)
    model = MaskedModel(Shape(300, 16, 2, 4, 32))
    tokens = torch.randint(256, (3, 20))
    chosen = torch.rand(3, 20) < 0.3
    padded = torch.cat([tokens, torch.full((3, 5), PAD)], dim=1)
    padded_chosen = torch.cat([chosen, torch.zeros(3, 5, dtype=torch.bool)], dim=1)
    logits = model(tokens, torch.ones_like(chosen), chosen)
    torch.testing.assert_close(model(padded, padded != PAD, padded_chosen), logits)
    changed = tokens.clone()
    changed[~chosen] = 7
    assert not torch.allclose(model(changed, torch.ones_like(chosen), chosen), logits)


def test_bert_predicts_15_percent_and_masks_most_of_them() -> None:
    workload = Bert(0, 1, 32, 0)
    seen: list[tuple[torch.Tensor, ...]] = []
    workload.model.register_forward_pre_hook(lambda _, given: seen.append(given))
    predicted = 0.0
    for _ in range(2):
        workload.loss()
        predicted += workload.weight
    inputs, is_token, chosen = (torch.cat([given[k].flatten() for given in seen]) for k in range(3))
    assert predicted == chosen.sum()
    assert torch.all(is_token[chosen])
    assert predicted / is_token.sum() == pytest.approx(0.15, abs=0.01)
    assert torch.all(chosen[inputs == MASK])
    assert (inputs[chosen] == MASK).float().mean() == pytest.approx(0.8, abs=5 * (0.16 / predicted) ** 0.5)


# -- video ---------------------------------------------------------------------------------------


def test_videos_have_the_lengths_of_ucf101() -> None:
    frames = video_frames(100_000, seed=3)
    assert np.median(frames) == pytest.approx(167, rel=0.01)
    assert frames.std() == pytest.approx(97, rel=0.02)
    assert frames.mean() == pytest.approx(188, rel=0.01)
    assert frames.min() == 29
    assert 1200 < frames.max() <= 1776
    assert np.array_equal(video_frames(10, 3), frames[:10])


# -- images --------------------------------------------------------------------------------------


def test_generated_images_depend_on_their_number_alone() -> None:
    images = GeneratedImages(5, range(100, 200), 10, 16)
    one, labels = images.read(np.array([3, 14, 25]), None)
    other, _ = images.read(np.array([25, 3]), np.random.default_rng(0))
    assert (one.shape, one.dtype, labels.tolist()) == ((3, 3, 16, 16), torch.float32, [3, 4, 5])
    assert torch.equal(one[[2, 0]], other)
    later, _ = GeneratedImages(5, range(103, 200), 10, 16).read(np.array([0]), None)
    assert not torch.equal(one[0], GeneratedImages(6, range(100, 200), 10, 16).read(np.array([3]), None)[0][0])
    assert later.shape == (1, 3, 16, 16)


@pytest.fixture
def cifar_files(tmp_path: Path) -> Path:
    """CIFAR-10's binary version with 20 images in each file: image i has the label i % 10 and the grey level 10 i."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in (*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"):
        records = [bytes([i % 10]) + bytes([10 * i]) * 3072 for i in range(20)]
        (folder / name).write_bytes(b"".join(records))
    return tmp_path


def test_cifars_files_are_read(cifar_files: Path) -> None:
    for side in (32, 16):
        images = CifarImages(cifar_files, train=True, side=side)
        assert images.count == 100
        read, labels = images.read(np.array([23, 7]), None)
        assert (read.shape, labels.tolist()) == ((2, 3, side, side), [3, 7])
        for image, level in zip(read, (30, 70), strict=True):
            expected = (level / 255 - torch.tensor([0.4914, 0.4822, 0.4465])) / torch.tensor([0.2470, 0.2435, 0.2616])
            torch.testing.assert_close(image, expected[:, None, None].expand(3, side, side))
    assert CifarImages(cifar_files / "cifar-10-batches-bin", train=False, side=16).count == 20
    workload = Cifar(0, 2, 8, 0, data=cifar_files)
    assert not workload.is_synthetic
    workload.loss().backward()
    assert 0.0 <= workload.score() <= 1.0


def test_training_images_are_moved_and_mirrored(cifar_files: Path) -> None:
    images = CifarImages(cifar_files, train=True, side=32)
    rows = np.full(50, 3)
    still, _ = images.read(rows, None)
    moved, _ = images.read(rows, np.random.default_rng(0))
    again, _ = images.read(rows, np.random.default_rng(0))
    assert torch.equal(moved, again)
    assert len({image.numpy().tobytes() for image in moved}) > 10
    assert torch.equal(moved[:, :, 4:-4, 4:-4], still[:, :, 4:-4, 4:-4])


def test_files_that_are_not_cifars_are_refused(cifar_files: Path) -> None:
    path = cifar_files / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(asyncoll.UsageError, match=r"data_batch_3.bin is not a file of CIFAR-10's binary version"):
        Cifar(0, 1, 4, 0, data=cifar_files)
    path.unlink()
    with pytest.raises(asyncoll.UsageError, match=r"data_batch_3.bin.*not the Python version"):
        Cifar(0, 1, 4, 0, data=cifar_files / "cifar-10-batches-bin")


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Two classes of ten images for training and four held out, red and blue, of different sizes."""
    for part, count in (("train", 10), ("val", 4)):
        for name, colour in (("n1", (255, 0, 0)), ("n2", (0, 0, 255))):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                suffix = ("png", "JPEG")[number % 2]
                Image.new("RGB", (60 + number, 50), colour).save(tmp_path / part / name / f"{number}.{suffix}")
    return tmp_path


def test_a_folder_of_images_is_read(image_folder: Path) -> None:
    images = FolderImages(image_folder, train=True, side=32)
    assert (images.count, images.classes) == (20, 2)
    read, labels = images.read(np.array([0, 19]), np.random.default_rng(0))
    assert (read.shape, read.dtype, labels.tolist()) == ((2, 3, 32, 32), torch.float32, [0, 1])
    assert read[0, 0].mean() == pytest.approx((1 - 0.485) / 0.229, abs=1e-3)
    assert read[0, 2].mean() == pytest.approx(-0.406 / 0.225, abs=1e-3)
    assert FolderImages(image_folder, train=False, side=32).count == 8
    workload = ImageNet(0, 1, 10, 0, data=image_folder)
    assert not workload.is_synthetic
    workload.loss().backward()
    assert workload.score() in [right / 8 for right in range(9)]


def test_an_image_that_cannot_be_read_is_named(image_folder: Path) -> None:
    (image_folder / "train" / "n1" / "0.png").write_text("no image")
    with pytest.raises(asyncoll.UsageError, match=r"n1/0.png is not an image that Pillow reads"):
        FolderImages(image_folder, train=True, side=32).read(np.array([0]), None)


# -- navigation ----------------------------------------------------------------------------------


def test_the_maze_is_a_gymnasium_environment() -> None:
    check_env(gymnasium.make(NAME, side=9).unwrapped, skip_render_check=True)


def test_the_shortest_way_has_an_spl_of_one() -> None:
    """A walker that tries all moves in copies of the maze and takes one with a good reward."""
    for seed in range(20):
        taken: list[int] = []
        while True:
            outcomes = [replay(seed, [*taken, move]) for move in range(4)]
            move = max(range(4), key=lambda move: outcomes[move][0])
            taken.append(move)
            reward, is_there, _, info = outcomes[move]
            assert reward == pytest.approx(3.49 if is_there else 0.99)
            if is_there:
                break
        assert info["spl"] == 1.0
        detour = replay(seed, [taken[0], {0: 1, 1: 0, 2: 3, 3: 2}[taken[0]], *taken]) if len(taken) > 1 else None
        assert detour is None or detour[3]["spl"] == pytest.approx(len(taken) / (len(taken) + 2))


def replay(seed: int, moves: list[int]) -> tuple[float, bool, bool, dict[str, Any]]:
    maze = Maze(9)
    maze.reset(seed=seed)
    for move in moves:
        _, reward, is_there, is_over, info = maze.step(np.int64(move))
    return reward, is_there, is_over, info


def test_an_episode_without_success_is_cut() -> None:
    maze = Maze(9)
    maze.reset(seed=1)
    ends = [maze.step(np.int64(0))[2:] for _ in range(36)]
    assert [is_there or is_over for is_there, is_over, _ in ends] == [False] * 35 + [True]
    assert ends[-1] == (False, True, {"spl": 0.0})


def test_rollouts_are_whole_episodes_of_different_length() -> None:
    workload = Navigation(0, 1, 4, 3)
    steps, rollouts = [], 6
    for _ in range(rollouts):
        weights = []
        for _ in range(8):
            workload.loss()
            weights.append(workload.weight)
        for pair in pairwise(weights[::2]):
            assert pair[0] == pair[1]
        steps.append(weights[0] + weights[1])
        assert steps[-1] == len(workload.state_dict()["steps"]["moves"])
    assert len(set(steps)) > 3


def test_the_first_loss_of_a_rollout_is_that_of_the_policy_gradient() -> None:
    """The ratio is 1 there, and the gradient of the policy that of -log π(a|s) A; the values have other parameters."""
    workload = Navigation(0, 1, 4, 3)
    workload.loss().backward()
    assert isinstance(workload.model.policy, torch.nn.Module)
    (half,) = {workload.weight}
    state = workload.state_dict()["steps"]
    rows = torch.from_numpy(np.random.default_rng((3, 0, 1, 0)).permutation(len(state["moves"]))[: int(half)])
    log_probabilities, _ = workload.model(state["observations"][rows])
    mine = log_probabilities.gather(1, state["moves"][rows, None])[:, 0]
    torch.testing.assert_close(mine, state["log_probabilities"][rows])
    every = state["advantages"]
    advantages = (every[rows] - every.mean()) / (every.std() + 1e-5)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=1).mean()
    expected = torch.autograd.grad(
        -(mine * advantages).mean() - 0.01 * entropy, list(workload.model.policy.parameters())
    )
    for parameter, gradient in zip(workload.model.policy.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_advantages_are_those_of_the_sum_by_hand() -> None:
    workload = Navigation(0, 1, 2, 3)
    workload.loss()
    state = workload.state_dict()["steps"]
    seeds = [int(seed) for seed in np.random.SeedSequence((3, 0, 0)).generate_state(3)]
    mazes = [gymnasium.make(NAME, side=9) for _ in range(2)]
    generator = torch.Generator().manual_seed(seeds[0])
    episodes = play(workload.model, mazes, [seed % (1 << 30) for seed in seeds[1:]], generator)
    assert [move for episode in episodes for move in episode.moves] == state["moves"].tolist()
    by_hand, values = [], []
    for episode in episodes:
        errors = [
            reward + 0.99 * after - before
            for reward, before, after in zip(episode.rewards, episode.values, [*episode.values[1:], 0.0], strict=True)
        ]
        for start in range(len(errors)):
            by_hand.append(sum((0.99 * 0.95) ** k * error for k, error in enumerate(errors[start:])))
        values += episode.values
    assert state["advantages"].tolist() == pytest.approx(by_hand, abs=1e-4)
    assert (state["returns"] - state["advantages"]).tolist() == pytest.approx(values, abs=1e-4)


def test_a_rollout_of_one_episode_is_refused() -> None:
    with pytest.raises(asyncoll.UsageError, match="navigation needs a batch of at least 2 episodes, not 1"):
        Navigation(0, 1, 1, 3)
