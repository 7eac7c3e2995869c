"""The scripts behind `make setup`: layers, locks, rebuilds, and whose code runs.

The shared layer is the environment that runs these tests; clones and their layers are
made for real, in temporary folders.
"""

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "configs" / "environment"
MODULES = ("layout", "runner", "shared", "overlay", "bootstrap")

PYPROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm-mtp"
version = "0.0.1"
[project.entry-points."vllm.general_plugins"]
mtp_plus = "vllm_mtp.plugin_of_{name}:register"
[tool.setuptools.packages.find]
include = ["vllm_mtp*"]
"""

WHO_RUNS = """
import importlib.metadata, vllm_mtp, torch
(plugin,) = [each for each in importlib.metadata.entry_points(
    group="vllm.general_plugins") if each.name == "mtp_plus"]
print(vllm_mtp.NAME, plugin.value)
"""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules of configs/environment, imported as the Makefile runs them."""
    monkeypatch.syspath_prepend(SCRIPTS)
    modules: dict[str, ModuleType] = {}
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
        modules[name] = importlib.import_module(name)
    yield SimpleNamespace(**modules)
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture
def heavy_environment() -> Path:
    """Root of the virtual environment that holds torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[4]


def make_clone(folder: Path, name: str) -> Path:
    clone = folder / name
    (clone / "vllm_mtp").mkdir(parents=True)
    (clone / "vllm_mtp" / "__init__.py").write_text(f"NAME = {name!r}\n")
    (clone / "pyproject.toml").write_text(PYPROJECT.format(name=name))
    return clone


def run_in(layout: Any, *command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, cwd="/", timeout=120, check=True
    )
    assert layout.clone.is_dir()
    return done.stdout.strip()


def test_two_clones_share_the_packages_and_never_each_others_code(
    scripts: Any, heavy_environment: Path, tmp_path: Path
) -> None:
    layouts = [
        scripts.layout.Layout(
            make_clone(tmp_path, name), "cpu", heavy_environment, tmp_path / f"v-{name}"
        )
        for name in ("first", "second")
    ]
    for layout in layouts:
        scripts.overlay.ensure_overlay(layout)
    for layout, name in zip(layouts, ("first", "second"), strict=True):
        who = run_in(layout, str(layout.python), "-c", WHO_RUNS)
        assert who == f"{name} vllm_mtp.plugin_of_{name}:register"


def test_commands_of_the_shared_packages_run_with_the_clones_interpreter(
    scripts: Any, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / ("long" * 40)
    source.mkdir()
    target.mkdir()
    (target / "python").symlink_to(sys.executable)
    (source / "short").write_text("#!/elsewhere/bin/python3\nimport sys\nprint('s')\n")
    (source / "long").write_text(
        "#!/bin/sh\n'''exec' \"/elsewhere/bin/python\" \"$0\" \"$@\"\n' '''\nprint('l')"
    )
    (source / "binary").write_bytes(b"\x7fELF")
    (source / "kept").write_text("#!/elsewhere/bin/python3\n")
    (target / "kept").write_text("mine")
    scripts.overlay.link_commands(source, target)
    for name, output in (("short", "s"), ("long", "l")):
        done = subprocess.run([target / name], capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (0, output), done.stderr
    assert (target / "binary").resolve() == source / "binary"
    assert (target / "kept").read_text() == "mine"


@pytest.fixture
def finished(scripts: Any, heavy_environment: Path, tmp_path: Path) -> Any:
    """A clone with its layer built."""
    clone = make_clone(tmp_path, "clone")
    layout = scripts.layout.Layout(clone, "cpu", heavy_environment, tmp_path / "v")
    scripts.overlay.ensure_overlay(layout)
    return layout


def test_a_second_set_up_touches_nothing(scripts: Any, finished: Any) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.clone.rglob("*")}
    scripts.overlay.ensure_overlay(finished)
    after = {path: path.stat().st_mtime_ns for path in finished.clone.rglob("*")}
    assert after == before


def test_changed_metadata_is_installed_again_in_the_same_layer(
    scripts: Any, finished: Any
) -> None:
    witness = finished.clone / "somebody-works-here"
    witness.touch()
    (finished.repo / "pyproject.toml").write_text(PYPROJECT.format(name="other"))
    scripts.overlay.ensure_overlay(finished)
    who = run_in(finished, str(finished.python), "-c", WHO_RUNS)
    assert who == "clone vllm_mtp.plugin_of_other:register"
    assert witness.exists()


def test_changed_native_sources_are_noticed(scripts: Any, finished: Any) -> None:
    (finished.repo / "csrc").mkdir()
    (finished.repo / "csrc" / "rollback.cpp").write_text("int x;\n")
    assert not scripts.overlay.is_complete(finished)


def test_a_fresh_clone_at_the_path_of_a_deleted_one_is_installed(
    scripts: Any, finished: Any
) -> None:
    shutil.rmtree(finished.repo)
    make_clone(finished.repo.parent, "clone")
    assert not scripts.overlay.is_complete(finished)
    scripts.overlay.ensure_overlay(finished)
    assert scripts.overlay.is_complete(finished)


def test_an_interrupted_layer_is_built_anew(scripts: Any, finished: Any) -> None:
    (finished.clone / scripts.layout.MARKER).unlink()
    rubbish = finished.clone / "rubbish"
    rubbish.touch()
    scripts.overlay.ensure_overlay(finished)
    assert scripts.overlay.is_complete(finished)
    assert not rubbish.exists()


def test_a_shared_layer_without_marker_or_interpreter_is_incomplete(
    scripts: Any, tmp_path: Path
) -> None:
    layout = scripts.layout.Layout(tmp_path, "cpu", tmp_path / "e", tmp_path / "c")
    (layout.shared / "bin").mkdir(parents=True)
    interpreter = layout.shared / "bin" / "python"
    interpreter.symlink_to(sys.executable)
    assert not scripts.shared.is_complete(layout)
    (layout.shared / scripts.layout.MARKER).write_text("{}")
    assert scripts.shared.is_complete(layout)
    interpreter.unlink()
    interpreter.symlink_to("/no/such/python")
    assert not scripts.shared.is_complete(layout)


def test_the_cache_folder_follows_xdg_and_both_layers_are_in_it(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one = scripts.layout.resolve_layout("cpu", tmp_path / "one")
    two = scripts.layout.resolve_layout("cpu", tmp_path / "two")
    gpu = scripts.layout.resolve_layout("gpu", tmp_path / "one")
    assert {one.shared.parent, one.clone.parent} == {tmp_path / "vllm-mtp"}
    assert one.shared == two.shared != gpu.shared
    assert len({one.clone, two.clone, gpu.clone}) == 3


def test_a_changed_requirement_is_another_shared_layer(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "environment"
    shutil.copytree(SCRIPTS, copy)
    monkeypatch.setattr(scripts.layout, "HERE", copy)
    before = scripts.layout.resolve_layout("cpu").shared
    with (copy / "dev.txt").open("a") as requirements:
        requirements.write("one-more\n")
    assert scripts.layout.resolve_layout("cpu").shared != before


def test_a_machine_without_a_gpu_can_only_get_the_cpu_build_of_torch() -> None:
    lines = [
        line
        for name in ("torch-cpu.txt", "constraints-cpu.txt")
        for line in (SCRIPTS / name).read_text().splitlines()
    ]
    assert {line for line in lines if line.startswith("torch==")} == {
        "torch==2.13.0+cpu"
    }
    assert not [line for line in lines if line.startswith(("nvidia", "cuda"))]


def test_commands_get_one_thread_unless_the_user_says_otherwise(
    scripts: Any, tmp_path: Path
) -> None:
    layout = scripts.layout.Layout(tmp_path, "cpu", tmp_path / "e", tmp_path / "c")
    environ = {"PATH": "/bin"}
    scripts.bootstrap.prepare_environ(layout, environ)
    assert environ["OMP_NUM_THREADS"] == "1"
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environ["PATH"] == f"{tmp_path}/c/bin:/bin"
    chosen = {"OMP_NUM_THREADS": "4"}
    scripts.bootstrap.prepare_environ(layout, chosen)
    assert chosen["OMP_NUM_THREADS"] == "4"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in chosen


def test_intels_openmp_is_preloaded_once_and_beside_what_the_user_preloads(
    scripts: Any, tmp_path: Path
) -> None:
    layout = scripts.layout.Layout(tmp_path, "cpu", tmp_path / "e", tmp_path / "c")
    environ = {"LD_PRELOAD": "/mine.so"}
    scripts.bootstrap.prepare_environ(layout, environ)
    assert environ["LD_PRELOAD"] == "/mine.so"
    layout.openmp_library.parent.mkdir(parents=True)
    layout.openmp_library.touch()
    for _ in range(2):
        scripts.bootstrap.prepare_environ(layout, environ)
    assert environ["LD_PRELOAD"] == f"{layout.openmp_library}:/mine.so"


def test_a_failed_step_shows_the_end_of_its_log_and_names_the_file(
    scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "setup.log"
    steps = scripts.runner.Steps(3, log)
    steps.announce("doomed")
    with pytest.raises(scripts.runner.SetupError, match=r"step 1/3 .* exit code 7"):
        steps.run([sys.executable, "-c", "print('reason'); raise SystemExit(7)"])
    assert "  | reason" in capsys.readouterr().err
    assert "reason" in log.read_text()


def test_only_one_set_up_at_a_time(scripts: Any, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    order: list[str] = []

    def second() -> None:
        with scripts.runner.exclusive(lock):
            order.append("second")

    thread = threading.Thread(target=second)
    with scripts.runner.exclusive(lock):
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join(timeout=10)
    assert order == ["first", "second"]


def test_a_python_that_is_only_a_stub_is_passed_over(tmp_path: Path) -> None:
    for name, line in (
        ("python3", "exit 127"),
        ("python3.12", 'exec "$REAL" "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", SCRIPTS / "find_python"],
        env={"PATH": str(tmp_path), "REAL": os.path.realpath(sys.executable)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "python3.12"))


@pytest.mark.parametrize(
    ("arguments", "path"),
    [([], "/no/where"), (["/no/such/python"], os.environ["PATH"])],
)
def test_no_python_is_one_sentence_also_when_the_user_named_it(
    arguments: list[str], path: str
) -> None:
    done = subprocess.run(
        ["/bin/sh", SCRIPTS / "find_python", *arguments],
        env={"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("setup: error: no Python >= 3.11")
    assert done.stderr.count("\n") == 1
