"""The demo as a user runs it: stopped by Ctrl-C, gone on, judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_ops.demo import launch
from moe_ops.demo.progress import Progress, is_finished, latest
from moe_ops.demo.settings import Refused, Settings

ROOT = Path(__file__).parents[2]
TINY = [
    *("--hidden=32", "--ffn=16", "--layers=1", "--heads=2", "--experts=4", "--batch=4"),
    *("--context=16", "--corpus-megabytes=0.5", "--eval-batches=2", "--eval-every=2"),
    *("--save-every=1", "--device=cpu"),
]
WAIT_S = 120


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    """A demo in a session of its own, as a terminal gives one to a foreground job."""
    return subprocess.Popen(
        [sys.executable, "-m", "moe_ops", "demo", *TINY, "--out", str(out), *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        newest = latest(out / "checkpoints")
        if newest is not None and int(newest.name.removeprefix("step_")) >= step:
            return
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"no step {step} within {WAIT_S} s: {process.communicate()[0]}")


@pytest.mark.dist
def test_demo_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    process = start(tmp_path, "--no-compile", "--steps", "100000")
    wait_for_step(process, tmp_path, 2)
    os.killpg(process.pid, signal.SIGINT)
    text = process.communicate(timeout=WAIT_S)[0]
    assert process.returncode == launch.INTERRUPTED, text

    stopped = latest(tmp_path / "checkpoints")
    assert stopped is not None
    assert not is_finished(stopped)
    before = Progress.read(stopped)
    assert before.step == len(before.loss) >= 2

    process = start(tmp_path, "--no-compile", "--steps", str(before.step + 3))
    text = process.communicate(timeout=WAIT_S)[0]
    assert process.returncode == 0, text
    assert f"going on from {stopped}" in text

    finished = latest(tmp_path / "checkpoints")
    assert finished is not None
    assert is_finished(finished)
    after = Progress.read(finished)
    assert after.step == len(after.loss) == before.step + 3
    assert after.loss[: before.step] == before.loss
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["validation_loss"] == metrics["validation_loss_reloaded"]
    for name in ("loss.png", "experts.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.dist
def test_workers_stop_when_the_parent_is_gone(tmp_path: Path) -> None:
    process = start(tmp_path, "--no-compile", "--steps", "100000")
    wait_for_step(process, tmp_path, 1)
    process.kill()
    # The pipe closes when its last writer, a worker, has ended.
    process.communicate(timeout=WAIT_S)
    newest = latest(tmp_path / "checkpoints")
    assert newest is not None
    assert Progress.read(newest).step == int(newest.name.removeprefix("step_"))


def test_settings_refuse_what_cannot_work() -> None:
    with pytest.raises(Refused, match="experts must be a multiple of 3, got 8"):
        Settings(world_size=3)
    with pytest.raises(Refused, match="steps must be at least 1, got 0"):
        Settings(steps=0)
    with pytest.raises(Refused, match="hidden must be a multiple of 6, got 100"):
        Settings(hidden=100, heads=3)


@pytest.mark.parametrize(
    ("layout", "sizes", "message"),
    [
        ("tp=2,ep=2", {}, "must not name tp: the demo splits no weights of attention"),
        ("pp=2", {}, "must not name pp: the demo splits no stages"),
        ("dp=2", {}, "at most once, such as ep=2,cp=2, got 'dp=2' in 'dp=2'"),
        ("ep=2,ep=2", {}, "at most once, such as ep=2,cp=2, got 'ep=2' in 'ep=2,ep=2'"),
        ("ep=0", {}, "positive sizes, .*, got 'ep=0'"),
        ("ep", {}, "positive sizes, .*, got 'ep' in 'ep'"),
        ("ep=2,", {}, "positive sizes, .*, got '' in 'ep=2,'"),
        ("ep=2,etp=4", {}, "world_size must be a multiple of 8, got 4; 8 = ep \\* etp"),
        ("cp=3", {}, "world_size must be a multiple of 3, got 4; 3 = cp"),
        ("ep=4", {"experts": 6}, "experts must be a multiple of 4, got 6; 4 = ep"),
        ("etp=4", {"ffn": 6}, "ffn must be a multiple of 4, got 6; 4 = etp"),
        ("cp=2", {"batch": 3}, "batch must be a multiple of 2, got 3; 2 = world_size / cp"),
        ("cp=4", {"context": 12}, "context must be a multiple of 8, got 12; 8 = 2 \\* cp"),
    ],
)
def test_layouts_that_do_not_fit(layout: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(Refused, match=f"^demo: .*{message}"):
        Settings(world_size=4, layout=layout, **sizes)


def test_layout_waits_for_the_world_size() -> None:
    layout = Settings(layout="ep=2,cp=2", batch=1, device="cpu").resolved().parallel_layout()
    assert (layout.world, layout.dp, layout.ep, layout.edp) == (2, 1, 2, 1)
    assert Settings(world_size=4).parallel_layout().ep == 4
    with pytest.raises(Refused, match="world_size must be a multiple of 4, got 2; 4 = cp"):
        Settings(layout="cp=4", device="cpu").resolved()


def test_resume_refuses_another_model(tmp_path: Path) -> None:
    settings = Settings(out=str(tmp_path))
    checkpoint = settings.checkpoints / "step_00000007"
    checkpoint.mkdir(parents=True)
    Progress(identity=settings.identity()).write(checkpoint)
    assert launch._checkpoint_to_resume(settings) == checkpoint
    other = Settings(out=str(tmp_path), world_size=4, layout="ep=2,cp=2")
    assert launch._checkpoint_to_resume(other) == checkpoint

    with pytest.raises(Refused, match="hidden must be 96 to go on from"):
        launch._checkpoint_to_resume(Settings(out=str(tmp_path), hidden=192))
    assert launch._checkpoint_to_resume(Settings(out=str(tmp_path), fresh=True)) is None
    assert not checkpoint.exists()


@pytest.mark.parametrize(
    ("loss", "without_experts", "reloaded", "difference", "num_failures"),
    [
        pytest.param(1.7, 2.0, 1.7, 1e-6, 0, id="good"),
        pytest.param(2.1, 2.5, 2.1, 1e-6, 1, id="loss"),
        pytest.param(1.7, 1.75, 1.7, 1e-6, 1, id="experts"),
        pytest.param(1.7, 2.0, 1.8, 1e-6, 1, id="reload"),
        pytest.param(1.7, 2.0, 1.7, 1e-2, 1, id="compile"),
        pytest.param(float("nan"), 2.0, float("nan"), float("nan"), 4, id="nan"),
    ],
)
def test_judgement(
    loss: float, without_experts: float, reloaded: float, difference: float, num_failures: int
) -> None:
    metrics = {
        "validation_loss": loss,
        "validation_loss_without_experts": without_experts,
        "validation_loss_reloaded": reloaded,
        "compiled_against_eager": difference,
        "compiled_against_eager_tensor": "loss",
    }
    assert len(launch._print_and_judge(Settings(), metrics)) == num_failures
