"""Which files are read, and that the split is by file and stable."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.tiny_model.corpus import (
    MAX_FILE_BYTES,
    SourceFile,
    collect_sources,
    corpus_hash,
    is_held_out,
    split_by_file,
    standard_library_root,
)


def write(root: Path, name: str, content: bytes) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_only_usable_sources_are_collected_in_order(tmp_path: Path) -> None:
    write(tmp_path, "b.py", b"b = 1\n")
    write(tmp_path, "a/z.py", b"z = 1\n")
    write(tmp_path, "a.py", b"a = 1\n")
    write(tmp_path, "same.py", b"a = 1\n")
    write(tmp_path, "empty.py", b" \n")
    write(tmp_path, "latin.py", b"# \xe9\n")
    write(tmp_path, "huge.py", b"#" * (MAX_FILE_BYTES + 1))
    write(tmp_path, "notes.txt", b"text")
    write(tmp_path, "site-packages/other.py", b"c = 1\n")
    write(tmp_path, "_sysconfigdata_linux.py", b"d = 1\n")

    files = collect_sources(tmp_path)

    assert [file.name for file in files] == ["a.py", "a/z.py", "b.py"]


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_without_sources_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(ValueError, match="corpus"):
        collect_sources(tmp_path / name)


def test_the_standard_library_is_a_corpus_of_megabytes() -> None:
    files = collect_sources(standard_library_root())

    assert sum(len(file.text) for file in files) > 5_000_000
    assert "argparse.py" in {file.name for file in files}
    assert not any("site-packages" in file.name for file in files)


@given(st.sets(st.text("abcdef/", min_size=1), min_size=60, max_size=80))
def test_every_file_is_on_exactly_one_side(names: set[str]) -> None:
    files = [SourceFile(name, name) for name in sorted(names)]

    split = split_by_file(files, held_out_permille=500)

    assert sorted(split.train + split.held_out) == files


def test_the_side_of_a_file_does_not_depend_on_other_files() -> None:
    files = [SourceFile(f"module{index}.py", "") for index in range(400)]

    whole, half = split_by_file(files), split_by_file(files[::2])

    assert set(half.held_out) == set(whole.held_out) & set(files[::2])


def test_about_the_asked_share_is_held_out() -> None:
    share = sum(is_held_out(f"module{index}.py", 30) for index in range(10_000))

    assert 200 < share < 400


def test_the_split_is_pinned_so_that_checkpoints_stay_comparable() -> None:
    assert is_held_out("statistics.py", 30)
    assert not is_held_out("argparse.py", 30)


@pytest.mark.parametrize("permille", [0, 1000, -5])
def test_a_share_out_of_range_is_refused(permille: int) -> None:
    with pytest.raises(ValueError, match="held_out_permille"):
        split_by_file([SourceFile("a.py", "a")], permille)


def test_a_corpus_with_an_empty_half_is_refused() -> None:
    with pytest.raises(ValueError, match="one half of the split empty"):
        split_by_file([SourceFile("argparse.py", "a")])


def test_the_hash_tells_names_from_contents() -> None:
    one = corpus_hash([SourceFile("ab", "c")])

    assert one == corpus_hash([SourceFile("ab", "c")])
    assert one != corpus_hash([SourceFile("a", "bc")])
