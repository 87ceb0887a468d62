"""The profile store is a cache: it keeps what it can and never stands in the way."""

from pathlib import Path

import pytest
import torch

from lowtide.run.store import ProfileStore, machine_key


def test_text_survives_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "profile.sqlite"
    ProfileStore(file).write("key", "text")
    assert ProfileStore(file).read("key") == "text"
    assert ProfileStore(file).read("other") is None


def test_remembered_text_stays_in_memory(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "profile.sqlite")
    store.remember("key", "text")
    assert store.read("key") == "text"
    assert ProfileStore(tmp_path / "profile.sqlite").read("key") is None


def test_unusable_file_is_replaced_by_memory(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory, no database")
    for path in (blocked / "profile.sqlite", blocked):
        store = ProfileStore(path)
        store.write("key", "text")
        assert store.read("key") == "text"


def test_key_depends_on_threads_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine_key("facts", "a")
    assert machine_key("facts", "a") == here != machine_key("facts", "b")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert machine_key("facts", "a") != here
