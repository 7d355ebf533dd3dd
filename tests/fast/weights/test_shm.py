import errno
import os
import signal
import subprocess
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from torchtitan_rl.weights import shm, shm_cleanup
from torchtitan_rl.weights.image import plan_image, read_image, write_image
from torchtitan_rl.weights.shm import SegmentReader, SegmentWriter, SharedMemoryPublisher
from torchtitan_rl.weights.shm_cleanup import remove_leftovers

Usage = namedtuple("Usage", "total used free")


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), value)}


def larger_weights(value: float) -> dict[str, torch.Tensor]:
    """Weights that do not fit into the memory of `weights`."""
    return {"w": torch.full((400,), value)}


def files_under(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def make_publisher(tmp_path: Path) -> SharedMemoryPublisher:
    return SharedMemoryPublisher("run", tmp_path / "run", root=tmp_path / "shm")


def fill_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real_usage = shm.shutil.disk_usage
    monkeypatch.setattr(
        shm.shutil,
        "disk_usage",
        lambda root: Usage(64, 64, 64) if root.name == "shm" else real_usage(root),
    )


def test_at_most_the_current_version_and_the_one_before_exist(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path)
    for version in range(3):
        handle = publisher.publish(version, weights(version))
        assert Path(handle.path).stat().st_size == handle.num_bytes
    assert files_under(tmp_path / "shm") == ["v1.safetensors", "v2.safetensors"]


def test_a_kept_version_stays_readable_until_it_is_kept_no_longer(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path)
    for version in range(2):
        publisher.publish(version, weights(version))
    for version in range(2, 5):
        publisher.publish(version, weights(version), keep=frozenset({1, 77}))
    assert files_under(tmp_path / "shm") == ["v1.safetensors", "v3.safetensors", "v4.safetensors"]
    publisher.publish(5, weights(5))
    assert files_under(tmp_path / "shm") == ["v4.safetensors", "v5.safetensors"]


def test_while_a_version_is_written_only_the_current_one_is_there_and_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make_publisher(tmp_path)
    publisher.publish(0, weights(0))
    publisher.publish(1, weights(1))
    seen: list[list[str]] = []
    write = shm.write_image

    def write_and_look(*args: object) -> None:
        seen.append(files_under(tmp_path / "shm"))
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(shm, "write_image", write_and_look)
    publisher.publish(2, weights(2))
    assert seen == [["v1.safetensors", "v2.unfinished"]]


def test_a_version_whose_writing_failed_leaves_nothing_and_the_current_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make_publisher(tmp_path)
    publisher.publish(0, weights(0))

    def fail(*args: object) -> None:
        raise RuntimeError("lost the device")

    monkeypatch.setattr(shm, "write_image", fail)
    with pytest.raises(RuntimeError, match="lost the device"):
        publisher.publish(1, weights(1))
    assert files_under(tmp_path) == ["v0.safetensors"]


def test_only_memory_without_readers_is_written_again(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path)
    handles = [publisher.publish(version, weights(version)) for version in range(2)]
    first = Path(handles[0].path).stat().st_ino
    assert Path(publisher.publish(2, weights(2)).path).stat().st_ino == first
    second = Path(handles[1].path).stat().st_ino
    held = SegmentReader().image(Path(handles[1].path))
    before = held.clone()
    assert Path(publisher.publish(3, weights(3)).path).stat().st_ino not in (first, second)
    publisher.publish(4, weights(4))
    assert torch.equal(held, before)


def test_a_released_version_cannot_be_read_under_its_old_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that opened the file just before."""
    publisher = make_publisher(tmp_path)
    path = Path(publisher.publish(0, weights(0)).path)
    publisher.publish(1, weights(1))
    lock = shm.fcntl.flock

    def publish_then_lock(descriptor: int, operation: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(shm.fcntl, "flock", lock)
            publisher.publish(2, weights(2))
        lock(descriptor, operation)

    with monkeypatch.context() as patch:
        patch.setattr(shm.fcntl, "flock", publish_then_lock)
        with pytest.raises(FileNotFoundError):
            SegmentReader().image(path)


def test_another_process_writes_into_memory_that_readers_find_only_once_it_is_complete(
    tmp_path: Path,
) -> None:
    publisher, writer = make_publisher(tmp_path), SegmentWriter()
    maps = set()
    for version in range(4):
        layout = plan_image(weights(version), version)
        begun = publisher.begin(layout, frozenset())
        assert begun.path.suffix == ".unfinished"
        image = writer.image(begun.path)  # its own map of the same memory
        maps.add(image.data_ptr())
        write_image(layout, weights(version), image)
        handle = publisher.finish(layout, begun)
        read = read_image(SegmentReader().image(Path(handle.path)), version)
        assert torch.equal(read["w"], weights(version)["w"])
        del read
    assert len(maps) == 2  # both segments are mapped once
    publisher.close()
    assert len(writer._mapped) == 2
    with pytest.raises(FileNotFoundError):
        writer.image(begun.path)
    assert len(writer._mapped) == 0


def test_without_room_in_shared_memory_files_go_to_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make_publisher(tmp_path)
    fill_shared_memory(monkeypatch)
    handle = publisher.publish(0, weights(0))
    assert Path(handle.path).is_relative_to(tmp_path / "run")


def test_room_that_is_taken_between_check_and_write_falls_back_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make_publisher(tmp_path)
    publisher.publish(0, weights(0))
    publisher.publish(1, weights(1))
    reserve = os.posix_fallocate
    calls: list[int] = []

    def reserve_second_time(fd: int, offset: int, length: int) -> None:
        calls.append(length)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(fd, offset, length)

    monkeypatch.setattr(shm.os, "posix_fallocate", reserve_second_time)
    handle = publisher.publish(2, larger_weights(2))
    assert files_under(tmp_path / "run") == ["v2.safetensors"]
    assert files_under(tmp_path / "shm") == ["v1.safetensors"]
    assert Path(handle.path).exists()


def test_only_folders_of_dead_processes_are_removed_at_start(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path)
    mine = Path(publisher.publish(0, weights(0)).path).parent
    child = subprocess.Popen(["true"])
    child.wait()
    base = mine.name.rsplit("-pid", 1)[0]
    dead = [
        mine.with_name(f"{base}-pid{child.pid}-t1"),
        mine.with_name(f"{base}-pid{os.getpid()}-t1"),  # the pid was reused
    ]
    kept = [
        mine,
        mine.with_name(f"torchtitan-rl-run-ns1-pid{child.pid}-t1"),  # of another pid namespace
        mine.with_name("torchtitan-rl-notes"),
        mine.with_name("something-else"),
    ]
    for folder in [*dead, *kept]:
        folder.mkdir(exist_ok=True)
    assert remove_leftovers(mine.parent) == sorted(dead)
    assert sorted(mine.parent.iterdir()) == sorted(kept)


def publish_and_wait_for_a_kill(tmp_path: Path, *, kills_guard: bool = False) -> None:
    """In a separate process, which is killed -9 after publishing."""
    child = os.fork()
    if child == 0:
        try:
            publisher = make_publisher(tmp_path)
            publisher.publish(0, weights(0))
            if kills_guard:
                assert publisher._guard is not None
                publisher._guard._shell.kill()
                publisher._guard._shell.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


def test_files_of_a_killed_publisher_are_removed_without_any_later_run(tmp_path: Path) -> None:
    publish_and_wait_for_a_kill(tmp_path)
    deadline = time.monotonic() + 60.0
    while list((tmp_path / "shm").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_if_the_guard_was_killed_too_the_next_command_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtitan_rl.commands import cli

    publish_and_wait_for_a_kill(tmp_path, kills_guard=True)
    publisher = make_publisher(tmp_path / "another")
    live = Path(publisher.publish(0, weights(0)).path)
    assert files_under(tmp_path / "shm") == ["v0.safetensors"]
    monkeypatch.setattr(shm_cleanup.remove_leftovers, "__defaults__", (tmp_path / "shm",))
    assert cli.main(["unknown command"]) == 2
    assert files_under(tmp_path / "shm") == []
    assert live.exists()


def test_of_another_container_only_unlocked_folders_are_removed(tmp_path: Path) -> None:
    """Its processes are not visible here, but its locks are."""
    name = "torchtitan-rl-run-ns1-pid7-t{}"
    live, dead, new = (tmp_path / name.format(i) for i in range(3))
    lock = shm_cleanup.make_folder(live)
    assert lock is not None
    for folder in (dead, new):
        folder.mkdir()
    for folder in (live, dead):
        os.utime(folder, (0, 0))
    assert remove_leftovers(tmp_path) == [dead]
    os.close(lock)
    assert remove_leftovers(tmp_path) == [live]
    assert list(tmp_path.iterdir()) == [new]
